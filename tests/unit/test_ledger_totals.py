"""``effllm runs``: the list, and totals by a key, with failed and killed runs and with lines of ledger files."""

import csv
import io
import json
import os
import time

import msgspec
import pytest
from run_folders import write_files
from sink_examples import make_report
from typer.testing import CliRunner

pytest.importorskip("duckdb", reason="needs the extra analysis")

from effllm.analysis import database, ledger
from effllm.analysis.load import load
from effllm.analysis.run_folders import UnreadableRun
from effllm.analysis.run_row import read_document
from effllm.commands import runs
from effllm.commands.app import app
from effllm.commands.output import ReadingProgress
from effllm.commands.runs import unix_time_of
from effllm.records.job import Coverage
from effllm.store.reader import window_line

HOUR_J = 3.6e6


@pytest.fixture
def run(tmp_path):
    """Return a function that writes a run of two GPUs for one hour, three quarters of it kept."""

    def write(name, *, hours=1.0, ratio=0.75, joules=HOUR_J, facts=None, **summary):
        known = {
            "schema_version": 5, "status": "completed", "is_over": True, "elapsed_s": 3600 * hours,
            "started_time_s": 1_790_000_000.0, "updated_time_s": time.time(),
            "coverage": {"gpus_expected": 2, "ranks_expected": 2},
            "energy": {"total_joules": joules, "measured_joules": joules, "gain_error": 0.05},
            "metrics": {
                "energy/total_joules": {"value": joules, "unit": "J", "error": 3.0},
                "energy/measured_joules": {"value": joules, "unit": "J"},
            },
            "waterfall": {"device_seconds": 7200 * hours, "joules": joules, "parts": [
                {"name": "steps", "device_seconds": 7200 * hours * ratio, "share": ratio},
                {"name": "data", "device_seconds": 7200 * hours * (1 - ratio), "share": 1 - ratio},
            ]},
            "goodput": {"elapsed_s": 3600 * hours, "ratio": ratio, "seconds": {"kept": 3600 * hours * ratio},
                        "rank_seconds": {}, "joules": {}, "attempts": []},
        }  # fmt: skip
        run = {"schema_version": 5, "run_id": name, **(facts or {})}
        return write_files(tmp_path / "runs" / name, run, {**known, **summary})

    return write


def totals(path, by, since_s=None, wasted=False):
    found, skipped = ledger.read_ledger([path], since_s)
    return ledger.totals(found, by, skipped, wasted)


def rows(tmp_path, by, **options):
    return {row.group: row for row in totals(tmp_path / "runs", by, **options).rows}


def command(*arguments):
    return CliRunner().invoke(app, ["runs", *map(str, arguments)])


def printed(tmp_path, *options):
    """Return what the command prints."""
    done = command(tmp_path / "runs", *options)
    assert done.exit_code == 0
    return done.stdout


