"""Untrusted text in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from effllm.records.plain_text import one_line

#: Marks of Markdown and HTML, mentions, and the marks that make an address a link.
_SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#!|~$&@]|(?<=\w):(?=//)|(?<=www)\.)")


def markdown_text(text: str) -> str:
    r"""Return a text that Markdown shows as it is: no link, no HTML, no further column, no mention.

    >>> markdown_text("a|b <script>")
    'a\\|b \\<script\\>'
    """
    return _SPECIAL.sub(r"\\\1", one_line(text))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; the columns after the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    escaped = [[markdown_text(cell) for cell in row] for row in [header, *rows]]
    return ["| " + " | ".join(row) + " |" for row in [escaped[0], lines[1], *escaped[1:]]]
