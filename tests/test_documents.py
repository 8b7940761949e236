"""What the documents say is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from effllm.config import VARIABLES

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("integration/**/*.md")])


def test_the_configuration_page_has_a_row_for_every_variable():
    page = (ROOT / "docs" / "configuration.md").read_text()
    for variable in VARIABLES:
        default = f"`{variable.default}`" if variable.default else ""
        assert f"| `{variable.name}` | {default} | {variable.meaning} | {variable.allowed} |" in page


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_file_leads_somewhere(document):
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (document.parent / link).exists()] == []
