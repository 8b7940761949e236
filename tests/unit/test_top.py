"""``effllm top`` without a terminal: positions in files, reasons of ranks, keys, lines of the screen, the document."""

import json
import os
import time

import msgspec
import pytest
from cases import cases
from msgspec.structs import replace
from rich.cells import cell_len
from run_folders import GOLDEN, change_document, copy_golden, write_files
from sink_examples import make_report, make_summary

from effllm.analysis.run_folders import UnreadableRun
from effllm.commands import top_reader
from effllm.commands.top_folder import FolderSource
from effllm.commands.top_reader import TopReader, ordered_frame
from effllm.records.job import SPREADS, Coverage, Spread
from effllm.records.rank import Event
from effllm.records.verdict import Straggler, StragglerVerdict
from effllm.store.line_files import END, MAX_READ_BYTES, START, LineFiles, end_of, read_at
from effllm.store.reader import RankRow, window_line
from effllm.views.top.frame import (
    NO_DATA,
    NO_PROBLEM,
    PROBLEM,
    Head,
    TopFrame,
    document,
    exit_status,
    problems_of,
    status_of,
)
from effllm.views.top.ranks import MAX_RANKS, EventHistory, RankStates, RankTable, rank_table
from effllm.views.top.screen import render
from effllm.views.top.text import fit, local_time, plain, sparkline
from effllm.views.top.view_state import Action, Order, ShownPane, TopView, after_key

NOW_S = 1_795_000_000.0


def window(number, **changes):
    iterations = {"iteration_first": 10 * number - 9, "iteration_last": 10 * number}
    return replace(make_report(10 * number), **{"window": number, "time_s": NOW_S + number, **iterations, **changes})


def row(rank, number=1, **changes):
    known = {
        "attempt": 1, "rank": rank, "window": number, "iteration_first": 10 * number - 9, "iteration_last": 10 * number,
        "start_time_s": NOW_S + number - 1, "end_time_s": NOW_S + number, "busy_s": 4.0, "wait_s": 0.2, "wall_s": 4.2,
        "host": f"node{rank // 8}", "energy_j": 2000.0, "energy_covered_s": 4.0, "coverage": 1.0,
    }  # fmt: skip
    return RankRow(**{**known, **changes})


@pytest.fixture
def run(tmp_path):
    """Write a finished run of five windows and eight ranks, of which rank 3 waits for data."""
    return write_files(
        tmp_path / "run-1",
        {"run_id": "run-1", "ranks": {"3": {"host": "node0"}}},
        make_summary(run_id="run-1", user="alice", is_over=True),
        windows=[window_line(window(n), has_totals=False) for n in range(1, 6)],
        ranks=[row(rank, n, wait_s=2.0 if rank == 3 else 0.2) for n in range(1, 6) for rank in range(8)],
        events=[Event(NOW_S + 2.5, "gpus_idle", "no GPU works")],
    )


def append(path, text):
    with path.open("ab") as file:
        file.write(text)


def source_of(folder):
    source = FolderSource(folder)
    source.refresh()
    source.refresh_hosts()
    return source


def shown(folder, order=None):
    return ordered_frame(source_of(folder), order or Order())


def text_of(frame, width=80, height=24):
    return plain(render(frame, TopView(), width, height))


# --- positions in files --------------------------------------------------------------------------


def numbered(first, size=90, count=1000):
    return b"".join(b'{"n":%d,"x":"%s"}\n' % (first + n, b"x" * size) for n in range(count))


@pytest.fixture
def lines(tmp_path):
    """Write three files of 1000 lines of about 100 bytes, with the numbers 0 to 2999, and a torn line."""
    for part in range(3):
        (tmp_path / f"windows-{part + 1:04d}.jsonl").write_bytes(numbered(1000 * part))
    append(tmp_path / "windows-0003.jsonl", b'{"n":3000,"x":"')
    files = LineFiles(tmp_path, "windows")
    files.refresh()
    return files


def numbers(found):
    return [json.loads(line)["n"] for _, line in found]


def test_lines_before_and_after_a_position_continue_in_another_file(lines):
    last = lines.lines_before(END, 1000)
    assert numbers(last)[-3:] == [2997, 2998, 2999], "without the torn line"
    assert numbers(lines.lines_before(last[1][0], 3)) == [1998, 1999, 2000]
    last_of_first = lines.lines_after(START, 1000)[-1][0]
    assert numbers(lines.lines_after(last_of_first, 3)) == [999, 1000, 1001]


