"""Tables of a report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from effllm.views.report.markup import Child, Markup, element


def table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[Child]], texts: Collection[int] = (0,)
) -> Markup:
    """Return a table in a frame that scrolls on narrow screens; the first column names the row.

    Args:
        caption: what the table shows.
        header: names of the columns.
        rows: the cells of each row; a row of one cell is the name of the group of the next rows.
        texts: indices of the columns with text; the cells of the other columns are numbers.
    """
    sides = [None if at in texts else "number" for at in range(len(header))]
    head = [element("th", name, scope="col", class_=side) for name, side in zip(header, sides, strict=True)]
    body = [_row(row, sides) for row in rows]
    whole = element("table", element("caption", caption), element("thead", element("tr", head)), element("tbody", body))
    return element("div", whole, class_="frame", tabindex=0, role="group", aria_label=caption)


def _row(cells: Sequence[Child], sides: Sequence[str | None]) -> Markup:
    first, *others = cells
    if not others:
        return element("tr", element("th", first, scope="rowgroup", colspan=len(sides)), class_="group")
    values = [element("td", cell, class_=side) for cell, side in zip(others, sides[1:], strict=True)]
    return element("tr", element("th", first, scope="row"), values)


def facts(pairs: Iterable[tuple[str, Child]]) -> Markup:
    """Return names and texts as a list."""
    items = [element("div", element("dt", name), element("dd", text)) for name, text in pairs if text]
    return element("dl", items, class_="facts")


def number(text: str, value: float) -> Markup:
    """Return a shown number with its exact value, for scripts and for copies."""
    return element("data", text, value=repr(value), title=repr(value))


def sentences(texts: Iterable[Child]) -> Markup | None:
    """Return sentences as a list; ``None`` without a sentence."""
    items = [element("li", text) for text in texts]
    return element("ul", items, class_="notes") if items else None


def section(anchor: str, title: str, *content: Child) -> Markup:
    """Return a section of the page with a heading."""
    return element("section", element("h2", title, id=anchor), *content, aria_labelledby=anchor)


def hidden(summary: str, *content: Child) -> Markup:
    """Return content that is opened with a click; a print has it open."""
    return element("details", element("summary", summary), *content)
