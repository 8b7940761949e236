"""GPUs by the short names that people type, such as h100-80gb or a100; their usable memory, and their peak's clock."""

from __future__ import annotations

import difflib
import re

from effllm.devices.known.hardware import ROWS, Hardware, find

#: Share of the memory on the board that a program can use: the driver keeps a part, and boards with GDDR keep the codes
#: of ECC in the same memory.
USABLE_HBM, USABLE_GDDR = 0.98, 0.92
MIN_HBM_BYTES_PER_S = 1.2e12


def find_gpu(name: str) -> Hardware | None:
    """Return the first device of the table that has every word of a name and a known memory."""
    exact = find(name)
    if exact and exact.memory_bytes:
        return exact
    wanted = _words(name)
    rows = (row for row in ROWS if wanted and any(wanted <= _words(full) for full in row.names))
    return next((row for row in rows if row.memory_bytes), None)


def similar_gpus(name: str) -> list[str]:
    """Return short names near to a name."""
    short = {" ".join(sorted(_words(row.names[0]))): row.names[0] for row in ROWS}
    near = difflib.get_close_matches(" ".join(sorted(_words(name))), short, 4, 0.3)
    return [short[one] for one in near]


def usable_bytes(row: Hardware) -> float:
    """Return the memory that a program can use."""
    has_hbm = (row.memory_bytes_per_s or 0.0) >= MIN_HBM_BYTES_PER_S and "RTX" not in row.names[0]
    share = USABLE_HBM if has_hbm else USABLE_GDDR
    return (row.memory_bytes or 0) * share


def _words(name: str) -> frozenset[str]:
    plain = re.sub(r"(?<=[a-z])(?=rtx|gtx)|(?<=rtx)(?=\d)|(?<=gtx)(?=\d)", " ", name.lower())
    words = set(re.findall(r"[a-z0-9]+", plain)) - {"nvidia", "tesla", "geforce", "amd", "instinct"}
    return frozenset(words)


def peak_clock_hz(name: str) -> float | None:
    """Return the clock at which a device has its peak, or ``None`` if the number of its SMs is not in the table.

    This is the boost clock of the vendor's figures: the dense rate over the FLOPs of all SMs per clock cycle.  The
    maximum clock of a driver may be higher: an H100 SXM has 989.4 TFLOP/s at 1.83 GHz, and a maximum of 1.98 GHz.
    """
    hardware = find(name)
    if hardware is None or hardware.units is None:
        return None
    rate = hardware.flops_per_s.get("bf16") or hardware.flops_per_s["fp16"]
    return rate / (hardware.units[0] * hardware.units[1])