def test_first_line_in_a_large_file_is_found_by_bisection(tmp_path):
    (tmp_path / "ranks-0001.jsonl").write_bytes(numbered(0, size=990, count=6000))
    files = LineFiles(tmp_path, "ranks")
    files.refresh()
    asked = []

    position = files.first_reached(lambda line: asked.append(line) or json.loads(line)["n"] >= 2900)
    assert numbers(files.lines_after(position, 1)) == [2900]
    assert len(asked) < 200


@cases("wanted", [0, 1, 999, 1000, 1500, 2345, 2999])
def test_first_line_of_a_condition_is_found(lines, wanted):
    position = lines.first_reached(lambda line: json.loads(line)["n"] >= wanted)

    assert numbers(lines.lines_after(position, 1)) == [wanted]


def test_position_at_a_share_is_the_start_of_a_line(lines):
    assert numbers(lines.lines_after(lines.position_at_share(0.5), 1))[0] in range(1490, 1511)
    assert lines.lines_after(lines.position_at_share(1.0), 1) == []


def test_new_lines_of_a_growing_file_are_complete_and_long_ones_are_passed(tmp_path):
    path = tmp_path / "events.jsonl"
    files = LineFiles(tmp_path, "events")

    def new(position):
        files.refresh()
        found = files.lines_after(position, 10)
        return [line for _, line in found], end_of(found) if found else position

    assert new(START) == ([], START)
    path.write_bytes(b"one\ntw")
    lines, position = new(START)
    assert lines == [b"one\n"]
    path.write_bytes(b"one\ntwo\n" + b"x" * (MAX_READ_BYTES + 1) + b"\nthree\n")
    lines, position = new(position)
    assert lines == [b"two\n"]
    assert len(new(position)[0][0]) == MAX_READ_BYTES
    assert new(new(position)[1])[0] == [b"x\n", b"three\n"]


def test_pipe_instead_of_a_file_is_an_error_and_not_a_wait(tmp_path):
    os.mkfifo(tmp_path / "windows-0001.jsonl")

    with pytest.raises(OSError, match="not a regular file"):
        read_at(tmp_path / "windows-0001.jsonl", 0, 10)


# --- ranks and their reasons ---------------------------------------------------------------------


def coverage(**changes):
    values = {"ranks_expected": 8, "ranks_reporting": 8, "gpus_expected": 8, "gpus_measured": 8, "reports_lost": 0}
    return Coverage(**{**values, "reports_late": 0, **changes})


def states(*events, at_s=NOW_S):
    history = EventHistory()
    history.add_events(events)
    return history.states(at_s)


def reasons(rows, *events, **changes):
    """Return the rank, reason and text of each rank with a reason, the worst first."""
    whole = window(1, **{"coverage": coverage(), "straggler": None, **changes})
    found = rank_table(whole, rows, states(*events), {}, 8)
    assert found.is_complete == (len(rows) == 8)
    return [(line.rank, line.reason, line.text) for line in found.lines_with_reason()]


HOT = {"temperature_c": {"mean": 90.0, "covered_s": 4.0, "least": 90.0, "most": 90.0}}


@cases(
    "rows",
    [
        [row(rank) for rank in range(8)],
        [row(rank, wait_s=4.0) for rank in range(8)],
        # the median of two outliers is not the usual temperature
        [row(0), msgspec.convert({**msgspec.to_builtins(row(1)), "gauges": HOT}, RankRow)],
    ],
)
def test_healthy_ranks_have_no_reason(rows):
    assert reasons(rows) == []


def test_rank_with_a_longer_data_wait_than_the_median_is_listed():
    rows = [row(rank, wait_s=1.0 if rank == 5 else 0.2) for rank in range(8)]

    assert reasons(rows) == [(5, "data_wait", "data wait 20 %, usual 5 %")]


def test_lost_rank_is_before_a_straggler():
    events = [Event(NOW_S, kind, f"rank 6: {kind}", 6) for kind in ("joined", "rank_lost")]
    verdict = StragglerVerdict((2,), "node0", "", 1, 0.119, 7, "own time", "slow host")

    found = reasons(
        [row(rank) for rank in range(8)], *events, stragglers=(verdict,), straggler=Straggler(2, 1.119, 1.0)
    )
    assert [line[:2] for line in found] == [(6, "lost"), (2, "straggler")]
    assert found[1][2] == "straggler +11.9 % by own time: slow host"


