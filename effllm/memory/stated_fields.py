"""The fields of a settings file, which remember what was read of them, and the note of the other ones."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

_OFF = ("none", "no", "false", "off", "null", "auto", "[]")  # values of a setting, in small letters; and zeros


class StatedFields(Mapping[str, Any]):
    """Fields that remember which of them were read, also by ``in``; mappings in them do likewise."""

    def __init__(self, fields: Mapping[Any, Any]) -> None:
        self._fields: dict[str, Any] = {
            str(key): StatedFields(value) if isinstance(value, Mapping) else value for key, value in fields.items()
        }
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        value = self._fields[key]
        self._read.add(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def unread(self, system: str, path: str = "") -> Iterator[str]:
        """Yield the keys that are on, were not read, and may change the memory; ``fsdp_config.x`` is one in a mapping.

        A mapping that was not read is one key.
        """
        for key, value in self._fields.items():
            named = f"{path}{key}"
            if isinstance(value, StatedFields):
                inner = [] if _is_off(value._fields.get("enabled", True)) else list(value.unread(system, f"{named}."))
                if key in self._read:
                    yield from inner
                elif inner and not _is_without_effect(system, named, ""):
                    yield named
            elif key not in self._read and _is_off(value) == (key in training_systems()["on_by_default"]):
                yield from [] if _is_without_effect(system, named, str(value)) else [named]


def left_out(unread: Iterable[str]) -> list[str]:
    """Return the note of the settings that the estimate does not contain, if there are any."""
    *names, last = dict.fromkeys(unread) or [""]
    return [f"not in the estimate: {', '.join(names)}{' and ' if names else ''}{last}"] if last else []


def _is_off(value: Any) -> bool:
    return (text := str(value).lower()) in _OFF or re.fullmatch(r"0(\.0*)?", text) is not None


def _is_without_effect(system: str, path: str, value: str) -> bool:
    named = path.replace("-", "_").lower()
    return any(_without_effect(system).fullmatch(f"{key}={value.lower()}") for key in (named, named.split(".")[-1]))


@cache
def _without_effect(system: str) -> re.Pattern[str]:
    data = training_systems()
    names = [name.lower() for table in data["systems"][system] for name in data["without_effect"][table]]
    return re.compile("|".join(fnmatch.translate(name if "=" in name else f"{name}=*") for name in names))


@cache
def training_systems() -> dict[str, Any]:
    return msgspec.toml.decode(Path(__file__).with_name("training_systems.toml").read_bytes(), type=dict[str, Any])
