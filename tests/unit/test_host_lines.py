"""effllm/job/host_lines.py and its text: which line of code is named for a loss."""

import msgspec
import pytest
from cases import cases

from effllm.commands.inspect import host_lines
from effllm.job.host_lines import MAX_RANKS, MIN_SAMPLES, HostLines, place_text, place_text_of_slow, share_interval
from effllm.records.host_lines import CodeLine
from effllm.records.wire import HostSamples


def summary(*lines, rank=0, torn=0):
    found = HostLines()
    found.add_samples(HostSamples("agent", rank, sum(one.samples for one in lines), torn, lines))
    return found.summary()


SLOW = CodeLine("tokenization", "collate (data.py:41)", "encode", 61)
ENCODE = "was in encode, called in collate (data.py:41)"
TORCH = "was in functions of torch, which start kernels"
WAITED = "waited for the device, most in item (probably), called in norm (train.py:30)"


def line(kind, samples, place="step (train.py:9)", function="f", **changes):
    return CodeLine(kind, place, function, samples, **changes)


def slow(samples):
    return msgspec.structs.replace(SLOW, samples=samples)


WAITS = line("device", 100, "norm (train.py:30)", "item (probably)")


@cases(
    ("lines", "cause", "percent", "samples", "text"),
    [
        ([SLOW, line("forward", 39), line("device", 390)], "device_idle", 61, 100, ENCODE),
        # torch is named for an idle device only if the host does hardly anything else
        ([line("compute", 300), SLOW], "device_idle", 83, 361, TORCH),
        ([line("compute", 300), slow(90)], "device_idle", 100, 90, ENCODE),
        ([line("compute", 300), slow(60)], "between_iterations", 100, 60, ENCODE),
        # and so is a line that waits for the device
        ([WAITS, line("compute", 90), slow(10)], "device_idle", 50, 200, WAITED),
        ([WAITS], "device_idle", 100, 100, WAITED),
        ([WAITS, line("compute", 90), SLOW], "device_idle", 100, 61, ENCODE),
        ([line("device", 500), slow(10), SLOW], "device_idle", 100, 71, ENCODE),  # 10 % of all, and most of the others
        ([line("device", 9), line("compute", 90)], "device_idle", 91, 99, TORCH),
        # several functions of one line, and several lines of one function that calls nothing
        ([line("data", 20), line("data", 25, function="g"), line("data", 30, "a (b.py:1)")], "data_loading", 60, 75,
         "was in g, called in step (train.py:9)"),
        ([*(line("data", 10, f"f (data.py:{at})", "") for at in (7, 12, 9)), line("data", 10)], "data_loading", 75, 40,
         "was in f (data.py:7-12)"),
        ([SLOW, line("checkpoint", 40)], "checkpoint", 100, 40, "was in f, called in step (train.py:9)"),
    ],
)  # fmt: skip
def test_line_with_the_most_samples_of_the_loss_is_named(lines, cause, percent, samples, text):
    assert place_text(summary(*lines), cause) == f"in {percent} % of {samples} samples the host {text}"


@cases(
    ("lines", "cause"),
    [
        ([line("ranks", 100), slow(10)], "device_idle"),
        ([line("data", MIN_SAMPLES - 1), line("compute", 1000)], "data_loading"),  # few samples of the loss
        ([line("data", 10, f"f{at} (data.py:{at})") for at in range(10)], "data_loading"),  # few in each line
        *(([SLOW], cause) for cause in ("straggler", "evaluation", "healthy", "unknown", "")),
    ],
)
def test_no_line_is_named_for_few_samples_and_other_causes(lines, cause):
    assert place_text(summary(*lines), cause) == place_text(None, cause) == ""


@cases(
    ("share", "data", "text"),
    [
        (0.45, [], "in 100 % of 80 samples the host was in rows (corpus.py:33)"),
        # A wait of 5 % of the time has 9 of 180 samples: the 80 are in the step.
        (0.05, [], ""),
        (0.05, [line("data", 7, "<module> (train.py:8)", "select")], ""),
    ],
)
def test_loop_that_fetches_its_batches_itself_is_named_for_waits_for_data(share, data, text):
    own = line("other", 80, "rows (corpus.py:33)", "")

    assert place_text(summary(own, line("compute", 100), *data), "data_loading", share) == text


@pytest.mark.parametrize(
    "line", ["f", "f (a.py:)", "f (a.py:-3)", "f (a.py:" + "9" * 99 + ")", ":)", "f (a.py:\u00b2)"]
)
def test_a_line_without_a_number_is_shown_as_it_is(line):
    assert place_text(summary(CodeLine("data", line, "", 40)), "data_loading").endswith(f"was in {line}")


