"""Reads tables that are TOML files of effllm, beside the module that uses them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

import msgspec

Table = TypeVar("Table")


def read_table(path: Path, form: type[Table]) -> Table:
    """Return the content of a TOML file in a form that msgspec can convert to."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), form)
