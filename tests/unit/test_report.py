"""The report of runs: escaping, numbers equal to summary.json, bad and unfinished run folders, size."""

import html
import json
import os
import re
import sys
from types import SimpleNamespace

import msgspec
import pytest
from cases import cases
from msgspec.structs import replace
from run_folders import write_files, write_run
from sink_examples import make_summary
from typer.testing import CliRunner

from effllm.analysis.recorded_run import MAX_COLUMNS, RankTimes
from effllm.commands.app import app
from effllm.records.job import Coverage
from effllm.records.values import ValueSummary
from effllm.records.verdict import Verdict, Waterfall, WaterfallPart
from effllm.store.reader import RankRow
from effllm.views.report.details import heat_map
from effllm.views.report.markup import Markup, element
from effllm.views.report.page import MAX_BYTES

FORGED = "</script><script>alert(1)</script>\x1b[2J\u202e\"'<img src=x onerror=alert(2)>"
WATERFALL = Waterfall(
    100.0,
    2000.0,
    (
        WaterfallPart("data", 25.0, 0.25, 500.0, max_gain=0.33, evidence="reports"),
        WaterfallPart("steps", 75.0, 0.75, 1500.0, evidence="rest"),
    ),
    "GPU",
)
VERDICT = Verdict("data_loading", "data loading: 25.0 % of GPU time", "data wait 5 ms", "raise workers", 0.33, "high")
SUMMARY = make_summary()


@pytest.fixture
def report(tmp_path):
    """Write the report of run folders, and return the page."""

    def run(*folders, status=0):
        target = tmp_path / "report.html"
        done = CliRunner().invoke(app, ["report", *map(str, folders), "-o", str(target)])
        assert done.exit_code == status, done.output
        return target.read_text() if status == 0 else done.output

    return run


@pytest.fixture
def page(report, tmp_path):
    """Write a run folder; return the page of its report."""
    return lambda *files, **more: report(folder_of(tmp_path / "run", *files, **more))


def json_line(**document):
    return json.dumps(document) + "\n"


def window(number, attempt=1, **changes):
    values = {"throughput/tokens_per_second_per_gpu": 1000.0 + number}
    line = {"attempt": attempt, "iteration": number, "iteration_first": number, "iteration_last": number}
    line |= {"window": number, "time_s": float(number), "coverage": msgspec.to_builtins(Coverage(1, 1, 1, 1, 0, 0))}
    return json_line(**{**line, "loss": 2.0, "values": values, **changes})


def event(number, kind="joined", text="event {}.", **more):
    return json_line(time_s=number, kind=kind, text=text.format(number), attempt=1, **more)


WINDOW = window(1)


def folder_of(path, summary=SUMMARY, windows=WINDOW, events="", ranks="", facts=None):
    return write_files(path, facts or {}, summary, windows=windows, events=events, ranks=ranks)


def text_of(page):
    body = re.sub(r"<script.*?</script>|<style>.*?</style>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", " ", body))


def run_of(page):
    """Return the embedded data of the only run of a page."""
    text = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1]
    (run,) = json.loads(text)["runs"]
    return run


def test_texts_and_attributes_are_escaped_and_markup_is_not():
    assert element("p", FORGED, Markup("<b>x</b>")).count("<") == 4
    assert element("p", title='"><i>') == '<p title="&quot;&gt;&lt;i&gt;"></p>'


def test_page_begins_with_the_verdict_its_numbers_the_curves_and_the_waterfall(page):
    found = page(replace(SUMMARY, verdict=VERDICT, waterfall=WATERFALL))

    text = text_of(found)
    places = [text.index(one) for one in ("data loading: 25.0 % of GPU time", "data wait 5 ms", "raise workers")]
    assert places == sorted(places)
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", found)
    assert headings[:3] == ["Verdict", "Curves over the iterations", "Where the device time went"]
    assert ">30.8</data></b><span>mJ per token ±5 %</span>" in found
    assert "25.0 %" in text and "75.0 %" in text


def test_every_metric_of_the_summary_is_shown_with_its_exact_value(page):
    found = page()

    shown = {float(value) for value in re.findall(r'<data value="([^"]+)"', found)}
    run_to_date = {value.value for tag, value in SUMMARY.metrics.items() if not tag.startswith(("job/", "window/"))}
    assert set() < run_to_date <= shown
    assert run_of(found)["summary"]["metrics"] == json.loads(msgspec.json.encode(SUMMARY))["metrics"]


