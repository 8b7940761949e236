"""The hardware table: the published numbers of devices, looked up by the name that the driver reports.

The numbers and their sources are in hardware.toml.  Definitions and the whole table: docs/hardware.md.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")

#: Share of the memory on the board that a program can use: the driver keeps a part, and boards with GDDR keep the codes
#: of ECC in the same memory.
USABLE_HBM, USABLE_GDDR = 0.98, 0.92
MIN_HBM_BYTES_PER_S = 1.2e12

# How a document's numbers were checked: it was read, a text that quotes them was read, or nothing was read.
Evidence = Literal["read", "quoted", "unconfirmed"]


class Origin(Struct, frozen=True, forbid_unknown_fields=True):
    """The document with a row's numbers."""

    title: str
    url: str
    evidence: Evidence


class KnownSensor(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The published data of an architecture's power sensor; ``None`` means unknown."""

    counter: bool  # whether the driver counts energy
    update_s: float | None = None  # period of new values
    window_s: float | None = None  # part of each period in which power is measured
    power_usage: Literal["instant", "1-s mean"] | None = None  # kind of power that nvmlDeviceGetPowerUsage returns
    rise_s: tuple[float, float] | None = None  # delay until the instant power shows a change of power
    lag_s: float | None = None  # constant delay of the energy counter
    gain_error: float = 0.05  # relative error at 95 %; common to all readings of a board, so it does not average out
    source: str = ""
    note: str = ""

    @property
    def duty(self) -> float | None:
        """Return the share of time in which power is measured."""
        return None if self.update_s is None or self.window_s is None else self.window_s / self.update_s


class Hardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device as the driver counts devices: a GPU, or one die of a module with two dies."""

    names: tuple[str, ...]  # the first name is the name that the driver uses
    architecture: str
    flops_per_s: dict[str, float]  # by precision; unsupported and unpublished precisions are left out
    gib: float | None = None  # None if boards with different memory have the same name
    memory_bytes_per_s: float | None = None
    tdp_w: float | None = None
    source: Origin
    sensor: KnownSensor
    note: str = ""
    # Number of SMs, and dense FLOPs of an SM per clock cycle in 16 bits with accumulation in FP32; None: not known.
    units: tuple[int, int] | None = None
    gain_measured: tuple[float, float] | None = None  # range of the readings' relative error, measured with a meter
    is_slice: bool = False  # whether the driver's name is that of a MIG slice; all values are those of the whole device

    @property
    def memory_bytes(self) -> int | None:
        return None if self.gib is None else int(self.gib * 2**30)


def find_by_driver_name(name: str) -> Hardware | None:
    """Return the device with a name from NVML or amdsmi, or ``None`` if the table does not have this device.

    All words must match, in any order and case: an H800 PCIe is not an H800, and a laptop's 4090 is not a 4090.  The
    name of a virtual GPU does not name its board.
    """
    if _VIRTUAL.search(name):
        return None
    gpu_name = _SLICE.sub("", name)
    row = _BY_WORDS.get(_driver_words(gpu_name))
    return replace(row, is_slice=True) if row is not None and gpu_name != name else row


def peak_flops_per_s(name: str, precision: str = "bf16") -> float | None:
    """Return the dense peak of a device; ``None`` for an unknown device, a slice, or a precision without a peak.

    Raises:
        ValueError: the precision is unknown.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}, not one of {', '.join(PRECISIONS)}")
    hardware = find_by_driver_name(name)
    return None if hardware is None or hardware.is_slice else hardware.flops_per_s.get(precision)


def peak_clock_hz(name: str) -> float | None:
    """Return the clock at which a device has its peak, or ``None`` if the number of its SMs is not in the table.

    This is the boost clock of the vendor's figures: the dense rate over the FLOPs of all SMs per clock cycle.  The
    maximum clock of a driver may be higher: an H100 SXM has 989.4 TFLOP/s at 1.83 GHz, and a maximum of 1.98 GHz.
    """
    hardware = find_by_driver_name(name)
    if hardware is None or hardware.units is None:
        return None
    rate = hardware.flops_per_s.get("bf16") or hardware.flops_per_s["fp16"]
    return rate / (hardware.units[0] * hardware.units[1])