def test_step_time_alone_is_named_as_step_time():
    spread = {name: Spread(8, 0.4, 0.4, 0.4, 0.4, 0.5) for name in SPREADS}

    found = reasons([row(0), row(1, busy_s=5.0)], spread=spread)
    assert found == [(1, "step_time", "step time +25 % of the median")]


def test_wrong_number_of_ranks_is_bounded():
    assert rank_table(None, (), RankStates(), {}, 10**12).num_ranks == MAX_RANKS


def test_wrong_rank_and_time_of_a_file_are_no_failure(run):
    (run / "run.json").write_text(json.dumps({"ranks": {"9" * 5000: {"host": "a"}}}))

    assert not shown(run).ranks.hosts
    assert local_time("%H:%M", 1e300) == "?"


def test_hosts_are_ordered_by_their_worst_rank():
    rows = [row(rank, wait_s=1.0 if rank == 13 else 0.2) for rank in range(16)]
    whole = window(1, coverage=coverage(ranks_expected=16, ranks_reporting=16), straggler=None)
    hosts = rank_table(whole, rows, states(), {}, 16).ordered("reason", "", True)

    found = [(one.host, one.ranks, one.num_with_reason, one.worst.rank) for one in hosts]
    assert found == [("node1", 8, 1, 13), ("node0", 8, 0, 0)]
    assert hosts[0].watts == 8 * 500.0


def test_filter_matches_a_rank_number_exactly_and_hosts_by_a_part():
    found = RankTable([], 8192, {rank: f"node{rank // 8}" for rank in range(8192)}, False)

    assert [line.rank for line in found.ordered("reason", "17", False)] == [17, *range(136, 144)] + [
        rank for rank in range(8192) if "17" in f"node{rank // 8}" and rank // 8 != 17
    ]
    assert len(found.ordered("reason", "node1023", False)) == 8


@cases(("at_s", "lost"), [(1.5, {3}), (2.5, set()), (4.0, {4}), (9.0, set())])
def test_rank_that_is_back_is_not_lost_and_a_new_attempt_starts_anew(at_s, lost):
    first = Event(1.0, "rank_lost", "", 3, attempt=1), Event(2.0, "back", "", 3, attempt=1)
    second = Event(3.0, "rank_lost", "", 4, attempt=1), Event(9.0, "joined", "", 4, attempt=2)

    assert states(*first, *second, at_s=at_s).lost == lost


def test_rank_that_left_after_an_error_has_failed():
    left = [Event(1.0, "left", f"rank {rank} left: {how}", rank) for rank, how in ((1, "completed"), (2, "failed"))]

    assert states(*left).failed == {2: "left: failed"}


# --- states and problems -------------------------------------------------------------------------


@cases(
    ("known", "at_s", "unchanged_s", "status"),
    [
        ("running", 2.0, 1.0, "stalled"),
        ("running", 0.5, 1.0, "running"),
        ("running", 0.5, 181.0, "no_update"),
        ("failed", 2.0, None, "failed"),
    ],
)
def test_status_between_two_summaries_is_taken_from_the_events(known, at_s, unchanged_s, status):
    seen = states(Event(1.0, "stalled", "no rank has made progress for 31 s"), at_s=at_s)

    assert status_of(known, known == "failed", seen, unchanged_s) == status


@cases(
    ("status", "missing", "problems"),
    [
        ("completed", 1, []),
        ("failed", 0, [("failed", "failed")]),
        ("running", 100, [("missing", "no report of ranks 0, 1, 2, 3 and 96 more in this window")]),
    ],
)
def test_problems_of_a_run(status, missing, problems):
    seen = coverage(missing_ranks=tuple(range(missing)))

    found = problems_of(Head("r", status=status), states(), seen, ())
    assert [(one.kind, one.text) for one in found] == problems


# --- the run folder ------------------------------------------------------------------------------


def test_newest_window_of_a_finished_run_is_shown(run):
    frame = shown(run)

    assert (frame.head.name, frame.head.status, frame.head.user) == ("run-1", "completed", "alice")
    assert (frame.place.window, frame.head.iteration, len(frame.points)) == (5, 50, 5)
    assert next((line.rank, line.reason) for line in frame.lines if line.reason) == (17, "straggler")
    assert frame.verdict is not None
    recorded = shown(GOLDEN)
    assert (recorded.head.status, recorded.head.iteration, len(recorded.ranks.known_lines)) == ("completed", 60, 2)


