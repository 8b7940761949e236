"""``effllm inspect RUN --mail``: a text for the user of a job."""

import msgspec
import pytest
from sink_examples import complete_totals, make_report, make_summary, values_of
from typer.testing import CliRunner

from effllm.commands.app import app
from effllm.commands.inspect import MAIL_LINES, MAIL_WIDTH, mail_text
from effllm.records.job import Coverage
from effllm.records.verdict import OF_GPUS, Verdict, Waterfall, WaterfallPart

WHY = "in 61 % of samples the host was in tokenizer.encode, called in load (data.py:41)"
PARTS = (
    WaterfallPart("device_idle", 3600.0, 0.25, None, False, None, None),
    WaterfallPart("steps", 10_800.0, 0.75, None, False, None, None),
)


def summary(**changes):
    report = make_report(100, run=complete_totals(), last=complete_totals(), job=complete_totals())
    known = {
        "job_id": "77", "job_name": "pretrain", "user": "alice", "account": "nlp", "partition": "gpu",
        "hosts": ("n1", "n2"), "host_count": 2, "gpu_models": ("NVIDIA H100 80GB HBM3",), "elapsed_s": 7980.0,
        "coverage": Coverage(16, 16, 16, 16, 0, 0), "metrics": values_of(report),
        "waterfall": Waterfall(14_400.0, None, PARTS, OF_GPUS),
        "verdict": Verdict("device_idle", "device idle: 25 % of GPU time", WHY, "tokenize before the training", 0.33,
                           "high"),
    }  # fmt: skip
    return make_summary(**{**known, **changes})


def test_text_has_the_job_its_use_of_gpus_and_the_next_step():
    text = mail_text(summary())

    for line in (
        "Job ID: 77, pretrain",
        "User: alice, account: nlp, partition: gpu",
        "State: completed after 2 h 13 min",
        "Nodes: 2 (n1, n2), 16 GPUs (NVIDIA H100 80GB HBM3)",
        "GPU-hours: 4.00, of which 1.00 were avoidable losses (parts: effllm inspect)",
        "Verdict: device idle: 25 % of GPU time",
        "Next: tokenize before the training",
    ):
        assert f"{line}\n" in text
    assert "\nGPUs busy   [|||||||" in text


@pytest.mark.parametrize(
    "changes", [{}, {"verdict": None, "user": None}, {"simulated": True}, {"hosts": ("h" * 90,) * 9}]
)
def test_text_has_at_most_15_lines_of_78_letters(changes):
    long = Verdict("device_idle", 40 * "text ", 90 * "why ", 90 * "next ", 0.1, "high")
    lines = mail_text(summary(**{"verdict": long, **changes})).splitlines()

    assert len(lines) <= MAIL_LINES
    assert max(map(len, lines)) <= MAIL_WIDTH


def test_command_prints_the_text(tmp_path):
    (tmp_path / "summary.json").write_bytes(msgspec.json.encode(summary()))
    done = CliRunner().invoke(app, ["inspect", str(tmp_path), "--mail"])

    assert (done.exit_code, done.output) == (0, mail_text(summary()))
    assert CliRunner().invoke(app, ["inspect", str(tmp_path), "--mail", "--json"]).exit_code == 2
