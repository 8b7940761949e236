"""The report of runs: escaping, numbers equal to summary.json, bad and unfinished run folders, size."""

import html
import json
import os
import re
import sys
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace
from run_folders import write_run
from sink_examples import make_summary
from typer.testing import CliRunner

from effllm.analysis.recorded_run import MAX_COLUMNS, RankTimes
from effllm.commands.app import app
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


@pytest.fixture
def report(tmp_path):
    """Write the report of run folders, and return the page."""

    def run(*folders, status=0):
        target = tmp_path / "report.html"
        done = CliRunner().invoke(app, ["report", *map(str, folders), "-o", str(target)])
        assert done.exit_code == status, done.output
        return target.read_text() if status == 0 else done.output

    return run


def window(number, attempt=1, **changes):
    values = {"throughput/tokens_per_second_per_gpu": 1000.0 + number}
    line = {"attempt": attempt, "iteration": number, "iteration_first": number, "iteration_last": number}
    return json.dumps({**line, "loss": 2.0, "values": values, **changes}) + "\n"


def folder_of(path, summary=None, windows="", events="", ranks="", facts=None):
    path.mkdir()
    if summary is not None:
        (path / "summary.json").write_bytes(msgspec.json.encode(summary))
    (path / "run.json").write_text(json.dumps(facts or {}))
    (path / "windows-0001.jsonl").write_text(windows)
    (path / "events.jsonl").write_text(events)
    (path / "ranks-0001.jsonl").write_text(ranks)
    return path


def text_of(page):
    body = re.sub(r"<script.*?</script>|<style>.*?</style>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", " ", body))


def data_of(page):
    return json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1])


def test_texts_and_attributes_are_escaped_and_markup_is_not():
    assert element("p", FORGED, Markup("<b>x</b>")).count("<") == 4
    assert element("p", title='"><i>') == '<p title="&quot;&gt;&lt;i&gt;"></p>'


def test_page_begins_with_the_verdict_its_numbers_the_curves_and_the_waterfall(report, tmp_path):
    summary = replace(make_summary(), verdict=VERDICT, waterfall=WATERFALL)

    page = report(folder_of(tmp_path / "run", summary, window(1)))

    text = text_of(page)
    places = [text.index(one) for one in ("data loading: 25.0 % of GPU time", "data wait 5 ms", "raise workers")]
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
    assert places == sorted(places)
    assert headings[:3] == ["Verdict", "Curves over the iterations", "Where the device time went"]
    assert ">30.8</data></b><span>mJ per token ±5 %</span>" in page
    assert "25.0 %" in text
    assert "75.0 %" in text


def test_every_metric_of_the_summary_is_shown_with_its_exact_value(report, tmp_path):
    summary = make_summary()

    page = report(folder_of(tmp_path / "run", summary, window(1)))

    shown = {float(value) for value in re.findall(r'<data value="([^"]+)"', page)}
    run_to_date = {value.value for tag, value in summary.metrics.items() if not tag.startswith(("job/", "window/"))}
    assert run_to_date
    assert run_to_date <= shown
    embedded = data_of(page)["runs"][0]["summary"]
    assert embedded["metrics"] == json.loads(msgspec.json.encode(summary))["metrics"]


def test_forged_names_hosts_and_events_cannot_inject_markup(report, tmp_path):
    summary = replace(make_summary(), user=FORGED, hosts=(FORGED,), model=FORGED, tags=(FORGED,), run_id=FORGED)
    event = json.dumps({"time_s": 1.0, "kind": "xid", "text": FORGED, "rank": 0, "attempt": 1}) + "\n"
    rank = json.dumps({"rank": 0, "iteration_first": 1, "iteration_last": 1, "busy_s": 1.0, "host": FORGED}) + "\n"
    made = folder_of(
        tmp_path / "run", summary, window(1), event, rank, {"command": [FORGED], "packages": {FORGED: "1"}}
    )
    (made / "stacks").mkdir()
    (made / "stacks" / "rank0.txt").write_text(FORGED)

    page = report(made)

    assert page.count("<script") == 2
    assert "<img" not in page
    assert page.count(html.escape("<img src=x", quote=False)) >= 7
    assert not [letter for letter in page if not letter.isprintable() and letter != "\n"]
    assert data_of(page)["runs"][0]["summary"]["user"] == FORGED


