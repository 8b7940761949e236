"""The run folder: writing, and reading of complete and damaged folders."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shutil
import stat
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from run_lines import read_events, read_ranks, read_windows
from sink_examples import complete_totals, make_report, make_row, make_summary, totals, with_keys

from effllm import metrics
from effllm.records.energy import NOT_MEASURED, EnergyAmount
from effllm.records.host_lines import RecordedStacks
from effllm.records.job import SCHEMA_VERSION, Coverage, Summary
from effllm.records.rank import DeviceWindow, Event, Gauge, Integrals
from effllm.store import own_files
from effllm.store.reader import RankRow, totals_by_key, window_line
from effllm.store.run_folder import RunFolder, StoreUnavailable, open_run_folder
from effllm.views.text.closing import facts_of, how_to_open
from effllm.views.text.summary import summary_text


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "one"


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def wide(ranks):
    return Coverage(ranks, ranks, ranks, ranks, 0, 0, energy=1.0)


def numbers_of(totals):
    return {name: value for name, value in totals_by_key(totals).items() if not isinstance(value, dict)}


def write(folder, *iterations, num_ranks=1, **options):
    """Write windows with the reports of ranks; return the store."""
    store = RunFolder(folder, {}, **options)
    for iteration in iterations:
        store.write(make_report(iteration), [make_row(rank, iteration) for rank in range(num_ranks)])
    return store


def windows(folder):
    """Return the iterations of the windows; fail if there is an invalid line."""
    rows = read_windows(folder)
    found = [report.iteration for report in rows]
    assert rows.num_skipped == 0
    return found


def ranks(folder):
    """Return the last iterations of the reports of ranks; fail if there is an invalid line."""
    rows = read_ranks(folder)
    found = [row.iteration_last for row in rows]
    assert rows.num_skipped == 0
    return found


def names(folder, pattern="*"):
    return sorted(path.name for path in folder.glob(pattern))


def document(folder, name="run.json"):
    return json.loads((folder / name).read_text())


def test_written_records_are_read_back(folder):
    report, event = make_report(100), Event(1.0, "reports_lost", "rank 3 is gone", 3)
    store = open_run_folder(folder, {})
    store.write(report, [make_row(rank) for rank in range(8)])
    store.write_events([event])
    for _ in range(2):
        store.close()

    (window,) = read_windows(folder)
    assert window.values == pytest.approx(report.values, rel=1e-11)
    for name in ("run", "last", "job"):
        assert numbers_of(getattr(window, name)) == pytest.approx(numbers_of(getattr(report, name)), rel=1e-11)
    assert (window.coverage, window.straggler, window.time_s) == (report.coverage, report.straggler, report.time_s)
    assert list(read_events(folder)) == [event]
    assert [row.rank for row in read_ranks(folder)] == list(range(8))


def test_window_line_has_every_metric_with_a_value(folder):
    whole = complete_totals()
    RunFolder(folder, {}).write(make_report(run=whole, last=whole, job=whole), ())

    written = {tag.rpartition("/")[2] for tag in document(folder, "windows-0001.jsonl")["values"]}
    assert written == {entry.name for entry in metrics.METRICS.values() if entry.in_windows}


def test_every_file_has_its_schema_version_once(folder):
    store = write(folder, 100, 110)
    store.write_events([Event(1.0, "reports_lost", f"rank {rank} is gone") for rank in range(2)])
    store.write_summary(make_summary())
    store.close()

    for name in ("run.json", "summary.json"):
        assert document(folder, name)["schema_version"] == SCHEMA_VERSION
    for name in ("windows-0001.jsonl", "ranks-0001.jsonl", "events.jsonl"):
        first, second = map(json.loads, (folder / name).read_text().splitlines())
        once = {"schema_version", "constants", "run", "job"}
        assert (first["schema_version"], second.keys()) == (SCHEMA_VERSION, first.keys() - once)


def test_changed_constants_of_the_job_are_written(folder):
    store = RunFolder(folder, {})
    for iteration, parameters in ((100, 7e9), (110, 7e9), (120, 8e9), (130, 8e9)):
        known = with_keys(totals(10), parameters=int(parameters))
        store.write(make_report(iteration, run=known, last=known, job=known), ())

    lines = [json.loads(line) for line in (folder / "windows-0001.jsonl").read_text().splitlines()]
    assert [line.get("constants", {}).get("parameters") for line in lines] == [7e9, None, 8e9, None]
    assert not any("parameters" in line["last"] for line in lines)
    assert [row.last.constants.parameters for row in read_windows(folder)] == [7e9, 7e9, 8e9, 8e9]


def test_each_file_of_windows_contains_the_constants_of_the_job(folder):
    write(folder, *range(10, 310, 10), segment_bytes=10_000)
    (folder / "windows-0001.jsonl").unlink()

    rows = list(read_windows(folder))
    assert 10 < len(rows) < 30
    assert {(row.last.constants.parameters, row.last.constants.gpus) for row in rows} == {(7_000_000_000, 8)}


def test_totals_to_date_are_written_once_a_minute_and_at_the_end(folder):
    store = RunFolder(folder, {})
    for iteration in range(10, 310, 10):  # a window takes 4.12 s
        store.write(make_report(iteration, final=iteration == 300), ())

    rows = list(read_windows(folder))
    assert [row.iteration for row in rows if row.job] == [10, 160, 300]
    assert [row.run.counts.tokens for row in rows if row.run] == [totals(at).counts.tokens for at in (10, 160, 300)]


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o027])
def test_files_are_private_under_any_umask(folder, umask):
    before = os.umask(umask)
    try:
        write(folder, 100).write_summary(make_summary())
        os.close(own_files.open_file(folder / "file", os.O_WRONLY | os.O_CREAT))
    finally:
        os.umask(before)

    written = ["console.log", "events.jsonl", "ranks-0001.jsonl", "run.json", "summary.json", "summary.txt"]
    assert names(folder) == [".reserve", *written[:2], "file", *written[2:], "windows-0001.jsonl"]
    assert {mode(path) for path in folder.iterdir()} == {0o600}
    assert (mode(folder), mode(folder.parent)) == (0o700, 0o700)


def test_row_of_a_rank_has_the_fields_used_by_tools(folder):
    # Variances of 4, 9 and 3 J^2: half-width 1.96 * 4 J
    wall = Integrals(EnergyAmount(100.0, 2.06, 4.0, 9.0, 3.0, 5.0, 1.5), 4e9, 4.12, 3.0, 4.12)
    throttled_s, clock = {"any": 0.5, "power_cap": 0.5}, {"sm_clock_hz": Gauge(8e9, 4.0, 1.9e9, 2.1e9)}
    phase = {"evaluation": Integrals(EnergyAmount(25.0, 1.0))}
    gpu = DeviceWindow("GPU-a", wall, phase, energy_method="counter", gauges=clock, throttled_s=throttled_s)
    supply = DeviceWindow("module-0", Integrals(EnergyAmount(130.0, 4.12)))
    row = make_row(2, phases_s={"evaluation": 1.0}, devices=(gpu, supply))
    RunFolder(folder, {"ranks": {"2": {"host": "node7", "role": "trainer"}}}).write(make_report(attempt=3), [row])

    expected = {
        "attempt": 3, "rank": 2, "host": "node7", "device": "GPU-a", "iteration_first": 91, "iteration_last": 100,
        "start_time_s": 1_700_000_000.0, "end_time_s": 1_700_000_005.12, "tokens": 81_920, "samples": 40,
        "busy_s": 4.04, "wait_s": 0.08, "wall_s": 4.12, "energy_j": 100.0, "energy_error_j": 7.84,
        "energy_gain_error": 0.05, "energy_method": "counter", "energy_estimated_j": 1.5, "throttled_s": throttled_s,
        "memory_byte_seconds": 4e9, "utilization_seconds": 3.0, "coverage": 0.5,
        "tokens_processed": 87_500, "tokens_loss": 75_000, "phases_s": {"evaluation": 1.0},
        "phases_j": {"evaluation": 25.0}, "loss": 3.245678, "window": 10, "other_devices_j": {"module-0": 130.0},
        "gauges": {"sm_clock_hz": {"mean": 2e9, "covered_s": 4.0, "least": 1.9e9, "most": 2.1e9}},
    }  # fmt: skip
    line = document(folder, "ranks-0001.jsonl")
    assert {name: line[name] for name in expected} == expected


def test_row_without_energy_has_no_error_and_the_coverage_of_memory(folder):
    devices = [(DeviceWindow("cpu", Integrals(NOT_MEASURED, 4e9, 2.06)),), (), (DeviceWindow("x", Integrals()),)]
    RunFolder(folder, {}).write(make_report(), [make_row(rank, devices=one) for rank, one in enumerate(devices)])

    rows = list(read_ranks(folder))
    energies = [(row.energy_j, row.energy_error_j, row.energy_gain_error, row.energy_estimated_j) for row in rows]
    assert energies == [(None,) * 4] * 3
    assert [(row.coverage, row.host) for row in rows] == [(0.5, None), (None, None), (None, None)]


UNMEASURED, HALF_MEASURED = (), (DeviceWindow("g", Integrals(EnergyAmount(1.0, 3.0))),)


@pytest.mark.parametrize(
    ("num_ranks", "changes", "kept"),
    [
        (256, {}, range(256)),
        # 3.25 % above the median; outliers begin at 3.5 %
        (300, {0: {"busy_s": 4.13}}, []),
        (
            10_000,
            {17: {"busy_s": 5.0}, 4000: {"busy_s": 3.0}, 5: {"devices": UNMEASURED}, 6: {"devices": HALF_MEASURED}},
            [5, 6, 17, 4000],
        ),
        (10_000, {9_999: {"busy_s": 100.0}, **{rank: {"devices": ()} for rank in range(5000)}}, [*range(255), 9_999]),
    ],
    ids=["few ranks", "jitter", "outliers", "many outliers"],
)
def test_rows_of_at_most_256_outliers_are_kept(folder, num_ranks, changes, kept):
    rows = [
        make_row(rank, **{"busy_s": 4.0 + 0.001 * (rank % 2), **changes.get(rank, {})}) for rank in range(num_ranks)
    ]
    RunFolder(folder, {}).write(make_report(coverage=wide(num_ranks)), rows)

    assert [row.rank for row in read_ranks(folder)] == list(kept)


def test_segments_rotate_are_read_in_order_and_are_kept_without_a_limit(folder):
    write(folder, *range(10, 1010, 10), limit_mb=0, segment_bytes=10_000)

    assert names(folder, "windows-*")[1] == "windows-0002.jsonl"
    assert len(names(folder, "windows-*")) > 3
    assert windows(folder) == ranks(folder) == list(range(10, 1010, 10))


def test_oldest_detail_files_are_removed_at_the_size_limit(folder):
    warnings = []
    store = write(folder, *range(10, 4010, 10), num_ranks=4, limit_mb=1, warn=warnings.append)
    store.write_events([Event(1.0, "reports_lost", "rank 3 is gone", 3)])
    store.write_summary(make_summary("completed"))
    store.close()

    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    # The limit is checked when a detail file is full, so two such files (1/16 MB each) can exceed the limit.
    assert 700_000 < size < 1_130_000
    kept = windows(folder)
    assert kept[0] > 10
    assert kept == list(range(kept[0], 4010, 10))
    assert (ranks(folder)[0] > 10, ranks(folder)[-1]) == (True, 4000)
    assert [event.kind for event in read_events(folder)] == ["reports_lost"]
    assert (folder / "summary.json").exists() and (folder / "run.json").exists()
    (line,) = [line for line in warnings if "1 MB" in line]
    assert "the oldest windows and reports of ranks are removed" in line


def test_next_attempt_continues_the_last_segment(folder):
    for attempt in (1, 2):
        store = RunFolder(folder, {}, segment_bytes=5_000)
        for iteration in (10, 20, 30):
            store.write(make_report(iteration, attempt=attempt), ())

    assert [report.attempt for report in read_windows(folder)] == [1, 1, 1, 2, 2, 2]
    assert names(folder, "windows-*")[0] == "windows-0001.jsonl"


def test_segment_10000_is_newer_than_segment_9999(folder):
    folder.mkdir(parents=True)
    for number in ("9999", "10000"):
        (folder / f"windows-{number}.jsonl").touch()
    write(folder, 100)

    assert (folder / "windows-10000.jsonl").stat().st_size > 0


@pytest.mark.parametrize("pad", [0, 10_000])
def test_torn_line_is_removed_and_the_next_line_is_complete(folder, pad):
    store = write(folder, 100)
    store.write(make_report(110, values={"x" * (pad + 1): 1.0}), [make_row(iteration=110, phases_s={"x" * pad: 1.0})])
    store.write_events([Event(1.0, "joined", "rank 0")])
    store.close()
    for path in folder.glob("*.jsonl"):
        path.write_bytes(path.read_bytes()[:-20])
    torn = read_windows(folder), read_ranks(folder)
    assert [len(list(rows)) for rows in torn] == [rows.num_skipped for rows in torn] == [1, 1]
    write(folder, 120).write_events([Event(1.0, "joined", "rank 1")])

    assert windows(folder) == ranks(folder) == [100, 120]
    events = read_events(folder)
    assert ([event.text for event in events], events.num_skipped) == (["rank 1"], 0)


def test_line_that_lacks_only_its_newline_is_kept(folder):
    write(folder, 100).close()
    for path in folder.glob("*.jsonl"):
        path.write_bytes(path.read_bytes()[:-1])
    write(folder, 110)

    assert windows(folder) == ranks(folder) == [100, 110]


@contextmanager
def largest_file(size):
    """Limit the size of files; with 0, every write fails, as on a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.mark.fault("disk-full")
