"""Every reading of a GPU on five kinds of drivers: failing calls, the site of a rank, and what effllm must measure.

The codes are those of public reports: NOT_SUPPORTED 3, NO_PERMISSION 4, UNKNOWN 999. No profile was recorded on a GPU.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import jobs
import pytest
from nvml_library import GIB, Gpu, Trace, flat

from effllm.devices import Site

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


@pytest.fixture(params=PROFILES)
def machine(request, library, tmp_path):
    profile = PROFILES[request.param]
    trace = Trace(library, tmp_path / "trace")
    trace.write(*profile.gpus)
    trace.fault(*profile.faults)
    return profile, trace


def test_what_a_driver_gives_is_measured_and_the_rest_is_named(machine):
    profile, trace = machine
    with trace.reader(Site(**profile.site)) as reader:
        reader.read()
        time.sleep(0.15)  # GPM needs 0.1 s between two samples
        sample, failures = reader.read()
        device = reader.device

    names = ("memory_bytes", "utilization", "power_w", "energy_j")
    assert {name for name in names if getattr(sample, name) is not None} == profile.measured
    assert sample.gauges.keys() >= profile.gauges
    assert max((value for name, value in sample.gauges.items() if "activity" in name), default=0.0) <= 1.0
    assert (sample.memory_bytes, failures, device.energy_method) == (5 * GIB, {}, profile.method)
    assert tuple(sentence.partition(":")[0] for sentence in device.not_measured) == profile.not_measured
    assert device.memory_total_bytes == profile.gpus[-1].memory_total


def test_job_on_a_driver_has_the_power_and_the_memory_of_its_gpu(machine, launch):
    profile, trace = machine
    devices = profile.site.get("container_devices")
    job = launch.python(
        "loop.py", "--iterations", 60, device="nvml", collection_interval=0.05,
        environ=trace.environment() | ({"NVIDIA_VISIBLE_DEVICES": devices} if devices else {}),
    ).done()  # fmt: skip
    summary = job.ledger.summary

    share = 1 / 7 if devices else 1.0
    assert summary.metrics["aec_watts"].value == pytest.approx(400.0 * share, rel=0.05)
    assert summary.metrics["amu_gb"].value == pytest.approx(5.0)
    assert summary.energy.method == profile.method
    assert job.ledger.event_texts("agent") == []
    assert jobs.FORMATS.keys() - summary.metrics.keys() <= {"pcu_ratio", "it_tokens_per_sec"}
