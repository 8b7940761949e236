"""The report in a real browser: drawn, without errors and requests, accessible, printable. Needs Debian's chromium."""

import json
import re
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from run_folders import write_files
from typer.testing import CliRunner

from effllm.commands.app import app

#: axe-core comes from npm, not from PyPI; npm install --prefix .venv axe-core@4.14.1
AXE = Path(__file__).parents[2] / ".venv" / "node_modules" / "axe-core" / "axe.min.js"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.xdist_group("browser"),
]


def written(*arguments):
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a real run with simulated devices."""
    folder = tmp_path_factory.mktemp("runs")
    written("demo", "--iterations", "120", "--run-dir", folder)
    return next(folder.glob("demo-*"))


@pytest.fixture(scope="module")
def page(run):
    written("report", run, "-o", run / "report.html")
    return run / "report.html"


@pytest.fixture(scope="module")
def tab():
    found = Browser()
    yield found
    found.close()


@pytest.fixture
def browser(tab):
    tab.media()
    return tab


def test_page_loads_without_errors_and_requests(browser, page):
    browser.open(page)

    assert browser.problems == []
    assert set(browser.requests) == {page.resolve().as_uri()}


def test_every_chart_is_drawn_in_its_frame(browser, page):
    browser.open(page)

    boxes = browser.value(
        "[...document.querySelectorAll('.plot')].map(plot => [...plot.querySelectorAll('path.line')].map(line => {"
        "const a = line.getBoundingClientRect(), b = plot.querySelector('svg').getBoundingClientRect();"
        "return [a.width, a.left - b.left, b.right - a.right, a.top - b.top, b.bottom - a.bottom]}))"
    )
    assert len(boxes) >= 10
    for lines in boxes:
        assert lines
        for width, *margins in lines:
            assert width > 100
            assert min(margins) > -2


def html_without_scripts(browser, page):
    browser.open(page, scripts=False)
    found = browser.call("DOM.getDocument", depth=0)["root"]["nodeId"]
    return browser.call("DOM.getOuterHTML", nodeId=found)["outerHTML"]


def test_shown_numbers_are_the_numbers_of_the_summary(browser, page, run):
    summary = json.loads((run / "summary.json").read_text())
    html = html_without_scripts(browser, page)

    row = r'<tr><th scope="row"><span title="[^"]*">(\w+)</span></th><td class="number"><data value="([^"]+)"'
    expected = {tag: one["value"] for tag, one in summary["metrics"].items() if "/" not in tag}
    assert {name: float(value) for name, value in re.findall(row, html) if name in expected} == expected
    assert summary["verdict"]["text"] in html
    parts = [part["share"] for part in summary["waterfall"]["parts"]]
    shares = re.findall(r'class="bar".*?<data value="([^"]+)"', html)
    assert [float(one) for one in shares[: len(parts)]] == parts


def test_page_without_scripts_has_all_tables(browser, page):
    html = html_without_scripts(browser, page)

    charts = [figure for figure in re.findall(r"<figure.*?</figure>", html, re.DOTALL) if "<svg" in figure]
    assert len(charts) > 5
    assert [figure[:200] for figure in charts if "<caption>" not in figure] == []


def test_cursor_shows_the_values_of_an_iteration(browser, page):
    browser.open(page)
    curves = browser.value("JSON.parse(document.getElementById('effllm-data').textContent).runs[0].curves")
    xs, ys = curves["loss"]

    shown = browser.value(
        "(() => { const plot = [...document.querySelectorAll('figure')].find(one => one.innerText.startsWith('Loss'));"
        "const slider = plot.querySelector('input'); slider.value = 0; slider.dispatchEvent(new Event('input'));"
        "return plot.querySelector('output').textContent })()"
    )
    assert shown.startswith(f"iteration {xs[0]}: loss {float(f'{ys[0]:.4g}'):g}")


def test_injected_script_does_not_run(browser, run, tmp_path):
    forged = "</script><script>document.title='forged'</script><img src=x onerror=\"document.title='forged'\">"
    summary = json.loads((run / "summary.json").read_text()) | {"user": forged, "model": forged}
    written("report", write_files(tmp_path / "forged", summary=summary), "-o", tmp_path / "report.html")

    browser.open(tmp_path / "report.html")

    assert "effllm" in browser.value("document.title")
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert browser.problems == []


def test_policy_blocks_a_script_and_a_request(browser, page, tmp_path):
    changed = tmp_path / "changed.html"
    added = "<script>document.title='forged'</script><img src='http://127.0.0.1:9/x.png'>"
    changed.write_text(page.read_text().replace("</body>", f"{added}</body>"))

    browser.open(changed)

    assert "effllm" in browser.value("document.title")
    assert len([one for one in browser.problems if "Content Security Policy" in one]) == 2


@pytest.mark.parametrize("width", [360, 1280])
def test_page_is_not_wider_than_the_screen(browser, page, width):
    browser.open(page, width=width)

    assert browser.value("document.documentElement.scrollWidth") <= width


def test_print_opens_everything_and_has_several_pages(browser, page):
    browser.open(page)
    browser.media(kind="")

    pdf = browser.pdf()

    assert pdf.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 20


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: npm install --prefix .venv axe-core")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(browser, page, scheme):
    browser.media(scheme=scheme)
    browser.open(page)
    browser.value("document.querySelectorAll('details').forEach(one => { one.open = true })")
    browser.value(AXE.read_text() + ";0")

    assert browser.value("axe.run().then(found => found.violations.map(one => one.id))") == []