def test_positions_of_a_replay_have_the_rows_and_events_of_their_window(run):
    source, frames = source_of(run), []
    for move in (("oldest",), ("step", 2), ("step", -1), ("step", 99)):
        source.move(*move)
        frames.append(source.frame(time.time()))

    assert [one.place.window for one in frames] == [1, 3, 2, 5]
    assert [len(one.events) for one in frames[:3]] == [0, 1, 0]
    assert [line.step_s for line in frames[0].ranks.known_lines if line.host] == [0.4] * 8
    assert frames[0].head.status == "running"
    assert frames[3].place.is_newest


def test_new_windows_of_a_running_job_are_added(run):
    source = source_of(run)
    assert source.frame(time.time()).place.window == 5
    append(run / "windows-0001.jsonl", msgspec.json.encode(window_line(window(6), has_totals=False)) + b'\n{"torn')

    assert source.refresh()
    assert (source.frame(time.time()).place.window, len(source.frame(time.time()).points)) == (6, 6)


def test_invalid_lines_are_skipped(run):
    append(run / "windows-0001.jsonl", b"\n{}\nnot json\n\xff\xfe\n[1]\n")
    append(run / "events.jsonl", b"{}\n\xff\n")

    assert shown(run).place.window == 5


def test_unreadable_summary_is_a_note_and_the_windows_are_shown(run):
    (run / "summary.json").write_text('{"status": 3')

    frame = shown(run)
    assert frame.place.window == 5
    assert "summary.json cannot be read" in frame.notes[0]


def test_killed_run_without_a_summary_is_shown_and_replayed(run):
    (run / "summary.json").unlink()
    for path in run.iterdir():
        os.utime(path, (NOW_S, NOW_S))
    source = source_of(run)
    frame = source.frame(NOW_S + 200.0)
    source.move("oldest")

    assert (frame.head.name, frame.head.status, frame.place.window) == ("run-1", "no_update", 5)
    assert [one.kind for one in frame.problems] == ["no_update"]
    assert exit_status(frame) == PROBLEM
    assert source.frame(NOW_S).place.window == 1


def test_run_that_has_just_started_has_no_values(run):
    for name in ("summary.json", "windows-0001.jsonl", "ranks-0001.jsonl", "events.jsonl"):
        (run / name).unlink()

    for frame in (shown(run), TopFrame(Head("run-1", status="running"))):
        assert exit_status(frame) == NO_DATA
        assert "none yet" in text_of(frame) and "MFU -" in text_of(frame)


@pytest.mark.parametrize("name", ["run.json", "summary.json"])
def test_run_of_another_version_is_not_shown(tmp_path, name):
    change_document(copy_golden(tmp_path / "run") / name, schema_version=3)

    with pytest.raises(UnreadableRun, match=rf"{name} cannot be read: it has schema_version 3, .* reads only 5"):
        source_of(tmp_path / "run")


def test_newest_run_in_a_folder_is_chosen(run):
    os.utime(write_files(run.with_name("older"), {}) / "run.json", (1.0, 1.0))

    assert shown(run.parent).head.name == "run-1"


@cases(("name", "reason"), [("", "has no run"), ("missing", "does not exist")])
def test_folder_without_a_run_is_an_error(tmp_path, name, reason):
    with pytest.raises(UnreadableRun, match=reason):
        FolderSource(tmp_path / name).refresh()


def test_age_of_a_run_that_changes_does_not_depend_on_the_clock_of_its_disk(run):
    (run / "summary.json").unlink()
    source = source_of(run)
    assert source.frame(time.time() + 500.0).head.status == "no_update"
    append(run / "events.jsonl", msgspec.json.encode(Event(NOW_S, "gpus_busy", "the GPUs work again")) + b"\n")
    source.refresh()

    assert source.frame(time.time() + 500.0).head.status == "running"


def test_order_that_changes_while_a_frame_is_read_is_applied(run, monkeypatch):
    monkeypatch.setattr(top_reader, "FRAME_AT_LEAST_EVERY_S", 1e9)

    class Changing(FolderSource):
        """A folder whose table is filtered while it is read."""

        def refresh_hosts(self):
            reader.set_order(Order(text="3"))
            return super().refresh_hosts()

    reader = TopReader(Changing(run), lambda: None)
    reader.start()
    until_s = time.monotonic() + 60
    while reader.frame is None or [line.rank for line in reader.frame.lines] != [3]:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    reader.close()


# --- keys ----------------------------------------------------------------------------------------


PLAYING = TopView(is_playing=True)


