"""The types of settings and of sinks' options: parsers, and descriptions of the allowed values.

Standard library only, because the training process imports this module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from effllm.config.switches import ALLOWED, is_invalid_switch, is_on

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_WHOLE = 10**9
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@:+-]*(=[A-Za-z0-9._/@:+-]+)?")
MAX_TAGS, MAX_TAG_LETTERS = 16, 64


class ValueType(NamedTuple):
    """A type of setting."""

    read: Callable[[str], Any]  #: parses a text; raises ValueError if the text is not allowed
    allowed: str  #: description of the allowed values, after the words "must be"


def number(minimum: float, maximum: float = math.inf, what: str = "a number", unit: str = "") -> ValueType:
    def read(text: str) -> float:
        value = float(text)
        if not minimum <= value <= maximum or math.isinf(value):
            raise ValueError
        return value

    bounds = f"of at least {minimum}" if math.isinf(maximum) else f"from {minimum} to {maximum}"
    return ValueType(read, f"{what} {bounds}" + (f", in {unit}" if unit else ""))


def whole(minimum: int, maximum: int | None = None, what: str = "a whole number") -> ValueType:
    def read(text: str) -> int:
        value = int(text)
        if not minimum <= value <= (_MAX_WHOLE if maximum is None else maximum):
            raise ValueError
        return value

    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    return ValueType(read, f"{what} {bounds}")


def matching(pattern: str, allowed: str) -> ValueType:
    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError
        return text

    return ValueType(read, allowed)


def one_of(*allowed: str) -> ValueType:
    return matching("|".join(map(re.escape, allowed)), f"{', '.join(allowed[:-1])} or {allowed[-1]}")


def parse_sinks(entries: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return sinks with their options as texts: ``prometheus:port=9788`` becomes ``{"prometheus": {"port": "9788"}}``.

    A colon begins an option only if ``name=`` follows, because a folder's name may contain a colon.

    Raises:
        ValueError: an entry is not a name with options, or a sink has two entries.
    """
    sinks: dict[str, dict[str, str]] = {}
    for entry in entries:
        name, *options = re.split(r":(?=[a-z][a-z0-9_]*=)", entry)  # at colons before `name=`
        if not _NAME.fullmatch(name) or name in sinks:
            raise ValueError
        sinks[name] = dict(option.split("=", 1) for option in options)
    return sinks


def _read_switch(text: str) -> bool:
    if is_invalid_switch(text):
        raise ValueError
    return is_on(text)


def _read_positive(text: str) -> float:
    value = float(text)
    if not 0.0 < value < math.inf:
        raise ValueError
    return value


def _read_warmup(text: str) -> str:
    seconds = text.removesuffix("s")
    (whole(0).read if seconds == text else number(0.0).read)(seconds)  # raises an error if it is not allowed
    return text


def _read_sinks(text: str) -> tuple[str, ...]:
    entries = tuple(part.strip() for part in text.split(",") if part.strip()) if text != "none" else ()
    parse_sinks(entries)
    return entries


def _read_endpoint(text: str) -> str:
    match = re.fullmatch(r"(?:tcp://)?(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(\d{1,5})", text)
    if not match or not 0 < int(match[2]) < 65536:
        raise ValueError
    return f"tcp://{match[1]}:{match[2]}"


def _read_ports(text: str) -> str:
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if not match or not 0 < int(match[1]) <= int(match[2]) < 65536:
        raise ValueError
    return text


def _read_tags(text: str) -> str:
    tags = [tag.strip() for tag in text.split(",")]
    if len(tags) > MAX_TAGS or any(len(tag) > MAX_TAG_LETTERS or not _TAG.fullmatch(tag) for tag in tags):
        raise ValueError
    names = {tag.partition("=")[0] for tag in tags}
    if len(names) < len(tags):
        raise ValueError
    return ",".join(sorted(tags))


SWITCH = ValueType(_read_switch, ALLOWED)
FOLDER = ValueType(str, "a folder")
SECRET_FILE = ValueType(str, "a file of mode 0600")
FOLDER_NAME = matching(
    _SAFE_NAME.pattern, "at most 100 letters, digits, '.', '_' and '-', beginning with a letter or digit"
)
ROLE = matching(_SAFE_NAME.pattern, "a word, such as trainer or rollout")
TFLOPS = ValueType(_read_positive, "a number above 0, in TFLOP/s of one device")
WARMUP = ValueType(_read_warmup, "a whole number of iterations, such as 100, or a number of seconds, such as 60s")
SINKS = ValueType(
    _read_sinks,
    "none, or different names of files in effllm/sinks/, separated by commas; options follow a colon, as in "
    "console:format=block",
)
DEVICE = matching(_NAME.pattern, "auto, or the name of a file in effllm/devices/")
# An address must not contain credentials: they are in the file NODE_POWER_CREDENTIALS.
NODE_POWER = matching(
    r"auto|none|ipmi|https?://[^\s@]+", "auto, none, ipmi, or the https:// address of a Redfish service"
)
ENDPOINT = ValueType(_read_endpoint, "host:port or tcp://host:port")
INTERFACE = matching(
    r"[A-Za-z0-9_.:@%-]{1,64}", "the name of an interface, such as ib0, or an address of rank 0's host"
)
PORTS = ValueType(_read_ports, "the first and the last port of a range, such as 29700-29799")
TAGS = ValueType(
    _read_tags,
    f"at most {MAX_TAGS} words or name=value, each name once, separated by commas, each of at most {MAX_TAG_LETTERS} "
    "letters, digits, '.', '_', '/', '@', ':', '+' and '-'",
)