def test_lines_of_a_full_disk_are_written_later_with_one_warning(folder):
    warnings = []
    store = write(folder, 100, warn=warnings.append)
    store.write_summary(make_summary("running"))
    with largest_file(0):
        for iteration in (110, 120):
            store.write(make_report(iteration), [make_row(iteration=iteration)])
        store.write_events([Event(1.0, "reports_lost", "rank 3 is gone")])
        store.write_summary(make_summary("completed"))
        assert not store.save_state(b"state")
    assert windows(folder) == [100]
    assert document(folder, "summary.json")["status"] == "running"
    store.write(make_report(130), [make_row(iteration=130)])
    assert store.save_state(b"state")

    assert windows(folder) == ranks(folder) == [100, 110, 120, 130]
    assert [event.text for event in read_events(folder)] == ["rank 3 is gone"]
    assert not names(folder, ".*.new")
    assert [line.partition(f" {folder} ")[2].partition(":")[0] for line in warnings] == [
        "cannot be written", "is written again"
    ]  # fmt: skip


@pytest.mark.fault("disk-full")
def test_partly_written_line_is_removed(folder):
    store = RunFolder(folder, {})
    store.write_events([Event(1.0, "joined", "rank 0")])
    whole = (folder / "events.jsonl").read_bytes()
    with largest_file(len(whole) + 10):
        store.write_events([Event(2.0, "left", "rank 0")])
        assert (folder / "events.jsonl").read_bytes() == whole
    store.write_events([Event(3.0, "joined", "rank 0")])

    assert [event.time_s for event in read_events(folder)] == [1.0, 2.0, 3.0]