def test_forged_names_hosts_and_events_cannot_inject_markup(report, tmp_path):
    made = folder_of(
        tmp_path / "run",
        replace(SUMMARY, user=FORGED, hosts=(FORGED,), model=FORGED, tags=(FORGED,), run_id=FORGED),
        events=event(1.0, "xid", FORGED, rank=0),
        ranks=json_line(rank=0, iteration_first=1, iteration_last=1, busy_s=1.0, host=FORGED),
        facts={"command": [FORGED], "packages": {FORGED: "1"}},
    )
    (made / "stacks").mkdir()
    (made / "stacks" / "rank0.txt").write_text(FORGED)

    page = report(made)
    assert page.count("<script") == 2
    assert "<img" not in page
    assert page.count(html.escape("<img src=x", quote=False)) >= 7
    assert not [letter for letter in page if not letter.isprintable() and letter != "\n"]
    assert run_of(page)["summary"]["user"] == FORGED


def test_page_has_a_policy_without_network_and_no_address(page):
    found = page()

    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', found)
    assert "default-src 'none'" in html.unescape(policy)
    assert "unsafe" not in policy
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"|url\(|@import|//\w+\.\w+', found)
    assert " style=" not in found


TORN = {"windows": window(1, time_s=-5.0) + '{"attempt":1,"iterat\n', "events": event(1e30, "clock") + "{torn"}


@cases(
    ("summary", "files", "texts"),
    [
        (None, {"windows": ""}, ["No verdict: there is no summary.json.", "No curves: no window has been recorded."]),
        (replace(SUMMARY, status="running", is_over=False), {}, ["it may have been killed"]),
        (replace(SUMMARY, simulated=True), {}, ["SIMULATED", "Verdict"]),
        (SUMMARY, TORN, ["1e+30 s", "events: 1 incomplete or invalid lines were left out"]),
        (SUMMARY, TORN, ["windows: 1 incomplete or invalid lines were left out"]),
        (
            replace(SUMMARY, schema_version=3),
            {},
            ["summary.json cannot be read: it has schema_version 3, and this version of effllm reads only 5", "Loss"],
        ),
        (
            replace(
                SUMMARY, instruments={"reward": ValueSummary(count=7, unit="points", mean=0.25, least=0.0, most=1)}
            ),
            {},
            ["reward", "0.25"],
        ),
        (
            replace(SUMMARY, events={}),
            {"events": event(0, "xid") + "".join(map(event, range(1, 5000)))},
            ["event 0.", "event 4999.", "4,849 more events are not listed"],
        ),
    ],
)
def test_page_has_texts_in_this_order(report, tmp_path_factory, summary, files, texts):
    text = text_of(report(folder_of(tmp_path_factory.mktemp("runs") / "run", summary, **files)))

    places = [text.find(one) for one in texts]
    assert places == sorted(places) and places[0] >= 0
    assert "event 100." not in text


@cases(
    ("lines", "curve"),
    [
        (TORN["windows"], [[1], [2.0]]),
        # a restart begins the curve again
        (
            "".join([window(1), window(2), window(3), window(2, attempt=2), window(3, attempt=2)]),
            [[1, 2, 3, 2, 2, 3], [2.0, 2.0, 2.0, None, 2.0, 2.0]],
        ),
    ],
)
def test_curve_has_a_gap_at_a_restart(report, tmp_path_factory, lines, curve):
    page = report(folder_of(tmp_path_factory.mktemp("runs") / "run", windows=lines))

    assert run_of(page)["curves"]["loss"] == curve


def rank_line(rank, last, step_s, own_s=0.0):
    window, busy_s = last // 10, 10 * step_s
    own = {"own_steps": 10 * bool(own_s), "own_step_s": 10 * own_s}
    return RankRow(1, rank, window, last - 9, last, 0.0, busy_s, busy_s, busy_s, 0.0, **own)


