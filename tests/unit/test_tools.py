"""Tools of developers: the report of `make check`, the checks of the site, the decorator `cases`, and benchmarks."""

import time

import code_report
import pytest
from cases import cases
from check_site import problems_of

from benchmarks import compare, large_run, latency
from effllm.commands.top_folder import FolderSource


def test_package_above_its_budget_fails_with_the_excess(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(code_report, "BUDGETS", {"devices": 100, "energy": 151, "top level": 1})
    package = tmp_path / "effllm" / "devices" / "node"
    package.mkdir(parents=True)
    (tmp_path / "effllm" / "energy").mkdir()
    (tmp_path / "effllm" / "energy" / "ticks.py").write_text("x = 1\n" * 100)
    (package / "rapl.py").write_text("x = 1\n" * 100)
    (tmp_path / "effllm" / "cli.py").write_text("x = 1\n")
    assert code_report.main(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "effllm/energy: lower the budget to 100" in printed and "effllm/devices" not in printed

    (package / "hwmon.py").write_text("x = 1\n" * 7)
    (tmp_path / "effllm" / "cli.py").write_text("x = 1\n" * 3)
    (tmp_path / "effllm" / "new").mkdir()
    (tmp_path / "effllm" / "new" / "__init__.py").write_text("x = 1\n")
    assert code_report.main(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "effllm/devices: 107 lines are 7 above the budget of 100" in lines
    assert "effllm/new: 1 lines are 1 above the budget of 0" in lines
    assert "effllm/top level: 3 lines are 2 above the budget of 1" in lines
    assert "the reason, which a user must be able to accept" in lines[-1]


def test_class_and_function_above_their_limits_fail_with_the_excess(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(code_report, "BUDGETS", {"top level": 1_000})
    (tmp_path / "effllm").mkdir()
    body = "    def add(self):\n" + "        x = 1\n" * 60
    (tmp_path / "effllm" / "cli.py").write_text("class Long:\n" + body * 4 + "    x = 1\n" * 8)

    assert code_report.main(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "class effllm.cli.Long: 253 lines are 3 above the limit of 250" in lines
    assert "function effllm.cli.add: 61 lines are 1 above the limit of 60" in lines


@cases(
    ("body", "problem"),
    [
        ('<p id="top"><a href="other.html#there">a</a><a href="https://a.org/1">b</a><code>- x</code></p>', None),
        ('<a href="https://nowhere/x">a</a>', "https://nowhere/x is not an address"),
        ('<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js"),
        ('<img src="gone.png">', "loads gone.png"),
        ("<p>text\n- not a list</p>", "Markdown in the text"),
        ("<p>[a](b.md)</p>", "Markdown in the text"),
    ],
)  # fmt: skip
def test_problem_of_a_page_of_the_site_is_named(tmp_path, body, problem):
    (tmp_path / "main.css").write_text("a { background: url(data:image/png;base64,AA) }")
    (tmp_path / "search").mkdir(exist_ok=True)
    (tmp_path / "search" / "search_index.js").write_text("index.html other.html")
    (tmp_path / "other.html").write_text('<html><body><a href="index.html#top" id="there">c</a></body></html>')
    head = '<link rel="stylesheet" href="main.css">'
    (tmp_path / "index.html").write_text(f"<html><head>{head}</head><body>{body}</body></html>")

    found = list(problems_of(tmp_path))

    assert [one.startswith("index.html") and problem in one for one in found] == [True] * (problem is not None)


def test_font_of_another_host_and_page_without_search_are_named(tmp_path):
    (tmp_path / "index.html").write_text("<html><body>text</body></html>")
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search_index.js").write_text("")
    (tmp_path / "main.css").write_text("@import 'https://fonts.example.org/x';")

    found = set(problems_of(tmp_path))

    assert found == {"main.css loads https://fonts.example.org/x", "the search index has not every page"}


def test_all_cases_run_and_all_failures_are_reported():
    seen = []

    @cases("number, name", [(1, "a"), (2, "b"), (3, "c")])
    def check(number, name):
        seen.append(name)
        assert number == 2, "odd"

    with pytest.raises(AssertionError) as caught:
        check()
    assert seen == ["a", "b", "c"]
    assert str(caught.value).startswith("2 of 3 cases failed\ncase 0, number, name = 1, 'a': AssertionError: odd\n")
    assert "case 2, number, name = 3, 'c'" in str(caught.value)
    assert str(caught.value.__cause__).startswith("odd")


def test_latency_benchmark_returns_a_time_in_milliseconds():
    (figure,) = latency.measure(ranks=3, windows=8)

    assert figure.unit == "ms"
    assert figure.value > 0


def test_comparison_benchmark_counts_outcomes_of_simulated_pairs():
    table = compare.outcomes_of(4, 1, (0.5, 0.2))

    assert table["effllm 1+1, primary"].counts == {"better": 0, "worse": 0, "not distinguishable": 0, "unknown": 4}
    assert {outcomes.total for outcomes in table.values()} == {4}


@pytest.mark.long
def test_job_of_the_screen_benchmark_has_its_planted_ranks_first(tmp_path):
    large_run.large_run(tmp_path / "large", ranks=4300, windows=12).close()
    source = FolderSource(tmp_path / "large")
    source.refresh()
    while source.has_more:  # on a busy machine, one call reads only a part of the events
        source.refresh()
    source.refresh_hosts()
    worst = source.frame(time.time()).ranks.lines_with_reason()

    assert [(line.rank, line.reason) for line in worst[:2]] == [(4242, "lost"), (2000, "straggler")]
    assert {line.rank for line in worst if line.reason == "straggler"} == {1377, *range(2000, 2008)}
    assert worst[0].host == "node00530"
