"""The table of faults in docs/reliability.md and the marks of the tests have the same faults."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_fault_of_the_page_has_a_test_and_each_mark_a_row():
    page = (ROOT / "docs" / "reliability.md").read_text()
    sources = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    marks = [names for source in sources for names in re.findall(r"mark\.fault\(([^)]*)\)", source)]

    assert set(re.findall(r"\| `([\w-]+)` \|$", page, re.MULTILINE)) == set(re.findall(r'"([\w-]+)"', " ".join(marks)))