def why_no_peak(name: str) -> str:
    """Return why a device has no peak in BF16 or FP16; empty if it has one."""
    if _VIRTUAL.search(name):
        return f"{name!r} is a virtual GPU, and its share of the board is unknown"
    row = find_by_driver_name(name)
    if row is None:
        return f"{name!r} is not in the hardware table"
    if row.is_slice:
        return f"{name!r} is a MIG slice, which has no published peak"
    return "" if row.flops_per_s.keys() & {"bf16", "fp16"} else f"the hardware table has no rate of {row.names[0]}"


# --- short names that people type, such as h100-80gb or a100 --------------------------------------


def find_by_typed_words(name: str) -> Hardware | None:
    """Return the device of known memory with this name, else the first with all its words; ``None`` if unknown."""
    exact = find_by_driver_name(name)
    if exact and exact.memory_bytes:
        return exact
    wanted = _typed_words(name)
    rows = (row for row in ROWS if wanted and any(wanted <= _typed_words(full) for full in row.names))
    return next((row for row in rows if row.memory_bytes), None)


def similar_gpus(name: str) -> list[str]:
    """Return the names of at most four devices whose short names are near to a name."""
    names_by_words = {" ".join(sorted(_typed_words(row.names[0]))): row.names[0] for row in ROWS}
    near_words = difflib.get_close_matches(" ".join(sorted(_typed_words(name))), names_by_words, n=4, cutoff=0.3)
    return [names_by_words[words] for words in near_words]


def usable_bytes(row: Hardware) -> float:
    """Return the memory that a program can use; 0 if the board's memory is unknown."""
    has_hbm = (row.memory_bytes_per_s or 0.0) >= MIN_HBM_BYTES_PER_S and "RTX" not in row.names[0]
    share = USABLE_HBM if has_hbm else USABLE_GDDR
    return (row.memory_bytes or 0) * share


def _typed_words(name: str) -> frozenset[str]:
    separated = re.sub(r"(?<=[a-z])(?=rtx|gtx)|(?<=rtx)(?=\d)|(?<=gtx)(?=\d)", " ", name.lower())  # as in "rtx4090"
    return frozenset(re.findall(r"[a-z0-9]+", separated)) - {"nvidia", "tesla", "geforce", "amd", "instinct"}


_SLICE = re.compile(r"\s*\bMIG\b.*$", re.IGNORECASE)  # "... MIG 1g.10gb"

# The last part of a virtual GPU's name, as in "NVIDIA A40-48Q", "GRID A100-4-20C" or "NVIDIA L40S-48".  The part before
# it does not name the board: "NVIDIA H200-141C" is on an H200 NVL, and "NVIDIA H200X-141C" on an H200.
_VIRTUAL = re.compile(r"-(\d+-)?\d{1,3}([ABCQ]\d?|CME)$|-\d{1,2}$", re.IGNORECASE)

# Words that are ignored in names; a difference in any other word means a different device.
_IGNORED_WORDS = {
    *("nvidia", "tesla", "geforce", "generation", "edition", "graphics", "gpu"),
    *("amd", "instinct", "accelerator", "oam", "mcm", "mba", "ac", "vf"),
}


def _driver_words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower())) - _IGNORED_WORDS


def _rows_by_words(rows: Iterable[Hardware]) -> dict[frozenset[str], Hardware]:
    index: dict[frozenset[str], Hardware] = {}
    for row in rows:
        for words in {_driver_words(name) for name in row.names}:
            if words in index:
                raise ValueError(f"{row.names[0]} and {index[words].names[0]} share the name {' '.join(sorted(words))}")
            index[words] = row
    return index


def _read_table() -> tuple[dict[str, KnownSensor], tuple[Hardware, ...]]:
    """Return the sensors by architecture, and the devices with their sources and sensors."""
    table = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes())
    for board in table["boards"]:
        board["source"] = table["sources"][board["source"]]
        board["sensor"] = table["sensors"][board["architecture"]] | board.get("sensor", {})
    return (
        msgspec.convert(table["sensors"], dict[str, KnownSensor]),
        msgspec.convert(table["boards"], tuple[Hardware, ...]),
    )


SENSORS, ROWS = _read_table()
_BY_WORDS = _rows_by_words(ROWS)
