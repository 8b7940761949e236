"""Complete jobs under torchrun: training with gloo, agents, aggregator, TCP, run folder and TensorBoard file."""

import functools
import itertools
import math

import jobs
import pytest
from cases import repeats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# All tests use the same jobs. A job with four ranks takes a minute on a busy machine.
pytestmark = [*jobs.needs_torch, pytest.mark.xdist_group("end to end"), pytest.mark.timeout(480)]

ONE_NODE = ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node"]
WORLDS = (1, 2, 4)[: repeats(2, 3)]
ITERATIONS, STEP_S = 43, 0.05  # ten iterations last 0.5 s, long enough for a window's energy
TOKENS, SAMPLES, PARAMETERS = 43 * 8 * 32, 43 * 8, 64 * 64
WINDOWS = [10, 20, 30, 40, 43]  # the last window has the remaining three iterations


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Return a function that runs the training with a number of ranks; each job runs once, at its first use.

    The agents and the aggregator must end soon after the job.
    """

    @functools.cache
    def run(world_size):
        with jobs.launching(tmp_path_factory.mktemp("world")) as launch:
            arguments = ("--iterations", ITERATIONS, "--step-s", STEP_S, "--values-within-s", 60)
            job = launch.torchrun([*ONE_NODE, str(world_size)], "torch_loop.py", *arguments).wait()
            # Without a BYE message the aggregator would wait for 15 s.
            assert not job.left(within_s=12.0)
            return job.done()

    return run


@pytest.fixture(scope="module", params=WORLDS, ids="{} ranks".format)
def world(request, worlds):
    """Return a job and its number of ranks."""
    return worlds(request.param), request.param


def tensorboard(folder):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}


def seconds_of(rows):
    """Return T: the longest time in iterations of any rank."""
    by_rank = {}
    for row in rows:
        by_rank[row.rank] = by_rank.get(row.rank, 0.0) + row.busy_s + row.wait_s
    return max(by_rank.values())


def joules_of_iterations(rows):
    """Return the measured energy of these reports without phases; a device without measurements counts as 0."""
    return sum((row.energy_j or 0.0) - sum(joules or 0.0 for joules in row.phases_j.values()) for row in rows)


def test_totals_do_not_depend_on_the_number_of_ranks(world):
    job, world_size = world
    summary = job.ledger.summary

    assert (summary.tokens, summary.samples) == (TOKENS, SAMPLES)
    assert (summary.iterations, summary.parameters, summary.attempts) == (ITERATIONS, PARAMETERS, 1)
    assert summary.status == "completed"
    assert summary.coverage.ranks_reporting == summary.coverage.ranks_expected == world_size
    assert summary.coverage.gpus_expected == len(summary.energy.by_device) == world_size
    assert (summary.coverage.reports_lost, summary.coverage.reports_late) == (0, 0)
    assert summary.overhead.agents_cpu_s < max(2.0, world_size)


def test_start_and_end_are_printed_once_and_are_the_only_events(world):
    job, world_size = world

    assert job.stdout.count("[EfficientLLM] measuring ") == job.stdout.count("; to look: effllm top ") == 1
    assert job.stdout.count("[EfficientLLM] Run completed") == 1
    assert not job.our_errors
    assert job.ledger.summary.events == {"joined": world_size, "started": 1, "left": world_size}


def test_run_folder_records_the_facts_of_the_job(world):
    job, world_size = world
    facts = job.ledger.facts

    assert (facts["launcher"], facts["world_size"], facts["parameters"]) == ("torchrun", world_size, PARAMETERS)
    assert sorted(facts["ranks"], key=int) == [str(rank) for rank in range(world_size)]
    assert {row.host for row in job.ledger.ranks} == {facts["aggregator_host"]}
    assert len({row.device for row in job.ledger.ranks}) == world_size


def test_waterfall_adds_up_to_the_time_and_energy_of_all_classes(world):
    summary = world[0].ledger.summary
    goodput, found = summary.goodput, summary.waterfall

    assert sum(part.device_seconds for part in found.parts) == pytest.approx(sum(goodput.rank_seconds.values()))
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)
    measured = [goodput.joules[name] or 0.0 for name in goodput.joules if goodput.seconds[name] > 0]
    assert sum(part.joules or 0.0 for part in found.parts) == pytest.approx(sum(measured))


def test_al_tt_and_st_equal_the_values_from_the_reports_of_ranks(world):
    job, world_size = world
    rows, metrics = job.ledger.ranks, job.ledger.summary.metrics
    steps = [sum(row.busy_s for row in rows if row.rank == rank) / ITERATIONS for rank in range(world_size)]
    expected = {
        "tt_tokens_per_param_per_sec": sum(row.tokens for row in rows) / PARAMETERS / seconds_of(rows),
        "st_samples_per_param_per_sec": sum(row.samples for row in rows) / PARAMETERS / seconds_of(rows),
        "al_seconds": max(steps),
    }

    assert {tag: metrics[tag].value for tag in expected} == pytest.approx(expected, rel=1e-9)
    assert max(steps) > STEP_S  # the loop's sleep


def test_aec_times_iteration_time_is_the_energy_of_iterations(world):
    job, _ = world
    summary, rows = job.ledger.summary, job.ledger.ranks
    aec = summary.metrics["aec_watts"].value
    # AEC includes neither the energy nor the time of windows with a missing GPU; a busy machine can have such windows.
    known = {window.window for window in job.ledger.windows if window.last.energy.joules is not None}
    of_known = [row for row in rows if row.window in known]
    time_s, tokens = seconds_of(of_known), sum(row.tokens for row in of_known)

    assert aec * time_s == pytest.approx(joules_of_iterations(of_known), rel=1e-9)
    assert aec * time_s / tokens == pytest.approx(summary.energy.joules_per_token, rel=1e-9)
    # The energy by class includes all measured energy, also of windows with a missing GPU.
    assert summary.energy.by_class["iterations"] == pytest.approx(joules_of_iterations(rows), rel=1e-9)
    assert sum(summary.energy.by_device.values()) == pytest.approx(summary.energy.measured_joules, rel=1e-9)
    assert sum(summary.energy.by_class.values()) == pytest.approx(summary.energy.measured_joules, rel=1e-9)
    assert summary.energy.total_joules in (None, pytest.approx(summary.energy.measured_joules, rel=1e-9))
    assert (summary.energy.total_joules is None) == any(row.coverage < 1 - 1e-6 for row in rows)


def test_each_window_has_one_report_of_each_rank_without_overlap(world):
    job, world_size = world
    expected = [(1, 10, False), (11, 20, False), (21, 30, False), (31, 40, False), (41, 43, True)]
    for rank in range(world_size):
        rows = [row for row in job.ledger.ranks if row.rank == rank]
        assert [(row.iteration_first, row.iteration_last, row.final) for row in rows] == expected
        for before, after in itertools.pairwise(rows):
            assert after.start_time_s == pytest.approx(before.end_time_s, abs=1e-6)
        for row in rows:
            assert row.wall_s == pytest.approx(row.busy_s + row.wait_s + sum(row.phases_s.values()), abs=1e-6)


def test_console_block_is_printed_once_per_window(world):
    job, world_size = world
    windows = {window.iteration: window for window in job.ledger.windows}

    assert [int(block["iteration"]) for block in job.blocks] == WINDOWS
    for block in job.blocks:
        window = windows[int(block["iteration"])]
        assert block["ranks"] == f"{world_size}/{world_size}"
        assert block["gpus"] == f"{window.coverage.gpus_measured}/{world_size}"
        for tag, form in jobs.FORMATS.items():
            assert block[tag] == (form.format(window.values[tag]) if tag in window.values else None)
        assert (block["loss"] is None) == (block["iteration"] == "43")  # the loop logs no loss after iteration 40
    assert max(window.coverage.gpus_measured for window in windows.values()) == world_size


def test_values_in_tensorboard_agree_with_windows_and_summary(world):
    job, _ = world
    scalars = tensorboard(job.ledger.folder)
    windows = job.ledger.windows

    for tag in jobs.FORMATS:
        shown = scalars[f"efficientllm/{tag}"]
        known = [window for window in windows if tag in window.values]  # AEC is missing if its error exceeds 20 %
        assert [event.step for event in shown] == [window.iteration for window in known]
        assert shown[-1].step == WINDOWS[-1]
        for event, window in zip(shown, known, strict=True):
            assert event.value == pytest.approx(window.values[tag], rel=1e-6)  # single precision
        assert shown[-1].value == pytest.approx(job.ledger.summary.metrics[tag].value, rel=1e-6)
    assert all(math.isfinite(event.value) for events in scalars.values() for event in events)
    assert len(scalars) <= 60


def test_tags_do_not_depend_on_the_number_of_ranks(worlds):
    fewer, more = (set(tensorboard(worlds(size).ledger.folder)) for size in WORLDS[-2:])

    assert fewer == more


def test_every_rank_gets_the_values_of_the_whole_job(world):
    job, world_size = world
    reported = [{f"efficientllm/{tag}": w.values.get(tag) for tag in jobs.FORMATS} for w in job.ledger.windows]
    for rank in range(world_size):
        values = job.output(f"truth-{rank}.json")
        assert set(values) == {f"efficientllm/{tag}" for tag in jobs.FORMATS}
        assert {tag: None if math.isnan(value) else jobs.in_lines(value) for tag, value in values.items()} in reported


def test_nan_loss_is_reported_on_console_in_summary_and_as_an_event(launch):
    job = launch.python("loop.py", "--iterations", 30, "--nan-from", 15).done()
    summary, text = job.ledger.summary, "the loss is NaN or infinite at iteration 15"

    assert job.stdout.splitlines().count(f"[EfficientLLM] {text}") == job.stdout.count("[EfficientLLM] the loss") == 1
    assert job.ledger.event_texts("loss_not_finite") == [text]
    assert (summary.losses_not_finite, summary.first_not_finite, summary.loss) == (16, 15, None)
    assert "NaN or infinite: 16 losses, the first at iteration 15" in job.stdout
