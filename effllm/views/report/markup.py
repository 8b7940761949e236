"""Makes HTML from elements: every text is escaped, unless it was made here."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence

from effllm.records.plain_text import one_line

#: Elements without content and without an end tag.
_VOID = frozenset({"br", "col", "hr", "input", "meta"})


class Markup(str):
    """A text that is already HTML."""

    __slots__ = ()


Child = str | None | Iterable[str | None]


def element(name: str, /, *children: Child, **attributes: object) -> Markup:
    """Return an HTML element; texts and values of attributes are escaped and have no control characters.

    ``class_`` is class, and an underscore in the name of an attribute is a hyphen. ``True`` makes an attribute without
    value; ``None`` and ``False`` leave it out, as ``None`` does a child.

    >>> element("b", "<i>", title='"')
    '<b title="&quot;">&lt;i&gt;</b>'
    """
    begin = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    if name in _VOID:
        return Markup(f"<{name}{begin}>")
    return Markup(f"<{name}{begin}>{together(*children)}</{name}>")


def together(*children: Child) -> Markup:
    """Return several texts and elements one after the other."""
    return Markup("".join(map(_child, children)))


def lines(texts: Iterable[str]) -> Markup:
    """Return texts as lines of an element ``pre``."""
    return Markup("\n".join(map(_child, texts)))


def _child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    return html.escape(one_line(child), quote=False) if isinstance(child, str) else "".join(map(_child, child))


def _attribute(name: str, value: object) -> str:
    if value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(one_line(str(value)))}"'


def table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[Child]], texts: Collection[int] = (0,)
) -> Markup:
    """Return a table in a frame that scrolls on narrow screens; the first column names the row.

    A row of one cell is the name of the group of the next rows. ``texts`` are the indices of the columns with text; the
    cells of the other columns are numbers.
    """
    classes = [None if column in texts else "number" for column in range(len(header))]
    head = [element("th", name, scope="col", class_=kind) for name, kind in zip(header, classes, strict=True)]
    body = [_row(row, classes) for row in rows]
    whole = element("table", element("caption", caption), element("thead", element("tr", head)), element("tbody", body))
    return element("div", whole, class_="frame", tabindex=0, role="group", aria_label=caption)


def _row(cells: Sequence[Child], classes: Sequence[str | None]) -> Markup:
    first, *others = cells
    if not others:
        return element("tr", element("th", first, scope="rowgroup", colspan=len(classes)), class_="group")
    values = [element("td", cell, class_=kind) for cell, kind in zip(others, classes[1:], strict=True)]
    return element("tr", element("th", first, scope="row"), values)


def facts(pairs: Iterable[tuple[str, Child]]) -> Markup:
    """Return names and texts as a list."""
    items = [element("div", element("dt", name), element("dd", text)) for name, text in pairs if text]
    return element("dl", items, class_="facts")


def with_exact_value(text: str, value: float) -> Markup:
    """Return a shown number with its exact value, for scripts and for copies."""
    return element("data", text, value=repr(value), title=repr(value))


def sentences(texts: Iterable[Child]) -> Markup | None:
    """Return sentences as a list; ``None`` without a sentence."""
    items = [element("li", text) for text in texts]
    return element("ul", items, class_="notes") if items else None


def section(anchor: str, title: str, *content: Child) -> Markup:
    """Return a section of the page with a heading."""
    return element("section", element("h2", title, id=anchor), *content, aria_labelledby=anchor)


def collapsed(summary: str, *content: Child) -> Markup:
    """Return content that is opened with a click."""
    return element("details", element("summary", summary), *content)
