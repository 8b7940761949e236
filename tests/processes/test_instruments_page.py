"""Every example of docs/instruments.md runs; its asserts are the expected values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cases import cases

from effllm.instruments import metrics, profiling

PAGE = (Path(__file__).parents[2] / "docs" / "instruments.md").read_text()
SECTIONS = {section.split("\n")[0]: section for section in PAGE.split("\n## ")[1:]}
EXAMPLES = {
    title: example for title, section in SECTIONS.items() for example in re.findall(r"```python\n([^`]*)```", section)
}


def test_every_python_block_of_the_page_is_run_as_an_example():
    assert len(EXAMPLES) == PAGE.count("```python\n") == 8


@pytest.mark.parametrize("title", EXAMPLES)
def test_example_runs(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[title], title, "exec"), {"__name__": "example"})


@cases("name", sorted({*profiling.__all__, *metrics.__all__} - {"MemoryTrend"}))
def test_page_describes_every_instrument(name):
    assert f"`{name}`" in PAGE or f"`{name}()`" in PAGE
