"""GPUs by the short names that people type, such as h100-80gb, a100 or rtx4090."""

from __future__ import annotations

import difflib
import re

from effllm.devices.known.hardware import ROWS, Hardware, find

#: Share of the memory on the board that a program can use: the driver keeps a part, and boards with GDDR keep the codes
#: of ECC in the same memory.
USABLE_HBM, USABLE_GDDR = 0.98, 0.92
MIN_HBM_BYTES_PER_S = 1.2e12


def find_gpu(name: str) -> Hardware | None:
    """Return the first device of the table that has every word of a name."""
    if exact := find(name):
        return exact
    wanted = _words(name)
    rows = (row for row in ROWS if wanted and any(wanted <= _words(full) for full in row.names))
    return next(rows, None)


def similar_gpus(name: str) -> list[str]:
    """Return short names near to a name."""
    short = {" ".join(sorted(_words(row.names[0]))): row.names[0] for row in ROWS}
    near = difflib.get_close_matches(" ".join(sorted(_words(name))), short, 4, 0.3)
    return [short[one] for one in near]


def usable_bytes(row: Hardware) -> float:
    """Return the memory that a program can use."""
    has_hbm = row.memory_bytes_per_s >= MIN_HBM_BYTES_PER_S and "RTX" not in row.names[0]
    share = USABLE_HBM if has_hbm else USABLE_GDDR
    return row.memory_bytes * share


def _words(name: str) -> frozenset[str]:
    plain = re.sub(r"(?<=[a-z])(?=rtx|gtx)|(?<=rtx)(?=\d)|(?<=gtx)(?=\d)", " ", name.lower())
    words = set(re.findall(r"[a-z0-9]+", plain)) - {"nvidia", "tesla", "geforce", "amd", "instinct"}
    return frozenset(words)
