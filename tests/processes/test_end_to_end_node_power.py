"""Complete jobs on a node with a power sensor: a management controller and a GPU of a trace, and baseline power."""

import jobs
import pytest
from nvml_library import Gpu, Trace, flat
from redfish_service import Service, chassis, supply, tree

LOOP = "loop.py"
A = Gpu("GPU-aaaa0001-0000-4000-8000-000000000001", "00000000:3B:00.0", power=flat(300.0), tick_s=0.02)


@pytest.fixture
def trace(library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(A)
    return trace


def train(launch, trace, *arguments, **settings):
    aggregator = launch.aggregator(**settings)
    rank = launch.python(
        LOOP,
        *arguments,
        environ=jobs.rank_environ(0, 1) | trace.environment(),
        **{"device": "nvml", "endpoint": aggregator.endpoint, **settings},
    )
    rank.done()
    assert not aggregator.job.left()
    return aggregator.ledger


@pytest.mark.alone
def test_node_power_is_used_if_power_supplies_are_readable(launch, trace):
    with Service(tree(chassis("1"), supply("1", "0", 500.0), supply("1", "1", 400.0)), password=None) as service:
        ledger = train(launch, trace, "--iterations", 150, node_power=service.url)
    summary = ledger.summary

    # The power supplies draw 900 W, which includes the 300 W of the GPU.
    assert summary.energy.scope == "node-psu"
    assert summary.metrics["aec_watts"].value == pytest.approx(900.0, rel=0.01)
    assert summary.energy.method == "instant power"
    (device,) = summary.energy.by_device
    assert device.startswith("psu:")
    # A rank's report has the rank's GPU, and also the energy of the other devices.
    (row, *_) = ledger.ranks
    assert (row.device, [key.partition(":")[0] for key in row.other_devices_j]) == (A.uuid, ["psu"])


@pytest.mark.alone
def test_baseline_power_does_not_change_the_total_energy(launch, trace):
    ledger = train(launch, trace, "--iterations", 100, node_power="none", baseline_seconds=1.0)
    values = {tag: value.value for tag, value in ledger.summary.metrics.items()}

    # The power of the GPU is constant, so all power is baseline power.
    assert values["energy/joules_above_baseline"] == pytest.approx(0.0, abs=0.01 * values["energy/total_joules"])
    assert values["aec_watts"] == pytest.approx(300.0, rel=0.01, abs=2 * ledger.summary.metrics["aec_watts"].error)
