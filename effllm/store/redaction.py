"""Removes likely secrets from a command line, before the command line is written to the run folder.

This code runs in the training process, uses only the standard library, and its time is linear in the text's length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

REDACTED = "<redacted>"
MAX_WORD_CHARACTERS = 10_000

# A name belongs to a secret if it contains one of these words, or if one of its parts is in _SHORT_PARTS: --hf_token,
# apiKey, model.login.
_SECRET_WORD = re.compile(
    r"(?i)key|token(?!iz|s)|secret|passw|passphrase|credential|authoriz|bearer|cookie|signature|webhook"
)
_SHORT_PARTS = frozenset({"auth", "cred", "creds", "jwt", "login", "otp", "pass", "pat", "pgpass", "pwd", "sas", "sig"})
_NOT_OF_NAMES = frozenset("\"'{}:?&/ ")
_NAME_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_PLURAL = re.compile(r"(?i)(key|secret|password|credential)s$")

_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
# An option that cannot be the value of the previous option.
_PLAIN_OPTION = re.compile(r"--[a-z][a-z0-9_.-]*(=.*)?|-[A-Za-z]", re.DOTALL)

_NAME = re.compile(r"""(?<![\w.-])([\w.-]+)\\*["']?\s*[:=]\s*""")
_VALUE = re.compile(
    r""""(?:[^"\\]|\\.)*"?|\\+"[^"]*"?|'(?:[^'\\]|\\.)*'?|\\+'[^']*'?|\[[^\]]*\]?|[^\s,;&"'}\]]+""", re.DOTALL
)
_HEADER = re.compile(r"(?i)authoriz|cookie|bearer")
_HEADER_VALUE = re.compile(r"""[^"'\n]+""")
_BEARER = re.compile(r"""(?i)\b(bearer\s+)[^\s"',]+""")
# The value is the next word: ``--header Authorization: Bearer x`` without quotes.
_AWAITS_VALUE = re.compile(r"(?i)\bbearer$|\bauthorization:\s*\w*$|(?<![\w.-])[\w.-]*(key|token|cookie|secret):$")

_USER_INFO = re.compile(r"(?<=://)[^\s/?#]*@")
_PASSWORD = re.compile(r"(?<![\w.%+-])([\w.%+-]+:)[^\s/@:]+@(?!sha\d+:)(?=[\w\[])")
_WEBHOOK = re.compile(r"""(?i)(https?://(?=[^\s"']*(?:hook|/bot\d))[^\s/"']+/)[^\s"']+""")

#: Prefixes and minimum lengths of the tokens of well-known services.
_TOKENS = re.compile(
    r"""(?<![A-Za-z0-9])(?:
        hf_[A-Za-z0-9]{16,} | api_org_[A-Za-z0-9]{16,} | [sr]k[-_](?=[A-Za-z0-9_-]*\d)[A-Za-z0-9_-]{16,}
        | gh[oprsu]_[A-Za-z0-9]{16,} | github_pat_[A-Za-z0-9_]{16,} | gl(?:pat|ptt|dt|rt|cbt|soat|ft)-[A-Za-z0-9_-]{16,}
        | xox[a-z]-[A-Za-z0-9-]{8,} | xapp-[A-Za-z0-9-]{16,} | (?:AKIA|ASIA)[A-Z0-9]{16} | AIza[A-Za-z0-9_-]{30,}
        | ya29\.[A-Za-z0-9_-]{16,} | eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_.-]{8,} | npm_[A-Za-z0-9]{30,}
        | pypi-[A-Za-z0-9_-]{30,} | dckr_pat_[A-Za-z0-9_-]{16,} | nvapi-[A-Za-z0-9_-]{16,} | r8_[A-Za-z0-9]{16,}
        | gsk_[A-Za-z0-9]{16,} | SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,} | wandb_v1_[A-Za-z0-9_-]{16,}
    )""",
    re.VERBOSE,
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*", re.DOTALL)


def redacted(command: Iterable[str]) -> list[str]:
    """Return a command line with `REDACTED` in place of likely secrets.

    Likely secrets are values of arguments, JSON and YAML fields, headers and URL parameters with names of secrets; user
    and password in URLs; webhooks; and words that begin like the tokens of well-known services.  Words such as
    ``--tokenizer`` and ``--max-tokens`` are not names of secrets.

    >>> redacted(["train.py", "--lr", "1", "--api-key", "abc", "--hf_token=x"])
    ['train.py', '--lr', '1', '--api-key', '<redacted>', '--hf_token=<redacted>']
    """
    shown: list[str] = []
    hides_next = hides_all = False  # whether the next value, or all values of the option, are hidden
    for word in command:
        if (hides_next or hides_all) and not _PLAIN_OPTION.fullmatch(word):
            shown.append(REDACTED)
            hides_next = word.lower() in ("bearer", "basic")
            continue
        is_secret_option = bool(_OPTION.fullmatch(word)) and _names_a_secret(word)
        hides_next = is_secret_option or bool(_AWAITS_VALUE.search(word))
        hides_all = is_secret_option and bool(_PLURAL.search(word))
        name, equals, value = word.partition("=")
        if equals and value and not _NOT_OF_NAMES & {*name} and _names_a_secret(name):
            shown.append(f"{name}={REDACTED}")
        else:
            shown.append(_redacted_text(word))
    return shown


def _names_a_secret(name: str) -> bool:
    if _SECRET_WORD.search(name):
        return True
    parts = map(str.lower, _NAME_PART.findall(name))
    return any(part in _SHORT_PARTS or part.endswith(("passwd", "pwd")) for part in parts)


def _redacted_text(text: str) -> str:
    if len(text) > MAX_WORD_CHARACTERS:
        text = text[:MAX_WORD_CHARACTERS] + "..."
    text = _PRIVATE_KEY.sub(REDACTED, text)
    text = _redacted_fields(text)
    text = _USER_INFO.sub(f"{REDACTED}@", text)
    text = _PASSWORD.sub(rf"\g<1>{REDACTED}@", text)
    text = _WEBHOOK.sub(rf"\g<1>{REDACTED}", text)
    text = _BEARER.sub(rf"\g<1>{REDACTED}", text)
    return _TOKENS.sub(REDACTED, text)


def _redacted_fields(text: str) -> str:
    """Redact the values of fields that are named like secrets, as in ``{"api_key": "x"}``."""
    parts: list[str] = []
    end_of_value = 0
    for field in _NAME.finditer(text):
        name = field[1]
        if field.end() <= end_of_value or not _names_a_secret(name):
            continue
        value = (_HEADER_VALUE if _HEADER.search(name) else _VALUE).match(text, field.end())
        value = value or _VALUE.match(text, field.end())
        if value is None:
            continue
        parts += [text[end_of_value : field.end()], REDACTED]
        end_of_value = value.end()
    return "".join([*parts, text[end_of_value:]])
