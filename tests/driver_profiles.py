"""What NVML answers on five kinds of machines: GPUs, failing calls, the site of a rank, and what effllm must measure.

The codes are those of public reports: NOT_SUPPORTED 3, NO_PERMISSION 4, UNKNOWN 999. No profile was recorded on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from nvml_library import GIB, Gpu, flat

NOT_SUPPORTED, NO_PERMISSION, UNKNOWN = 3, 4, 999
ACTIVE = {"sm_activity": flat(0.9), "tensor_activity": flat(1.0002), "dram_activity": flat(0.4)}
SLICE = "MIG-11111111-2222-3333-4444-555555555555"


class Profile(NamedTuple):
    """A machine, and what a reader of its first GPU gives."""

    gpus: tuple[Gpu, ...]
    faults: tuple[str, ...] = ()
    site: dict = {}  # noqa: RUF012 - a constant of the test
    measured: frozenset[str] = frozenset({"memory_bytes", "utilization", "power_w", "energy_j"})
    gauges: frozenset[str] = frozenset({"sm_clock_hz", "temperature_c"})
    method: str | None = "counter"
    not_measured: tuple[str, ...] = ()  # the quantities that a sentence names


def gpu(name: str, **changes) -> Gpu:
    return Gpu(
        "GPU-00000001", "00000000:01:00.0", **{"name": name, "power": flat(400.0), "memory": flat(5.0 * GIB), **changes}
    )


PROFILES = {
    "data-centre Hopper": Profile(
        (gpu("NVIDIA H100 80GB HBM3", gpm=1, memory_reserved=GIB, **ACTIVE),),
        # No board without a Grace CPU has module power; activities may read a little above 100 %.
        (
            f"0 power.instant.module error {NOT_SUPPORTED}",
            f"0 power.average.module error {NOT_SUPPORTED}",
            *(f"0 {call} serial 0.002" for call in ("fields", "gpm")),  # one process at a time
        ),
        gauges=frozenset({"sm_clock_hz", "temperature_c", "tensor_activity_ratio", "memory_reserved_bytes"}),
    ),
    "Ampere": Profile(
        (gpu("NVIDIA A100-SXM4-80GB", gpm=0, memory_reserved=GIB),),
        (f"0 gpm error {NOT_SUPPORTED}", f"0 profiles error {NOT_SUPPORTED}"),
    ),
    "GeForce": Profile(
        (gpu("NVIDIA GeForce RTX 4090"),),
        (f"0 ecc error {NOT_SUPPORTED}", f"0 gpm error {NOT_SUPPORTED}", f"0 about.serial error {NOT_SUPPORTED}"),
    ),
    "MIG pod": Profile(
        (
            gpu("NVIDIA H100 80GB HBM3", gpm=1, **ACTIVE),
            Gpu(SLICE, parent=0, instance=1, slices=1, memory=flat(5.0 * GIB), memory_total=10 * GIB),
        ),
        tuple(f"0 {call} error {NO_PERMISSION}" for call in ("memory", "utilization", "events", "ecc", "processes")),
        {"container_devices": SLICE},
        measured=frozenset({"memory_bytes", "power_w", "energy_j"}),
        not_measured=("utilization", "Xid errors"),
    ),
    "WSL2": Profile(
        (gpu("NVIDIA GeForce RTX 4090"),),
        (
            f"0 memory.v2 error {UNKNOWN}",
            *(f"0 {call} error {NOT_SUPPORTED}" for call in ("processes", "ecc", "gpm", "events", "fields", "energy")),
        ),
        measured=frozenset({"memory_bytes", "utilization"}),  # the older call for power gives a mean over 1 s
        method="average power",
        not_measured=("memory apart from the driver's reserve", "Xid errors"),
    ),
}