def test_page_has_a_policy_without_network_and_no_address(report, tmp_path):
    page = report(folder_of(tmp_path / "run", make_summary(), window(1)))

    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in html.unescape(policy)
    assert "unsafe" not in policy
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"|url\(|@import|//\w+\.\w+', page)
    assert " style=" not in page


def test_run_without_summary_and_windows_has_a_page(report, tmp_path):
    text = text_of(report(folder_of(tmp_path / "run")))

    assert "No verdict: there is no summary.json." in text
    assert "No curves: no window has been recorded." in text


def test_one_window_torn_lines_and_a_stepped_clock_are_accepted(report, tmp_path):
    late = json.dumps({"time_s": 1e30, "kind": "clock", "text": "the clock was set", "attempt": 1}) + "\n"
    lines = window(1, time_s=-5.0) + '{"attempt":1,"iterat\n'

    page = report(folder_of(tmp_path / "run", make_summary(), lines, late + "{torn"))

    text = text_of(page)
    assert "windows: 1 incomplete or invalid lines were left out" in text
    assert "events: 1 incomplete or invalid lines were left out" in text
    assert "1e+30 s" in text
    assert data_of(page)["runs"][0]["curves"]["loss"] == [[1], [2.0]]


def test_restart_begins_the_curve_again(report, tmp_path):
    lines = "".join([window(1), window(2), window(3), window(2, attempt=2), window(3, attempt=2)])

    page = report(folder_of(tmp_path / "run", make_summary(), lines))

    assert data_of(page)["runs"][0]["curves"]["loss"] == [[1, 2, 3, 2, 2, 3], [2.0, 2.0, 2.0, None, 2.0, 2.0]]


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
    for window in (1, 2):
        for rank in range(4):
            run.ranks.times.add_report(rank_line(rank, 10 * window, 0.2 if rank == 3 and window == 2 else 0.1))

    drawn = heat_map(run)
    assert drawn.count("<rect") == 8
    assert drawn.count('fill-opacity="1"') == 1
    assert "<title>rank 3, to iteration 20: 200.0 ms, 100 % above the median</title>" in drawn
    assert heat_map(SimpleNamespace(ranks=SimpleNamespace(times=RankTimes()))) is None


def test_running_run_is_marked(report, tmp_path):
    summary = replace(make_summary("running"), is_over=False)

    assert "it may have been killed" in text_of(report(folder_of(tmp_path / "run", summary, window(1))))


def test_simulated_run_is_marked_at_the_top(report, tmp_path):
    text = text_of(report(folder_of(tmp_path / "run", replace(make_summary(), simulated=True), window(1))))

    assert text.index("SIMULATED") < text.index("Verdict")


def test_many_events_are_limited_and_problems_are_kept(report, tmp_path):
    def event(number, kind="joined"):
        return json.dumps({"time_s": float(number), "kind": kind, "text": f"event {number}.", "attempt": 1}) + "\n"

    lines = event(0, "xid") + "".join(map(event, range(1, 5000)))

    text = text_of(report(folder_of(tmp_path / "run", replace(make_summary(), events={}), window(1), lines)))

    assert "event 0." in text
    assert "event 4999." in text
    assert "event 100." not in text
    assert "4,849 more events are not listed" in text


@pytest.mark.long
def test_ten_million_events_are_read_within_limits(report, tmp_path):
    made = folder_of(tmp_path / "run", replace(make_summary(), events={"ecc": 10**7}), window(1))
    lines = json.dumps({"time_s": 1.0, "kind": "ecc", "text": "1 uncorrected <b>", "rank": 3}) + "\n"
    with (made / "events.jsonl").open("w") as file:
        for _ in range(100):
            file.write(lines * 10**5)
        file.write(json.dumps({"time_s": 2.0, "kind": "xid", "text": "the last event"}) + "\n")

    page = report(made)

    text = text_of(page)
    unread = (len(lines) * 10**7 - 64 * 2**20) / 2**20
    assert f"{unread:.0f} MiB of older events were not read" in text
    assert "the last event" in text and "10,000,000" in text
    assert len(page.encode()) < MAX_BYTES