def test_times_of_ranks_are_own_times_if_there_are_any_and_windows_are_added_up():
    times = RankTimes()
    for window in range(1, 4 * MAX_COLUMNS + 1):
        for rank in (0, 1):
            times.add_report(rank_line(rank, 10 * window, 0.2, own_s=0.1 * (1 + rank)))

    assert times.has_own
    assert MAX_COLUMNS / 2 <= len(times.columns) <= MAX_COLUMNS
    assert times.columns[-1][0] == 40 * MAX_COLUMNS
    assert sum(by_rank[1][1] for _, by_rank in times.columns) == 40 * MAX_COLUMNS
    assert {round(sums[0] / sums[1], 6) for _, by_rank in times.columns for sums in by_rank.values()} == {0.1, 0.2}


def test_heat_map_has_the_full_colour_for_a_slow_rank():
    run = SimpleNamespace(ranks=SimpleNamespace(times=RankTimes()))
    assert heat_map(run) is None
    for window in (1, 2):
        for rank in range(4):
            run.ranks.times.add_report(rank_line(rank, 10 * window, 0.2 if rank == 3 and window == 2 else 0.1))

    drawn = heat_map(run)
    assert drawn.count("<rect") == 8
    assert drawn.count('fill-opacity="1"') == 1
    assert "<title>rank 3, to iteration 20: 200.0 ms, 100 % above the median</title>" in drawn


@pytest.mark.long
def test_ten_million_events_are_read_within_limits(report, tmp_path):
    made = folder_of(tmp_path / "run", replace(SUMMARY, events={"ecc": 10**7}))
    lines = event(1.0, "ecc", "1 uncorrected <b>", rank=3)
    with (made / "events.jsonl").open("w") as file:
        for _ in range(100):
            file.write(lines * 10**5)
        file.write(event(2.0, "xid", "the last event"))

    page = report(made)

    text = text_of(page)
    unread = (len(lines) * 10**7 - 64 * 2**20) / 2**20
    assert f"{unread:.0f} MiB of older events were not read" in text
    assert "the last event" in text and "10,000,000" in text
    assert len(page.encode()) < MAX_BYTES


def test_long_run_fits_into_the_limit_of_the_size(page):
    found = page(windows="".join(window(number, loss=1.0 + number % 977) for number in range(1, 20_001)))

    xs, ys = run_of(found)["curves"]["loss"]
    assert len(found.encode()) < MAX_BYTES
    assert len(xs) <= 800
    assert (min(ys), max(ys)) == (1.0, 977.0)


def test_several_runs_have_the_outcomes_of_the_comparison(report, tmp_path):
    a, b = (write_run(tmp_path / name, {"run_throughput/tokens_per_second": 100.0}) for name in "ab")

    text = text_of(report(a, b))
    assert f"A: {a} (1 run, a)" in text
    assert "unknown: " in text[text.rindex("Comparison") : text.rindex("What ran")]


def test_one_run_needs_neither_duckdb_nor_scipy(report, tmp_path, monkeypatch):
    for name in ("duckdb", "scipy", "scipy.stats"):
        monkeypatch.setitem(sys.modules, name, None)
    a, b = (folder_of(tmp_path / name) for name in "ab")

    assert "No comparison" not in text_of(report(a))
    assert "No comparison: a comparison needs SciPy: pip install 'effllm[analysis]'" in text_of(report(a, b))


def test_extreme_numbers_and_other_kinds_of_files_are_left_out(report, tmp_path):
    lines = window(1) + window(2, loss=1e308) + window(10**40) + window(3, loss=-1e308)
    made = folder_of(tmp_path / "run", windows=lines)
    (made / "events.jsonl").unlink()
    for name in ("events.jsonl", "windows-0002.jsonl"):
        os.mkfifo(made / name)

    page = report(made)
    assert run_of(page)["curves"]["loss"] == [[1, 2], [2.0, None]]
    assert "windows: 1 incomplete or invalid lines were left out" in text_of(page)


def test_page_is_private_and_replaces_an_older_one(page, tmp_path):
    (tmp_path / "report.html").write_text("old")
    page()

    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o600


def test_missing_run_and_missing_folder_exit_with_a_sentence(report, tmp_path):
    assert "does not exist" in report(tmp_path / "nothing", status=1)
    done = CliRunner().invoke(
        app, ["report", str(folder_of(tmp_path / "run")), "-o", str(tmp_path / "none" / "x.html")]
    )
    assert (done.exit_code, "No such file" in done.output) == (1, True)
