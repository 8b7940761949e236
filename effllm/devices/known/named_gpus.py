"""GPUs by the short names that people type, such as h100-80gb or a100; their usable memory, and their peak's clock."""

from __future__ import annotations

import difflib
import re

from effllm.devices.known.hardware import find
from effllm.devices.known.rows import ROWS, Hardware

#: Device -> number of its SMs, and the dense FLOPs of an SM per clock cycle in 16 bits with accumulation in FP32.  The
#: sources are the papers in the table and, for the number of SMs, the number of CUDA cores (64 or 128 per SM).
UNITS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB"), (80, 1024)),
    **dict.fromkeys(("Tesla V100-DGXS-16GB", "Tesla V100-DGXS-32GB"), (80, 1024)),
    **dict.fromkeys(("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB", "Tesla V100S-PCIE-32GB"), (80, 1024)),
    "Tesla T4": (40, 1024),
    **dict.fromkeys(("Quadro RTX 6000", "Quadro RTX 8000", "NVIDIA TITAN RTX"), (72, 1024)),
    "NVIDIA GeForce RTX 2080 Ti": (68, 512),
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A800-SXM4-80GB"), (108, 2048)),
    **dict.fromkeys(("NVIDIA A800-SXM4-40GB",), (108, 2048)),
    "NVIDIA A100-SXM-64GB": (124, 2048),
    **dict.fromkeys(("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA A800 80GB PCIe"), (108, 2048)),
    "NVIDIA A30": (56, 2048),
    "NVIDIA A10": (72, 1024),
    "NVIDIA A2": (10, 1024),
    **dict.fromkeys(("NVIDIA A40", "NVIDIA RTX A6000"), (84, 1024)),
    "NVIDIA RTX A5000": (64, 1024),
    "NVIDIA RTX A4000": (48, 1024),
    "NVIDIA GeForce RTX 3080": (68, 512),
    "NVIDIA GeForce RTX 3090": (82, 512),
    "NVIDIA GeForce RTX 3090 Ti": (84, 512),
    "NVIDIA L4": (58, 1024),
    "NVIDIA L40": (142, 512),
    **dict.fromkeys(("NVIDIA L40S", "NVIDIA RTX 6000 Ada Generation"), (142, 1024)),
    "NVIDIA RTX 5000 Ada Generation": (100, 1024),
    **dict.fromkeys(("NVIDIA RTX 4000 Ada Generation", "NVIDIA RTX 4000 SFF Ada Generation"), (48, 1024)),
    "NVIDIA GeForce RTX 4070 Ti": (60, 512),
    "NVIDIA GeForce RTX 4080": (76, 512),
    "NVIDIA GeForce RTX 4080 SUPER": (80, 512),
    "NVIDIA GeForce RTX 4090": (128, 512),
    "NVIDIA GeForce RTX 4090 D": (114, 512),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H100", "NVIDIA H200", "NVIDIA H800"), (132, 4096)),
    **dict.fromkeys(("NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e"), (132, 4096)),
    **dict.fromkeys(("NVIDIA H100 PCIe", "NVIDIA H800 PCIe"), (114, 4096)),
    **dict.fromkeys(("NVIDIA H100 NVL", "NVIDIA H200 NVL"), (132, 4096)),
    "NVIDIA Thor": (20, 8192),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (188, 1024),
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": (188, 1024),
    "NVIDIA GeForce RTX 5080": (84, 512),
    **dict.fromkeys(("NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 5090 D"), (170, 512)),
}

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
    units = UNITS.get(hardware.names[0]) if hardware is not None else None
    if hardware is None or units is None:
        return None
    rate = hardware.flops_per_s.get("bf16") or hardware.flops_per_s["fp16"]
    return rate / (units[0] * units[1])