def test_damaged_summary_is_named_and_the_rest_is_shown(report, tmp_path):
    made = folder_of(tmp_path / "run", None, window(1))
    (made / "summary.json").write_text('{"status": 5}')

    text = text_of(report(made))

    assert "summary.json cannot be read: it has another form" in text
    assert "Loss" in text


def test_summary_of_another_version_is_named(report, tmp_path):
    made = folder_of(tmp_path / "run", replace(make_summary(), schema_version=3), window(1))

    text = text_of(report(made))

    assert "summary.json cannot be read: it has schema_version 3, and this version of effllm reads only 5" in text


def test_long_run_fits_into_the_limit_of_the_size(report, tmp_path):
    lines = "".join(window(number, loss=1.0 + number % 977) for number in range(1, 20_001))

    page = report(folder_of(tmp_path / "run", make_summary(), lines))

    xs, ys = data_of(page)["runs"][0]["curves"]["loss"]
    assert len(page.encode()) < MAX_BYTES
    assert len(xs) <= 800
    assert (min(ys), max(ys)) == (1.0, 977.0)


def test_several_runs_have_the_outcomes_of_the_comparison(report, tmp_path):
    a = write_run(tmp_path / "a", {"run_throughput/tokens_per_second": 100.0})
    b = write_run(tmp_path / "b", {"run_throughput/tokens_per_second": 150.0})

    text = text_of(report(a, b))

    compared = CliRunner().invoke(app, ["compare", str(a), str(b)]).stdout
    assert "unknown" in compared
    assert f"A: {a} (1 run, a)" in text
    assert "unknown: " in text[text.rindex("Comparison") : text.rindex("What ran")]


def test_one_run_needs_neither_duckdb_nor_scipy(report, tmp_path, monkeypatch):
    for name in ("duckdb", "scipy", "scipy.stats"):
        monkeypatch.setitem(sys.modules, name, None)
    a, b = (folder_of(tmp_path / name, make_summary(), window(1)) for name in "ab")

    assert "No comparison" not in text_of(report(a))
    assert "No comparison: a comparison needs SciPy: pip install 'effllm[analysis]'" in text_of(report(a, b))


def test_extreme_numbers_and_other_kinds_of_files_are_left_out(report, tmp_path):
    lines = window(1) + window(2, loss=1e308) + window(10**40) + window(3, loss=-1e308)
    made = folder_of(tmp_path / "run", make_summary(), lines)
    (made / "events.jsonl").unlink()
    os.mkfifo(made / "events.jsonl")
    os.mkfifo(made / "windows-0002.jsonl")

    page = report(made)

    assert data_of(page)["runs"][0]["curves"]["loss"] == [[1, 2], [2.0, None]]
    assert "windows: 1 incomplete or invalid lines were left out" in text_of(page)


def test_values_of_instruments_are_in_a_table(report, tmp_path):
    values = {"reward": ValueSummary(count=7, unit="points", mean=0.25, least=0.0, most=1.0)}

    text = text_of(report(folder_of(tmp_path / "run", replace(make_summary(), instruments=values), window(1))))

    assert "reward" in text
    assert "0.25" in text


def test_page_is_private_and_replaces_an_older_one(report, tmp_path):
    (tmp_path / "report.html").write_text("old")

    report(folder_of(tmp_path / "run", make_summary(), window(1)))

    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o600


def test_missing_run_and_missing_folder_exit_with_a_sentence(report, tmp_path):
    assert "does not exist" in report(tmp_path / "nothing", status=1)
    made = folder_of(tmp_path / "run", make_summary(), window(1))
    done = CliRunner().invoke(app, ["report", str(made), "-o", str(tmp_path / "none" / "x.html")])
    assert (done.exit_code, "No such file" in done.output) == (1, True)
