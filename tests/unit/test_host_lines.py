"""effllm/job/host_lines.py and its text: which line of code is named for a loss."""

import msgspec
import pytest

from effllm.commands.inspect import host_lines
from effllm.job.host_lines import MAX_RANKS, MIN_SAMPLES, HostLines, share_interval, where, where_slow
from effllm.records.host_lines import CodeLine
from effllm.records.wire import HostSamples


def summary(*lines, rank=0, torn=0):
    found = HostLines()
    found.add_samples(HostSamples("agent", rank, sum(one.samples for one in lines), torn, lines))
    return found.summary()


SLOW = CodeLine("tokenization", "collate (data.py:41)", "encode", 61)


def test_line_with_the_most_samples_of_the_loss_is_named():
    found = summary(
        SLOW, CodeLine("forward", "step (train.py:9)", "Linear.forward", 39), CodeLine("device", "a (b.py:1)", "", 390)
    )

    assert where(found, "device_idle") == (
        "in 61 % of 100 samples the host was in encode, called in collate (data.py:41)"
    )


def test_torch_is_named_for_an_idle_device_only_if_the_host_does_hardly_anything_else():
    torch = CodeLine("compute", "step (train.py:9)", "_engine_run_backward", 300)
    few = msgspec.structs.replace(SLOW, samples=60)

    assert where(summary(torch, SLOW), "device_idle") == (
        "in 83 % of 361 samples the host was in functions of torch, which start kernels"
    )
    assert where(summary(torch, msgspec.structs.replace(SLOW, samples=90)), "device_idle").startswith(
        "in 100 % of 90 samples the host was in encode"
    )
    assert "_engine_run_backward" not in where(summary(torch, few), "between_iterations")


def test_line_that_waits_for_the_device_is_named_if_the_host_does_hardly_anything_else():
    waits = CodeLine("device", "norm (train.py:30)", "item (probably)", 100)
    torch, few = CodeLine("compute", "step (train.py:9)", "f", 90), msgspec.structs.replace(SLOW, samples=10)

    assert where(summary(waits, torch, few), "device_idle") == (
        "in 50 % of 200 samples the host waited for the device, most in item (probably), called in norm (train.py:30)"
    )
    assert where(summary(waits, torch, SLOW), "device_idle").startswith("in 100 % of 61 samples the host was in encode")
    most = msgspec.structs.replace(waits, samples=500)  # SLOW has 10 % of all samples, and most of the others
    assert where(summary(most, few, SLOW), "device_idle").startswith("in 100 % of 71 samples the host was in encode")
    assert where(summary(msgspec.structs.replace(waits, samples=9), torch), "device_idle").endswith("start kernels")
    assert where(summary(CodeLine("ranks", "step (train.py:9)", "", 100), few), "device_idle") == ""
    assert where(summary(waits), "device_idle").startswith("in 100 % of 100 samples the host waited for the device")


def test_samples_of_one_line_with_several_functions_are_its_own():
    found = summary(
        CodeLine("data", "load (data.py:7)", "read", 20),
        CodeLine("data", "load (data.py:7)", "decode", 25),
        CodeLine("data", "other (data.py:9)", "", 30),
    )

    assert where(found, "data_loading") == "in 60 % of 75 samples the host was in decode, called in load (data.py:7)"


def test_loop_that_fetches_its_batches_itself_is_named_for_waits_for_data():
    own, step = CodeLine("other", "rows (corpus.py:33)", "", 80), CodeLine("compute", "step (train.py:9)", "f", 100)

    assert where(summary(own, step), "data_loading", 0.45) == (
        "in 100 % of 80 samples the host was in rows (corpus.py:33)"
    )
    # A wait of 5 % of the time has 9 of 180 samples: the 80 are in the step.
    data = CodeLine("data", "<module> (train.py:8)", "select", 7)
    assert (
        where(summary(own, step, data), "data_loading", 0.05) == where(summary(own, step), "data_loading", 0.05) == ""
    )


@pytest.mark.parametrize("cause", ["straggler", "evaluation", "healthy", "unknown", ""])
def test_no_line_is_named_for_other_causes(cause):
    assert where(summary(SLOW), cause) == ""
    assert list(host_lines(summary(SLOW), cause)) == []


def test_line_that_saves_is_named_for_checkpoints():
    found = summary(SLOW, CodeLine("checkpoint", "save (train.py:30)", "_save", 40))

    assert where(found, "checkpoint") == "in 100 % of 40 samples the host was in _save, called in save (train.py:30)"