def test_only_the_additional_samples_of_long_iterations_count_for_them():
    found = summary(line("other", 100, "refresh (train.py:5)", "", long=60), line("backward", 400))

    text = "in 100 % of 60 samples of long iterations the host was in refresh (train.py:5)"
    assert place_text(found, "slow_iterations") == text
    assert next(host_lines(found, "slow_iterations")) == "where the host was, in 60 of 500 samples of rank 0:"


def test_waits_for_dataloader_workers_name_the_line_of_a_worker():
    found = HostLines()
    found.add_samples(HostSamples("agent", 0, 100, 0, (CodeLine("data", "<module> (train.py:3)", "select", 100),)))
    worker = CodeLine("worker", "tokenize (data.py:9)", "", 80), CodeLine("worker", "pad (data.py:30)", "", 20)
    found.add_samples(HostSamples("agent", 0, 100, 0, worker, is_worker=True))

    summary = found.summary()
    assert (summary.samples, summary.by_rank) == (100, {0: 100})
    assert place_text(summary, "data_loading") == (
        "in 80 % of 100 samples a DataLoader worker was in tokenize (data.py:9)"
    )
    assert next(host_lines(summary, "data_loading")) == "where a DataLoader worker was, in 100 samples of rank 0:"
    assert place_text(summary, "device_idle").endswith("the host was in select, called in <module> (train.py:3)")


def test_recordings_add_up_and_ranks_are_limited():
    found = HostLines()
    for rank in range(MAX_RANKS + 4):
        found.add_samples(HostSamples("agent", rank, 10, 1, (CodeLine("data", "load (data.py:7)", "", 10),)))

    summary = found.summary()
    assert (summary.samples, summary.torn, len(summary.by_rank)) == (10 * MAX_RANKS, MAX_RANKS, MAX_RANKS)
    assert summary.lines == (
        CodeLine("data", "load (data.py:7)", "", 10 * MAX_RANKS, dict.fromkeys(range(MAX_RANKS), 10)),
    )


def test_reason_of_a_failed_recording_is_kept_without_samples():
    found = HostLines()
    found.add_samples(HostSamples("agent", 0, failed="py-spy is not installed"))

    assert (found.summary(), found.failed) == (None, "py-spy is not installed")


def test_text_has_the_samples_the_interval_and_the_lines():
    assert list(host_lines(summary(SLOW, line("device", 39), torn=2), "device_idle")) == [
        "where the host was, in 61 of 100 samples of rank 0 (2 torn):",
        " 100 % (94 to 100)  encode, called in collate (data.py:41)",
    ]
    assert list(host_lines(summary(line("data", 3)), "data_loading")) == []
    assert list(host_lines(summary(SLOW), "straggler")) == []


def test_interval_of_a_share_contains_it_and_stays_inside_of_zero_and_one():
    for of in (1, 30, 1000):
        for count in (0, 1, of // 2, of):
            least, most = share_interval(count, of)
            assert -1e-12 <= least <= count / of <= most <= 1 + 1e-12


def of_ranks(*shares, samples=200):
    """Return the samples of ranks that are in one line for a share of their samples, and else in another one."""
    found = HostLines()
    for rank, share in enumerate(shares):
        count = round(share * samples)
        lines = line("other", count, "log_grads (train.py:120)", ""), line("backward", samples - count)
        found.add_samples(HostSamples("agent", rank, samples, 0, lines))
    return found.summary()


@cases(
    ("shares", "rank", "others"),
    [
        ((0.02, 0.02, 0.44), 2, "rank 0,1 in 2 %"),
        ((0.44, *[0.02] * 7), 0, "7 ranks in 2 %"),
    ],
)
def test_line_of_a_slow_rank_is_the_one_with_more_samples_than_its_peers(shares, rank, others):
    text = f"rank {rank} is in log_grads (train.py:120) in 44 % of the samples, {others}"
    assert place_text_of_slow(of_ranks(*shares), [rank]) == text


@pytest.mark.parametrize("shares", [(0.40, 0.44), (0.02, 0.05)])
def test_no_line_is_named_for_small_differences_of_ranks(shares):
    assert place_text_of_slow(of_ranks(*shares), [1]) == ""
    assert place_text_of_slow(of_ranks(*shares[:1]), [0]) == "", "no peer was recorded"
    assert place_text_of_slow(of_ranks(*shares, samples=20), [1]) == ""
    assert place_text_of_slow(None, [1]) == ""