@cases(
    ("view", "key", "screen", "after", "action"),
    [
        (TopView(), "left", ShownPane(), TopView(), Action("step", -1)),
        (TopView(), "home", ShownPane(), TopView(), Action("oldest")),
        (PLAYING, "end", ShownPane(), TopView(), Action("newest")),
        (TopView(), "space", ShownPane(is_over=True), PLAYING, Action("oldest")),
        (TopView(), "space", ShownPane(), TopView(), Action("pause")),
        (TopView(), "space", ShownPane(is_newest=False), PLAYING, None),
    ],
)
def test_keys_of_a_replay_request_positions(view, key, screen, after, action):
    assert after_key(view, key, screen) == (after, action)


def test_letters_of_the_filter_are_no_commands():
    view = TopView()
    for key in ["/", "q", "s", "backspace", "1", "enter"]:
        view, action = after_key(view, key, ShownPane())
        assert action is None

    assert (view.order.text, view.is_typing) == ("q1", False)
    assert after_key(view, "esc", ShownPane())[0].order.text == ""
    assert after_key(view, "q", ShownPane())[1] == Action("quit")


def test_scrolling_stops_at_both_ends():
    view, offsets = TopView(), []
    for key in ["pgdn", "pgdn", "pgdn", "up", "pgup", "pgup"]:
        view, _ = after_key(view, key, ShownPane(num_shown=10, num_lines=25))
        offsets.append(view.offset)

    assert (offsets[2], offsets[-1]) == (15, 0)


# --- the screen ----------------------------------------------------------------------------------


@cases(("width", "height"), [(80, 24), (200, 60), (40, 10), (20, 6), (19, 5), (1, 1), (300, 200)])
@cases("pane", ["ranks", "events", "waterfall", "help"])
def test_screen_never_exceeds_the_terminal(run, width, height, pane):
    for by_host in (False, True):
        view = TopView(pane=pane, order=Order(by_host=by_host))
        lines = render(shown(run, view.order), view, width, height, "notice " * 50)

        assert len(lines) <= height
        assert max(cell_len("".join(text for text, _ in line)) for line in lines) <= width


def test_screen_begins_with_the_run_and_its_verdict(run):
    lines = text_of(shown(run)).splitlines()

    assert lines[0].startswith("run-1  completed")
    assert [line.split()[0] for line in lines[1:4]] == ["Verdict", "Why", "Next"]
    assert any("data wait 33 %, usual 5 %" in line for line in lines)


def test_control_characters_of_names_never_reach_the_screen(run):
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\n"
    verdict = replace(make_summary().verdict, text=evil, why=evil, next=evil)
    change_document(run / "summary.json", run_id=evil, user=evil, status=evil, verdict=verdict)
    (run / "ranks-0001.jsonl").write_bytes(msgspec.json.encode(row(3, 5, host=evil, wait_s=2.0)) + b"\n")
    (run / "events.jsonl").write_bytes(msgspec.json.encode(Event(NOW_S, "straggler", evil)) + b"\n")
    frame = shown(run)

    for pane in ("ranks", "events", "waterfall"):
        lines = render(frame, TopView(pane=pane), 120, 40, notice=evil)
        assert "".join(part for line in lines for part, _ in line).isprintable()


def test_wide_letters_fill_two_cells():
    assert (cell_len(fit("日本語", 5)), cell_len(fit("e\u0301", 3))) == (5, 3)


def test_sparkline_keeps_a_peak_among_many_values():
    assert sparkline([1.0] * 500 + [9.0] + [1.0] * 500, 20).count("█") == 1


# --- for scripts ---------------------------------------------------------------------------------


def test_document_has_the_stable_names(run):
    found = document(shown(run))

    assert list(found) == [
        "schema_version", "run", "window", "verdict", "problems", "values", "doubtful", "coverage", "ranks", "events",
        "notes",
    ]  # fmt: skip
    assert sorted(found["run"]) == [
        "attempt", "currency", "elapsed_s", "forecast", "is_over", "iteration", "run_id", "simulated", "status",
        "total_iterations", "unchanged_s", "user",
    ]  # fmt: skip
    assert found["run"]["run_id"] == "run-1"
    assert found["ranks"]["worst"][0]["reason"] == "straggler"
    assert found["verdict"]["cause"] == "data_loading"
    json.dumps(found, allow_nan=False)


def test_exit_status_is_of_problems(run):
    frame = shown(run)

    assert exit_status(frame) == NO_PROBLEM
    assert exit_status(frame._replace(problems=[("failed", "failed")])) == PROBLEM