def test_no_line_is_named_for_few_samples_of_the_loss():
    few = CodeLine("data", "load (data.py:7)", "", MIN_SAMPLES - 1)

    assert where(summary(few, CodeLine("compute", "step (train.py:9)", "", 1000)), "data_loading") == ""
    assert where(None, "data_loading") == ""


def test_no_line_is_named_if_each_has_few_of_the_samples():
    lines = [CodeLine("data", f"f{number} (data.py:{number})", "", 10) for number in range(10)]

    assert where(summary(*lines), "data_loading") == ""


def test_lines_of_a_function_that_calls_nothing_are_one_place():
    own = [CodeLine("data", f"f (data.py:{number})", "", 10) for number in (7, 12, 9)]
    found = summary(*own, CodeLine("data", "f (data.py:20)", "read", 10))

    assert where(found, "data_loading") == "in 75 % of 40 samples the host was in f (data.py:7-12)"


@pytest.mark.parametrize(
    "line", ["f", "f (a.py:)", "f (a.py:-3)", "f (a.py:" + "9" * 99 + ")", ":)", "f (a.py:\u00b2)"]
)
def test_a_line_without_a_number_is_shown_as_it_is(line):
    assert where(summary(CodeLine("data", line, "", 40)), "data_loading").endswith(f"was in {line}")


def test_only_the_additional_samples_of_long_iterations_count_for_them():
    found = summary(
        CodeLine("other", "refresh (train.py:5)", "", 100, long=60), CodeLine("backward", "step (train.py:9)", "", 400)
    )

    assert where(found, "slow_iterations") == (
        "in 100 % of 60 samples of long iterations the host was in refresh (train.py:5)"
    )
    assert next(host_lines(found, "slow_iterations")) == "where the host was, in 60 of 500 samples of rank 0:"


def test_waits_for_dataloader_workers_name_the_line_of_a_worker():
    found = HostLines()
    found.add_samples(HostSamples("agent", 0, 100, 0, (CodeLine("data", "<module> (train.py:3)", "select", 100),)))
    worker = CodeLine("worker", "tokenize (data.py:9)", "", 80), CodeLine("worker", "pad (data.py:30)", "", 20)
    found.add_samples(HostSamples("agent", 0, 100, 0, worker, is_worker=True))

    summary = found.summary()
    assert (summary.samples, summary.by_rank) == (100, {0: 100})
    assert where(summary, "data_loading") == ("in 80 % of 100 samples a DataLoader worker was in tokenize (data.py:9)")
    assert next(host_lines(summary, "data_loading")) == "where a DataLoader worker was, in 100 samples of rank 0:"
    assert where(summary, "device_idle").endswith("the host was in select, called in <module> (train.py:3)")


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
    assert list(
        host_lines(summary(SLOW, CodeLine("device", "a (b.py:1)", "item (probably)", 39), torn=2), "device_idle")
    ) == [
        "where the host was, in 61 of 100 samples of rank 0 (2 torn):",
        " 100 % (94 to 100)  encode, called in collate (data.py:41)",
    ]
    assert list(host_lines(summary(CodeLine("data", "a (b.py:1)", "", 3)), "data_loading")) == []


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
        lines = (
            CodeLine("other", "log_grads (train.py:120)", "", count),
            CodeLine("backward", "step (train.py:9)", "backward", samples - count),
        )
        found.add_samples(HostSamples("agent", rank, samples, 0, lines))
    return found.summary()


def test_line_of_a_slow_rank_is_the_one_with_more_samples_than_its_peers():
    assert where_slow(of_ranks(0.02, 0.02, 0.44), [2]) == (
        "rank 2 is in log_grads (train.py:120) in 44 % of the samples, rank 0,1 in 2 %"
    )


def test_many_peers_of_a_slow_rank_are_a_number():
    assert where_slow(of_ranks(0.44, *[0.02] * 7), [0]).endswith(", 7 ranks in 2 %")


@pytest.mark.parametrize("shares", [(0.40, 0.44), (0.02, 0.05)])
def test_no_line_is_named_for_small_differences_of_ranks(shares):
    assert where_slow(of_ranks(*shares), [1]) == ""
    assert where_slow(of_ranks(*shares[:1]), [0]) == "", "no peer was recorded"
    assert where_slow(of_ranks(*shares, samples=20), [1]) == ""
    assert where_slow(None, [1]) == ""