@pytest.mark.fault("disk-full")
def test_waiting_lines_are_bounded_and_dropped_lines_are_counted(folder):
    warnings, line = [], len(msgspec.json.encode(window_line(make_report(110), has_totals=False)))
    store = RunFolder(folder, {}, max_waiting_bytes=int(2.5 * line), warn=warnings.append)
    with largest_file(0):
        for iteration in range(110, 160, 10):
            store.write(make_report(iteration), ())
    store.write_summary(make_summary(left_out={"console": 3}))

    assert windows(folder) == [140, 150]
    assert document(folder, "summary.json")["left_out"] == {"console": 3, "runfolder": 3}
    assert "3 did not fit into memory and were dropped" in warnings[-1]


@pytest.mark.fault("disk-full")
def test_file_size_limit_begins_a_new_segment(folder):
    store = write(folder, 100)
    with largest_file((folder / "windows-0001.jsonl").stat().st_size + 100):
        store.write(make_report(110), ())

    assert names(folder, "windows-*") == ["windows-0001.jsonl", "windows-0002.jsonl"]
    assert windows(folder) == [100, 110]


@pytest.mark.fault("folder-removed")
def test_removed_folder_is_made_again_with_its_facts(folder):
    warnings = []
    store = RunFolder(folder, {"model": "7B"}, warn=warnings.append)
    store.write(make_report(100), ())
    shutil.rmtree(folder.parent)
    store.write(make_report(110), [make_row(iteration=110)])
    store.write_events([Event(1.0, "reports_lost", "rank 3 is gone")])
    assert store.save_state(b"state")
    store.write_summary(make_summary())

    assert windows(folder) == ranks(folder) == [110]
    assert len(list(read_events(folder))) == 1
    assert document(folder) == {"model": "7B", "schema_version": SCHEMA_VERSION}
    assert names(folder, "s*.json") == ["state.json", "summary.json"]
    assert (mode(folder), len(warnings)) == (0o700, 1)
    assert "was removed" in warnings[0]


