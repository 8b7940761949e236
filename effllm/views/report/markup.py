"""Makes HTML from elements: every text is escaped, unless it was made here."""

from __future__ import annotations

import html
from collections.abc import Iterable

from effllm.records.plain_text import one_line

#: Elements without content and without an end tag.
_VOID = frozenset({"br", "col", "hr", "input", "meta"})


class Markup(str):
    """A text that is already HTML."""

    __slots__ = ()


Child = str | None | Iterable[str | None]


def element(name: str, /, *children: Child, **attributes: object) -> Markup:
    """Return an HTML element; texts and values of attributes are escaped and have no control characters.

    Args:
        name: name of the element.
        children: texts, `Markup`, or several of these; ``None`` is left out.
        attributes: values by name; ``class_`` is class, and an underscore in a name is a hyphen. ``True`` makes an
            attribute without value; ``None`` and ``False`` leave it out.

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
