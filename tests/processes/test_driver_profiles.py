"""Every reading of a GPU on five kinds of drivers."""

from __future__ import annotations

import time

import jobs
import pytest
from driver_profiles import PROFILES
from nvml_library import GIB, Trace

from effllm.devices import Site


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
