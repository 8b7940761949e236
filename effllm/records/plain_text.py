"""Makes untrusted text one printable line, which can neither move the cursor nor forge a line."""

from __future__ import annotations

import re

MAX_SHOWN = 2000

#: User and password of a URI. In the URI of a database, but not in that of a website, a password may contain a slash.
_USER = re.compile(r"(?i)(?<=://)(?:[^\s/?#]*@|(?<!http://)(?<!https://)[^\s:/?#@]*:[^\s@]*@)")
_SECRET = re.compile(r"(?i)([?&](?:password|passwd|pwd|sslpassword|token|secret)=)[^&\s#]*")


def one_line(text: str) -> str:
    r"""Return a text of at most `MAX_SHOWN` letters, without control characters, line breaks and writing directions.

    >>> one_line("node\x1b[2J7\n[EfficientLLM] all is well")
    'node [2J7 [EfficientLLM] all is well'
    """
    if len(text) > MAX_SHOWN:
        text = text[: MAX_SHOWN - 1] + "…"
    if text.isprintable():
        return text
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def without_user(text: str) -> str:
    """Return a URI, or a text with URIs, without users, passwords and tokens, for files and messages."""
    return _SECRET.sub(r"\1", _USER.sub("", text))
