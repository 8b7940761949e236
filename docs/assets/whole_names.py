"""A hook of mkdocs: the browser breaks no short name in a cell of a table, such as ``--log-energy``, at its hyphens."""

import re

CELL = re.compile(r"<(td|th)\b.*?</\1>", re.DOTALL)
NAME = re.compile(r"<code>([^<\s]{1,26})</code>")


def on_page_content(html: str, **_: object) -> str:
    """Return the page with a class for these names; docs/assets/site.css uses it."""
    return CELL.sub(lambda cell: NAME.sub(r'<code class="name">\1</code>', cell[0]), html)