@pytest.mark.fault("aggregator-sigkill", "duplicates")
def test_new_aggregator_writes_no_line_twice(folder):
    store = write(folder, 100, 110, 120, num_ranks=2)
    store.write(make_report(100, correction=True), [make_row(2, 100)])  # it arrived late
    again = write(folder, 120, num_ranks=3)
    again.write(make_report(100, correction=True), [make_row(2, 100), make_row(3, 100)])
    again.write(make_report(130), [make_row(0, 130)])

    assert windows(folder) == [100, 110, 120, 100, 100, 130]
    assert [(row.rank, row.window) for row in read_ranks(folder)] == [
        (0, 10), (1, 10), (0, 11), (1, 11), (0, 12), (1, 12), (2, 10), (2, 12), (3, 10), (0, 13)
    ]  # fmt: skip


class Killed(BaseException):
    """Simulates SIGKILL: the process runs no more code."""


class Moments:
    """Kills a process in its nth call that changes files: half-way through a write, or before any other call."""

    def __init__(self, monkeypatch):
        self.left = math.inf
        for name in ("write", "ftruncate", "replace", "unlink"):
            monkeypatch.setattr(os, name, self._dying(getattr(os, name)))

    def _dying(self, call):
        def counted(*arguments, **keywords):
            self.left -= 1
            if self.left >= 0:
                return call(*arguments, **keywords)
            if call.__name__ == "write":
                descriptor, text = arguments
                call(descriptor, text[: len(text) // 2])
            raise Killed

        return counted


def test_every_line_is_written_once_after_a_kill_at_any_call(folder, monkeypatch):
    # Windows of two ranks. The state is saved after every second window; windows after the state are sent again.
    moments = Moments(monkeypatch)
    for moment in range(200):
        shutil.rmtree(folder, ignore_errors=True)
        moments.left, was_killed, is_over = moment, False, False
        while not is_over:
            try:
                store = RunFolder(folder, {"was_killed": was_killed})
                closed = document(folder, "state.json")["closed"] if (folder / "state.json").exists() else 0
                for window in range(closed + 1, 7):
                    rows = [make_row(rank, 10 * window, start_time_s=100.0 * window) for rank in range(2)]
                    store.write(make_report(10 * window), rows)
                    if window % 2 == 0:
                        assert store.save_state(json.dumps({"closed": window}).encode())
                is_over = True
            except Killed:
                moments.left, was_killed = math.inf, True
        assert windows(folder) == list(range(10, 70, 10)), moment
        assert sorted(ranks(folder)) == sorted(2 * windows(folder))
        assert not names(folder, ".*.new")
        if not was_killed:
            break
    assert 20 <= moment < 199


def test_windows_of_two_jobs_are_kept_if_their_numbers_are_equal(folder):
    # The first job was killed before it saved a state, so the second job has attempt 1 too.
    for start_s in (100.0, 200.0):
        RunFolder(folder, {}).write(make_report(100, time_s=start_s + 50.0), [make_row(start_time_s=start_s)])

    assert windows(folder) == ranks(folder) == [100, 100]


def test_line_is_written_with_values_that_are_not_finite(folder):
    RunFolder(folder, {}).write(make_report(values={"amu_gb": math.nan, "al_seconds": 1.0}, loss=math.inf), ())

    (report,) = read_windows(folder)
    assert (report.values, report.loss) == ({"al_seconds": 1.0}, None)


def test_summary_and_state_are_replaced(folder):
    store = RunFolder(folder, {})
    for status, state in (("running", b"old and longer"), ("completed", b"new")):
        store.write_summary(make_summary(status))
        store.save_state(state)

    assert msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary) == make_summary("completed")
    assert (folder / "state.json").read_bytes() == b"new"
    assert mode(folder / "state.json") == 0o600
    assert names(folder, ".*.new") == []


def test_recording_of_stacks_that_cannot_be_written_is_no_trouble_of_the_windows(folder):
    warnings = []
    store = RunFolder(folder, {}, warn=warnings.append)
    with largest_file(0):
        store.write_recorded_stacks([RecordedStacks(SCHEMA_VERSION, 1.0, 0, 1, 5, 0, {"data;load (a.py:1)": 5})])

    assert warnings == []


def test_summary_is_written_as_text_too(folder):
    summary = make_summary("running")
    RunFolder(folder, {}, tensorboard_dir=folder / "tb").write_summary(summary)

    commands = [("Open", one) for one in how_to_open(folder, folder / "tb")]
    assert (folder / "summary.txt").read_text() == summary_text(summary, (*facts_of(summary), *commands))


def test_the_console_log_has_the_block_of_every_window(folder):
    write(folder, 100, 110).close()
    store = write(folder)
    store.write(make_report(110, correction=True), ())
    store.close()

    text = (folder / "console.log").read_text()
    assert text.startswith((Path(__file__).parents[1] / "golden" / "console_block.txt").read_text())
    assert text.count("[EfficientLLM Metrics]") == 2


def test_the_console_log_is_bounded_and_keeps_the_newest(folder, monkeypatch):
    monkeypatch.setattr("effllm.store.run_folder.MAX_CONSOLE_LOG_BYTES", 2000)
    store = RunFolder(folder, {})
    for window in range(100):
        store.write(make_report(window, window=window), ())
        store._next_log_monotonic_s = 0.0  # as if a second had passed since the last write

    new, old = (folder / "console.log").read_text(), (folder / "console.log.1").read_text()
    assert len(new.encode()) <= 2000 and len(old.encode()) <= 2000
    shown = re.findall(r"Iteration (\d+):", old + new)
    assert shown == [str(number) for number in range(100 - len(shown), 100)]


def test_unwritable_console_log_affects_no_other_file(folder):
    store = RunFolder(folder, {})
    (folder / "console.log").mkdir()
    store.write(make_report(100), ())

    assert windows(folder) == [100]


def test_later_facts_are_merged_into_run_json(folder):
    store = RunFolder(folder, {"model": "7B", "folder": folder})
    store.update_facts({"ranks": {0: {"host": "node1"}}})
    store.write(make_report(), [make_row(0)])
    RunFolder(folder, {"model": "8B"})

    known = {"model": "8B", "folder": str(folder), "ranks": {"0": {"host": "node1"}}}
    assert document(folder) == {"schema_version": SCHEMA_VERSION, **known}
    assert [row.host for row in read_ranks(folder)] == ["node1"]


@pytest.mark.parametrize("ranks", [["node1"], {"x": "node1"}, {"0": {"role": "trainer"}}, {"0": 5}, None])
def test_rows_of_ranks_without_a_known_host_are_written(folder, ranks):
    RunFolder(folder, {"ranks": ranks}).write(make_report(), [make_row(0)])

    assert [row.host for row in read_ranks(folder)] == [None]


def test_invalid_run_json_is_replaced_and_a_valid_one_only_if_it_changes(folder):
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{")
    store = RunFolder(folder, {"model": "7B"})
    before = (folder / "run.json").stat().st_ino
    store.update_facts({"model": "7B"})

    assert document(folder) == {"model": "7B", "schema_version": SCHEMA_VERSION}
    assert (folder / "run.json").stat().st_ino == before


def test_unwritable_folder_is_named_with_reason_and_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(StoreUnavailable, match=rf"{folder} .*: Not a directory; .*EFFICIENTLLM_RUN_DIR"):
            open_run_folder(folder, {})


def test_link_instead_of_a_file_is_not_followed(folder, tmp_path):
    folder.mkdir(parents=True)
    (folder / "windows-0001.jsonl").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(StoreUnavailable, match="symbolic links"):
        open_run_folder(folder, {})
    assert not (tmp_path / "elsewhere").exists()


WHOLE = msgspec.json.encode(Event(1.0, "reports_lost", "rank 3 is gone"))


PIECES = st.one_of(st.binary(max_size=80), st.just(WHOLE), st.integers(1, len(WHOLE) - 1).map(lambda end: WHOLE[:end]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PIECES))
@example([b'{"deep":' + b"[" * 100_000, WHOLE])
def test_readers_skip_and_count_invalid_lines(tmp_path, pieces):
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(pieces))
    lines = [line for line in b"\n".join(pieces).split(b"\n") if line.strip()]

    rows = read_events(tmp_path)
    for _ in range(2):
        assert len(list(rows)) == lines.count(WHOLE)
        assert rows.num_skipped == len(lines) - lines.count(WHOLE)


def test_rows_of_a_later_version_are_read_by_this_version(tmp_path):
    (row,) = [RankRow(1, 0, 1, 1, 10, 0.0, 1.0, 1.0, 0.9, 0.1, tokens=5, samples=1)]
    plain = {**msgspec.to_builtins(row), "added_later": {"x": [1]}}
    (tmp_path / "ranks-0001.jsonl").write_text(json.dumps(plain) + "\n")

    assert list(read_ranks(tmp_path)) == [row]
