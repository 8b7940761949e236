"""Figures that fail the audit are marked in every output."""

from pathlib import Path

import pytest
from audited import AuditedJob
from msgspec.structs import replace
from sink_examples import make_report, make_summary

from effllm.records.framework_figures import MFU_RATIO, TOKENS_PER_S_PER_GPU
from effllm.records.verdict import Audit, ComparedFigure
from effllm.server.messages import published_values
from effllm.sinks import job_values, tensorboard
from effllm.views.text.closing import closing_text, facts_of
from effllm.views.text.summary import summary_text
from effllm.views.text.window import block_lines

DOUBT = "rank 0 counted 2,000 tokens without padding in 1,000 positions: the counts of tokens are wrong"
TAG = "tt_tokens_per_param_per_sec"


RATE = ComparedFigure(TOKENS_PER_S_PER_GPU, framework=358.0, own=1024.0, factor=0.35, windows=12)


def in_doubt(*doubtful):
    """Return a summary whose values with these tags are in doubt."""
    summary = make_summary()
    values = {tag: replace(one, doubt=DOUBT) if tag in doubtful else one for tag, one in summary.metrics.items()}
    return replace(summary, metrics=values, audit=Audit(doubts=(DOUBT,)))


def lines_with(text, name):
    return [line for line in text.splitlines() if name in line]


def test_summary_text_marks_values_in_doubt_and_states_the_check():
    summary = in_doubt(TAG)
    text = summary_text(summary, facts_of(summary))
    assert [line[:2] for line in lines_with(text, "tokens_per_param_per_sec")] == ["! "]
    assert [line[:2] for line in lines_with(text, " al_seconds")] == ["  "]
    assert "  !: in doubt, because a check of the counts failed, or a part of the counts is missing\n" in text
    assert "IN DOUBT: rank 0 counted 2,000 tokens" in text


def test_summary_text_has_figures_that_differ_with_their_factor():
    mfu = ComparedFigure(MFU_RATIO, framework=1.56, own=0.195, factor=8.0, windows=12)
    summary = replace(make_summary(), audit=Audit(figures=(mfu, RATE)))
    text = summary_text(summary, facts_of(summary))
    assert (
        "  Doubt         MFU: framework 156 %, effllm 19.5 %, factor 8.00; tokens/s per\n"
        "                GPU: framework 358, effllm 1,024, factor 0.350\n"
    ) in text
    assert "in doubt" not in text


def test_closing_table_has_a_line_about_the_audit():
    folder = Path("/runs/one")
    one = closing_text(replace(make_summary(), audit=Audit(figures=(RATE,))), folder, None)
    two = closing_text(replace(make_summary(), audit=Audit(figures=(RATE,), doubts=(DOUBT,))), folder, None)
    clean = closing_text(replace(make_summary(), audit=Audit()), folder, None)
    stated = "tokens/s per GPU: framework 358, effllm 1,024, factor 0.350"
    assert lines_with(one, "  Doubt ") == [f"  Doubt    {stated}"]
    assert lines_with(two, "  Doubt ") == [f"  Doubt    IN DOUBT: {DOUBT}; {stated}"]
    assert lines_with(clean, "  Doubt ") == []


def test_closing_table_marks_values_in_doubt():
    text = closing_text(in_doubt(TAG, "run_throughput/tokens_per_second_per_gpu"), None, None)
    assert " TT! " in text
    assert "tokens/s per GPU (in doubt)" in text
    assert " AL " in text


def test_window_names_the_number_of_values_in_doubt():
    report = replace(make_report(100), doubtful=(TAG, "throughput/tokens_per_second"))
    assert "2 values in doubt" in "\n".join(block_lines(report))
    assert "doubt" not in "\n".join(block_lines(make_report(100)))


@pytest.mark.parametrize(("doubtful", "value"), [((), None), ((TAG,), 1)])
def test_charts_have_the_number_of_values_in_doubt(doubtful, value):
    report = replace(make_report(100), doubtful=doubtful)
    assert published_values(report).get("health/doubtful_values") == value  # W&B and Trackio, in the training process
    assert tensorboard._other_values(report).get("health/doubtful_values") == value
    assert job_values(report).get("doubtful_values") == value  # of the sinks prometheus and otlp


def test_values_of_a_summary_name_the_check():
    found = AuditedJob().windows(2, tokens=2000).summary()
    assert found.metrics[TAG].doubt == found.audit.doubts[0]
    assert found.metrics["al_seconds"].doubt is None
