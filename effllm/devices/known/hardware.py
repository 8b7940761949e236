"""Lookup in the hardware table, by the name that the driver reports."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from effllm.devices.known.rows import PRECISIONS, ROWS, Hardware


def find(name: str) -> Hardware | None:
    """Return the device with a name from NVML or amdsmi, or ``None`` if the table does not have this device.

    All words must match, in any order and case: an H800 PCIe is not an H800, and a laptop's 4090 is not a 4090.  The
    name of a virtual GPU does not name its board.
    """
    if _VIRTUAL.search(name):
        return None
    whole = _SLICE.sub("", name)
    row = _BY_WORDS.get(_words(whole))
    return replace(row, sliced=True) if row is not None and whole != name else row


def peak_flops_per_s(name: str, precision: str = "bf16") -> float | None:
    """Return the dense peak of a device; ``None`` for an unknown device, a slice, or a precision without a peak.

    Raises:
        ValueError: the precision is unknown.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}, not one of {', '.join(PRECISIONS)}")
    hardware = find(name)
    return None if hardware is None or hardware.sliced else hardware.flops_per_s.get(precision)


def why_no_peak(name: str) -> str:
    """Return why a device has no peak in BF16 or FP16; empty if it has one."""
    if _VIRTUAL.search(name):
        return f"{name!r} is a virtual GPU, and its share of the board is unknown"
    row = find(name)
    if row is None:
        return f"{name!r} is not in the hardware table"
    if row.sliced:
        return f"{name!r} is a MIG slice, which has no published peak"
    return "" if row.flops_per_s.keys() & {"bf16", "fp16"} else f"the hardware table has no rate of {row.names[0]}"


# --- names ---------------------------------------------------------------------------------------

_SLICE = re.compile(r"\s*\bMIG\b.*$", re.IGNORECASE)  # "... MIG 1g.10gb"

# The last part of a virtual GPU's name, as in "NVIDIA A40-48Q", "GRID A100-4-20C" or "NVIDIA L40S-48".  The part before
# it does not name the board: "NVIDIA H200-141C" is on an H200 NVL, and "NVIDIA H200X-141C" on an H200.
_VIRTUAL = re.compile(r"-(\d+-)?\d{1,3}([ABCQ]\d?|CME)$|-\d{1,2}$", re.IGNORECASE)

# Words that are ignored in names; a difference in any other word means a different device.
_NOISE = {
    *("nvidia", "tesla", "geforce", "generation", "edition", "graphics", "gpu"),
    *("amd", "instinct", "accelerator", "oam", "mcm", "mba", "ac", "vf"),
}


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower())) - _NOISE


def _index(rows: Iterable[Hardware]) -> dict[frozenset[str], Hardware]:
    index: dict[frozenset[str], Hardware] = {}
    for row in rows:
        for words in {_words(name) for name in row.names}:
            if words in index:
                raise ValueError(f"{row.names[0]} and {index[words].names[0]} share the name {' '.join(sorted(words))}")
            index[words] = row
    return index


_BY_WORDS = _index(ROWS)
