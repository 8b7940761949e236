"""Makes untrusted text one printable line, which can neither move the cursor nor forge a line."""

from __future__ import annotations

MAX_SHOWN = 2000


def one_line(text: str) -> str:
    r"""Return a text without control characters, escape sequences, line breaks and marks of writing direction.

    >>> one_line("node\x1b[2J7\n[EfficientLLM] all is well")
    'node [2J7 [EfficientLLM] all is well'
    """
    if len(text) > MAX_SHOWN:
        text = text[: MAX_SHOWN - 1] + "…"
    if text.isprintable():
        return text
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def without_user(uri: str) -> str:
    """Return a URI without user and password, for files."""
    scheme, mark, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}" if mark else uri