def write_lines(path, *lines):
    """Write a ledger file."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_failed_and_killed_runs_are_in_the_totals(run, tmp_path):
    """Two GPUs: 2 GPU-hours a run; a killed run has an old summary with the status running."""
    run("good")
    run("bad", status="failed", ratio=0.0)
    run("dead", status="running", is_over=False, updated_time_s=time.time() - 3600)
    run("alive", status="running", is_over=False)

    found = rows(tmp_path, "outcome")

    assert {name: (row.runs, row.gpu_hours) for name, row in found.items()} == {
        name: (1, pytest.approx(2.0)) for name in ("completed", "failed", "killed", "running")
    }
    assert found["failed"].wasted_gpu_hours == pytest.approx(2.0)
    assert found["completed"].wasted_gpu_hours == pytest.approx(0.5)


def test_losses_that_can_be_avoided_are_wasted(run, tmp_path):
    """Not the useful work, and not the part of the steps that is below the peak."""
    seconds = {"unused": 1000.0, "device_idle": 2000.0, "straggling": 500.0, "useful": 3000.0, "below_peak": 700.0}
    parts = [{"name": name, "device_seconds": one, "share": one / 7200} for name, one in seconds.items()]
    run("half", waterfall={"device_seconds": 7200.0, "joules": None, "parts": parts})

    found = rows(tmp_path, "outcome")["completed"]
    assert (found.gpu_hours, found.wasted_gpu_hours) == (pytest.approx(2.0), pytest.approx(3500 / 3600))
    line = {"run_id": "a", "status": "completed", "gpu_hours": 2.0, "wasted_gpu_hours": 1.25}
    write_lines(tmp_path / "lines.jsonl", line)
    assert totals(tmp_path / "lines.jsonl", "outcome").total.wasted_gpu_hours == pytest.approx(1.25)


@pytest.mark.parametrize("has_summary", [True, False])
def test_hours_of_a_killed_run_are_at_least_those_until_its_last_report(run, tmp_path, has_summary):
    folder = run("dead", hours=0.5, status="running", is_over=False, updated_time_s=time.time() - 3600)
    if not has_summary:
        (folder / "summary.json").unlink()
        about = {"schema_version": 5, "run_id": "dead", "started_time_s": 1_790_000_000.0}
        (folder / "run.json").write_text(json.dumps(about))
    window = make_report(time_s=1_790_000_000.0 + 5400, coverage=Coverage(2, 2, 2, 2, 0, 0))
    (folder / "windows-0001.jsonl").write_bytes(msgspec.json.encode(window_line(window, has_totals=False)) + b"\n")

    (found,) = totals(tmp_path / "runs", "outcome").rows
    assert (found.group, found.gpu_hours) == ("killed" if has_summary else "unknown", pytest.approx(3.0))
    assert "≥3.00" in printed(tmp_path)


def test_running_job_of_a_ledger_without_a_new_line_was_killed(tmp_path):
    line = {"run_id": "a", "status": "running", "gpu_hours": 2.0, "updated_time_s": time.time()}
    old = {**line, "run_id": "b", "updated_time_s": time.time() - 2 * 3600}
    write_lines(tmp_path / "lines.jsonl", line, old)

    groups = {row.group: row.gpu_hours for row in totals(tmp_path / "lines.jsonl", "outcome").rows}
    assert groups == {"running": 2.0, "killed": 2.0}


def test_costs_have_their_currency_and_different_ones_are_not_added(run, tmp_path):
    cost = {"metrics": {"energy/gpu_cost": {"value": 10.0, "unit": "money"}}}
    run("a", user="alice", currency="EUR", **cost)
    run("b", user="bob", currency="USD", **cost)

    text = printed(tmp_path, "--by", "user")
    assert "10.0 EUR" in text and "10.0 USD" in text
    assert totals(tmp_path / "runs", "user").total.gpu_cost is None


def test_timing_errors_are_independent_and_sensor_errors_are_added(run, tmp_path):
    """sqrt(3^2 + 4 * 3^2 ...) for four runs: 6 J; the gain of 5 % of 4 kWh."""
    for number in range(4):
        run(f"run-{number}")

    total = totals(tmp_path / "runs", "outcome").total

    assert total.joules == pytest.approx(4 * HOUR_J)
    assert total.error_joules == pytest.approx(6.0)
    assert total.gain_joules == pytest.approx(0.2 * HOUR_J)


def test_energy_of_a_group_with_a_hole_is_no_total(run, tmp_path):
    run("whole")
    run("part", energy={"total_joules": None, "measured_joules": 0.5 * HOUR_J},
        metrics={"energy/measured_joules": {"value": 0.5 * HOUR_J, "unit": "J"}})  # fmt: skip

    total = totals(tmp_path / "runs", "outcome").total

    assert (total.joules, total.incomplete) == (pytest.approx(1.5 * HOUR_J), 1)
    text = printed(tmp_path, "--by", "outcome")
    assert "\n≥ kWh: no total energy in 1 run;" in text and "≥1.50" in text


def test_goodput_of_a_group_is_weighted_by_device_time(run, tmp_path):
    """(1 h * 0.5 + 3 h * 0.9) / 4 h = 0.8."""
    run("short", ratio=0.5)
    run("long", hours=3.0, ratio=0.9)

    assert totals(tmp_path / "runs", "outcome").total.goodput_ratio == pytest.approx(0.8)


def test_run_on_two_nodes_is_divided_and_its_slow_node_is_counted(run, tmp_path):
    run("wide", facts={"ranks": {"0": {"host": "a", "devices": []}, "1": {"host": "b", "devices": []}}},
        stragglers=[{"ranks": [1], "host": "b"}])  # fmt: skip

    found = rows(tmp_path, "node")

    assert {name: (row.gpu_hours, row.slow_runs) for name, row in found.items()} == {
        "a": (pytest.approx(1.0), 0),
        "b": (pytest.approx(1.0), 1),
    }


def test_keys_are_tags_account_user_and_month(run, tmp_path):
    run("a", tags=["project=vision", "config=big"], user="alice", account="x")
    run("b", user="bob", account="physics", started_time_s=1_792_000_000.0)

    assert set(rows(tmp_path, "project")) == {"vision", "physics"}
    assert set(rows(tmp_path, "user")) == {"alice", "bob"}
    assert set(rows(tmp_path, "config")) == {"big", "? x no GPU"}
    assert set(rows(tmp_path, "month")) == {"2026-09", "2026-10"}


def test_since_leaves_out_earlier_starts(run, tmp_path):
    run("old")
    run("new", started_time_s=1_790_600_000.0)

    assert totals(tmp_path / "runs", "outcome", since_s=1_790_500_000.0).total.runs == 1
    assert unix_time_of("7d", 700_000.0) == pytest.approx(95_200.0)
    assert unix_time_of("2026-01-01", 0.0) == 1_767_225_600.0
    with pytest.raises(ValueError, match="does not match"):
        unix_time_of("soon", 0.0)


def test_wasted_orders_by_wasted_hours_and_names_the_loss(run, tmp_path):
    run("a", hours=4.0, ratio=0.99, user="careful", verdict={"cause": "healthy"})
    run("b", hours=1.0, ratio=0.2, user="wasteful", verdict={"cause": "data_loading"})

    found = totals(tmp_path / "runs", "user", wasted=True)

    assert [(row.group, row.cause) for row in found.rows] == [("wasteful", "data_loading"), ("careful", None)]


def test_lines_of_ledger_files_are_counted_and_the_last_attempt_wins(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    line = {"run_id": "one", "status": "failed", "user": "alice", "gpu_hours": 1.0, "total_joules": 5.0}
    later = {**line, "status": "completed", "gpu_hours": 3.0, "tags": ["project=a"]}
    (folder / "alice.jsonl").write_text(f'{json.dumps(line)}\n{json.dumps(later)}\n{{"run_id": "to')
    (folder / "mallory.jsonl").write_text('{"run_id": 7}\n[]\n"\x1b[2J"\n')

    found = totals(folder, "project")

    assert [(row.group, row.runs, row.gpu_hours, row.joules) for row in found.rows] == [("a", 1, 3.0, 5.0)]
    assert [text.rpartition("/")[2] for text in found.skipped] == [
        "alice.jsonl: 1 incomplete or invalid line",
        "mallory.jsonl: 3 incomplete or invalid lines",
    ]


def test_lines_of_another_version_are_left_out_and_named(tmp_path):
    write_lines(tmp_path / "alice.jsonl", {"run_id": "new"}, {"run_id": "old", "schema_version": 3})

    found = totals(tmp_path, "outcome")

    assert found.total.runs == 1
    (text,) = found.skipped
    assert text.startswith(f"{tmp_path}/alice.jsonl: a line was left out: it has schema_version 3")


def test_runs_of_two_users_with_one_name_are_two_runs(tmp_path):
    for user in ("alice", "bob"):
        write_lines(tmp_path / f"{user}.jsonl", {"run_id": "base", "user": user, "gpu_hours": 1.0})

    assert totals(tmp_path, "user").total.gpu_hours == 2.0


def test_a_run_with_a_folder_and_a_line_is_counted_once(run, tmp_path):
    run("one")
    line = {"run_id": "one", "started_time_s": 1_790_000_000.0, "gpu_hours": 2.0}
    other = {"run_id": "one", "started_time_s": 1_790_009_999.0, "gpu_hours": 2.0, "folder": "/elsewhere/one"}
    write_lines(tmp_path / "runs/alice.jsonl", line, other)

    assert (total := totals(tmp_path / "runs", "outcome").total).runs == 2
    assert total.gpu_hours == pytest.approx(4.0)


@pytest.fixture
def cached(monkeypatch):
    """Use the cache for any number of runs."""
    monkeypatch.setattr(database, "MIN_RUNS", 1)
    monkeypatch.setattr(database, "MAX_NEW_ROWS", 0)


@pytest.mark.usefixtures("cached")
def test_changed_runs_are_counted_anew_and_other_runs_are_not_read(run, tmp_path, monkeypatch):
    """The cache has all columns, also after a reading of few columns."""
    folders = [run(name) for name in "abcd"]
    read = []
    monkeypatch.setattr(database, "read_document", lambda path: read.append(path.parent.name) or read_document(path))
    for by in ("outcome", "user"):
        assert totals(tmp_path / "runs", by).total.runs == 4
    text = (folders[1] / "summary.json").read_text().replace('"completed"', '"kompleted"')  # the same size
    (folders[1] / "summary.json").unlink()
    (folders[1] / "summary.json").write_text(text)
    run("e")

    assert {name: row.runs for name, row in rows(tmp_path, "outcome").items()} == {"completed": 4, "kompleted": 1}
    assert sorted(read) == sorted(["a", "b", "c", "d", "b", "e"] * 2)
    loaded = load(tmp_path / "runs")
    assert sorted(loaded.runs.select("run_id, config").fetchall()) == [(name, None) for name in "abcde"]
    assert loaded.runs.select("goodput_seconds").fetchall() == [({"kept": 2700.0},)] * 5
    assert len(read) == 12


@pytest.mark.parametrize("by", ["outcome", "month", "node"])
@pytest.mark.parametrize("value", [1.7e308, -1.7e308])
def test_values_that_overflow_are_not_counted(run, tmp_path, value, by):
    run("good")
    metrics = {"energy/total_joules": {"value": value, "unit": "J", "error": value}}
    run("huge", joules=value, hours=value / 1e4, started_time_s=value, metrics=metrics)
    line = {"run_id": "line", "gpus": 2, "gpu_hours": value, "error_joules": value, "started_time_s": value}
    write_lines(tmp_path / "runs/alice.jsonl", line)

    found = json.loads(printed(tmp_path, "--by", by, "--json"), parse_constant=pytest.fail)
    assert (found["total"]["gpu_hours"], found["total"]["joules"]) == (pytest.approx(2.0), pytest.approx(HOUR_J))
    assert sorted(found["skipped"]) == [
        f"{tmp_path}/runs/alice.jsonl: 1 incomplete or invalid line",
        f"{tmp_path}/runs/huge/summary.json: elapsed_s cannot be {value * 0.36:g}",
    ]


@pytest.mark.parametrize(
    ("is_terminal", "text"),
    [(True, "\r2,000 of 3,000 run folders were read\r" + " " * 36 + "\r"), (False, "")],
)
def test_progress_is_shown_on_a_terminal_and_erased(monkeypatch, is_terminal, text):
    output, times = io.StringIO(), iter([0.0, 0.5, 1.5, 1.5, 1.6])
    monkeypatch.setattr(output, "isatty", lambda: is_terminal)
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    monkeypatch.setattr("sys.stderr", output)
    progress = ReadingProgress()
    for done in (0, 2000, 2001, 3000):
        progress(done, 3000)

    assert output.getvalue() == text


def test_unknown_gpu_hours_are_not_zero_hours(run, tmp_path):
    """A run without a report has no device time; a run without GPUs has no GPU-hours."""
    run("known")
    run("without-report", waterfall=None)
    run("cpu", waterfall=None, coverage={"gpus_expected": 0, "ranks_expected": 2})

    total = totals(tmp_path / "runs", "outcome").total
    text = printed(tmp_path, "--by", "outcome")

    assert (total.gpu_hours, total.without_hours) == (pytest.approx(2.0), 1)
    assert "≥2.00" in text and "\n≥ GPU-h: unknown in 1 run (" in text


def test_simulated_runs_are_named(run, tmp_path):
    run("real")
    run("demo", simulated=True)

    assert "simulated: GPUs of 1 run were simulated" in printed(tmp_path, "--by", "outcome")
    assert totals(tmp_path / "runs", "outcome").total.simulated == 1


def test_one_ledger_file_is_read_and_other_files_are_not_opened(run, tmp_path):
    """A named pipe would block; files of a run folder are no ledgers."""
    write_lines(tmp_path / "alice.jsonl", {"run_id": "one", "gpu_hours": 1.0})
    write_lines(tmp_path / "bob.jsonl", {"run_id": "two", "gpu_hours": 1.0})
    os.mkfifo(tmp_path / "pipe.jsonl")
    folder = run("own")
    (folder / "events.jsonl").write_text("{}\n")

    assert totals(tmp_path / "alice.jsonl", "user").total.runs == 1
    assert (both := totals(tmp_path, "user")).total.runs == 3
    assert both.skipped == [f"{tmp_path / 'pipe.jsonl'}: not a readable file"]
    for path in (folder, folder / "events.jsonl"):
        assert (found := totals(path, "user")).total.runs == 1 and not found.skipped


def test_folder_without_runs_is_reported_in_one_line(tmp_path):
    with pytest.raises(UnreadableRun):
        totals(tmp_path, "outcome")
    done = command(tmp_path, "--by", "outcome")
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)


def test_names_can_neither_move_the_cursor_nor_be_a_formula(run, tmp_path):
    run("a", user="\x1b[2J[red]=cmd", verdict={"cause": "\x1b[31m=cause\n"})
    run("b", user="=1+2")
    run("c")

    text, table = printed(tmp_path, "--by", "user"), printed(tmp_path, "--by", "user", "--csv")

    assert "\x1b" not in text + table and "[red]=cmd" in text
    assert "\n'=1+2," in table
    assert "\n-," in table


@pytest.mark.parametrize("by", ["outcome", "node", "config"])
@pytest.mark.parametrize("cause", ["data_loading", "x" * 70])
def test_table_has_at_most_80_columns(run, tmp_path, by, cause):
    run("a", user="alice", verdict={"cause": cause}, metrics={
        "energy/total_joules": {"value": 123456789.0, "unit": "J", "error": 3.0},
        "energy/gpu_cost": {"value": 12345.6, "unit": "money"}, "energy/co2_kg": {"value": 1234.5, "unit": "kg"},
    })  # fmt: skip

    lines = printed(tmp_path, "--by", by).splitlines()

    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(by) and "cost" in lines[0] and "…" not in "".join(lines)
    assert any(line.startswith("not shown: largest loss") for line in lines)


def test_on_a_terminal_the_worst_users_fit_on_one_screen(run, tmp_path, monkeypatch, capsys):
    """The question is "who wasted most this week"; the first line must not scroll away."""
    for number in range(60):
        run(f"run-{number}", user=f"user-{number:02}", ratio=number / 100, simulated=True, metrics={
            "energy/gpu_cost": {"value": 12345.6, "unit": "money"}, "energy/co2_kg": {"value": 1234.5, "unit": "kg"},
        })  # fmt: skip
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)

    unset = {"since": "", "sql": "", "export": "", "as_csv": False, "as_json": False}
    status = runs.main([str(tmp_path / "runs")], by="user", wasted=True, **unset)
    lines = capsys.readouterr().out.splitlines()

    assert status == 0
    assert 20 <= len(lines) <= 23 and max(map(len, lines)) <= 80, "one line is left for the prompt"
    assert [line.split()[0] for line in lines[1:4]] == ["user-00", "user-01", "user-02"]
    count = sum(line.startswith("user-") for line in lines)
    assert f"{60 - count} more groups: --csv and --json print all groups" in lines


def test_unknown_key_is_refused_with_the_known_keys(tmp_path):
    done = command(tmp_path, "--by", "colour")

    assert done.exit_code == 2
    assert "outcome, project, user, account, config, node, month" in " ".join(done.stderr.replace("│", " ").split())


def test_runs_are_listed_the_newest_first_with_their_figures(run, tmp_path):
    metrics = {
        "run_throughput/tokens_per_second_per_gpu": {"value": 3120.0, "unit": "tokens/s"},
        "run_throughput/mfu_ratio": {"value": 0.312, "unit": "ratio"},
        "run_energy/joules_per_token": {"value": 0.25, "unit": "J/token"},
        "energy/total_joules": {"value": HOUR_J, "unit": "J"},
    }
    run("20260101-120000-1a2b3c4d", started_time_s=1_790_000_000.0)
    run("20260102-120000-1a2b3c4d", started_time_s=1_790_090_000.0, metrics=metrics, verdict={"cause": "data_loading"})
    run("20260103-120000-1a2b3c4d", started_time_s=1_789_990_000.0, status="failed")

    header, *lines = printed(tmp_path).splitlines()
    assert max(map(len, (header, *lines))) <= 80
    assert header.split() == ["run", "status", "verdict", "tok/s/GPU", "MFU", "kWh"]
    assert [line.split()[0][:8] for line in lines[:3]] == ["20260102", "20260101", "20260103"]
    assert lines[0].split()[1:] == ["completed", "data", "loading", "3,120", "31.2", "%", "1.00"]
    assert lines[3:] == ["not shown: started (UTC), GPU-h, J/token; --csv and --json print all columns"]


def test_list_as_csv_and_json_has_all_runs_and_columns(run, tmp_path):
    run("a", facts={"user": "=1+1"})
    run("b")

    rows = list(csv.DictReader(io.StringIO(printed(tmp_path, "--csv"))))
    objects = json.loads(printed(tmp_path, "--json"))
    assert [row["run_id"] for row in rows] == [one["run_id"] for one in objects] == ["a", "b"]
    assert (rows[0]["user"], objects[0]["gpu_hours"]) == ("'=1+1", 2.0)


def test_runs_of_the_folder_of_the_settings_are_listed_without_a_path(run, tmp_path, monkeypatch):
    run("a")
    monkeypatch.setenv("EFFICIENTLLM_RUN_DIR", str(tmp_path / "runs"))

    assert command().stdout.splitlines()[1].startswith("a ")


def test_options_that_exclude_each_other_are_wrong_use(tmp_path):
    for options in (["--by", "user", "--sql", "SELECT 1"], ["--sql", "SELECT 1", "--export", "a.csv"]):
        done = command(tmp_path, *options)
        assert (done.exit_code, "are two forms" in done.stderr) == (2, True)
    for options in (["--export", "a.csv", "--json"], ["--sql", "SELECT 1", "--since", "7d"]):
        assert command(tmp_path, *options).exit_code == 2
