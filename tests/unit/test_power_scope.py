"""effllm/job/power_scope.py: choice of the devices that count for a job's energy, and the job's sums."""

import pytest
from builders import Job, device_window, full, gpu, row
from cases import cases

from effllm.job.energy_account import common_scopes, keep_scope
from effllm.records.energy import NOT_MEASURED, EnergyAmount
from effllm.records.rank import Device, Integrals

# --- sensors that every node has ------------------------------------------------------------------------


def cpu(host="node0", **changes):
    return gpu(f"cpu:{host}", kind="rapl", is_gpu=False, only_power=True, power_scope="cpu", **changes)


def psu(host="node0", **changes):
    return gpu(f"psu:{host}", kind="redfish", is_gpu=False, only_power=True, power_scope="node-psu", **changes)


def module(name, shared="module:node0:1"):
    return gpu(name, power_scope="module", energy_key=shared)


def host_device(host="node0", **changes):
    return gpu(host, kind="host", is_gpu=False, shared=True, power_scope="cpu", **changes)


BLIND = gpu("GPU-blind", energy_method=None, power_scope=None)
BOTH = (gpu("GPU-0"), cpu(), psu())


def chosen(*nodes):
    scope, *_ = common_scopes(nodes)
    return scope.label, set(scope.keys)


@cases(
    ("nodes", "label", "keys"),
    [
        ((BOTH, (gpu("GPU-1"), psu("node1"))), "node-psu", {"psu:node0", "psu:node1"}),
        ((BOTH, (gpu("GPU-1"), cpu("node1"))), "gpu+cpu", {"GPU-0", "GPU-1", "cpu:node0", "cpu:node1"}),
        ((BOTH, (gpu("GPU-1"),)), "gpu", {"GPU-0", "GPU-1"}),
        (((module("GPU-0"),), (gpu("GPU-1"), cpu("node1"))), "gpu+module+cpu", {"GPU-0", "GPU-1", "cpu:node1"}),
        (((module("GPU-0"),), (gpu("GPU-1"),)), "gpu+module", {"GPU-0", "GPU-1"}),
        (((host_device(),), (host_device("node1"),)), "cpu", {"node0", "node1"}),
        (((host_device(),), BOTH[:2]), "gpu+cpu", {"node0", "GPU-0", "cpu:node0"}),
        # without a sensor: a gap in energy
        (((gpu("GPU-0"), BLIND),), "gpu", {"GPU-0", "GPU-blind"}),
        (((gpu("GPU-0"),), (BLIND,)), "gpu", {"GPU-0", "GPU-blind"}),
        (((gpu("GPU-0"),), (host_device("node1", energy_method=None),)), "gpu", {"GPU-0", "node1"}),
    ],
)
def test_widest_scope_that_every_node_measures_is_chosen(nodes, label, keys):
    assert chosen(*nodes) == (label, keys)


def test_cpu_inside_a_module_is_not_added_again():
    node = module("GPU-0"), module("GPU-1"), cpu()

    assert chosen(node) == ("module", {"GPU-0", "GPU-1"})


def test_supplies_with_two_sensors_are_counted_once():
    label, keys = chosen((*BOTH, psu("node0-again")))

    assert (label, len(keys)) == ("node-psu", 1)


def test_scope_is_none_without_energy_sensors():
    assert common_scopes([(BLIND,), ()]) == common_scopes([]) == []


def test_scope_of_a_run_is_kept_if_new_nodes_lack_its_sensors():
    scope = keep_scope([BOTH, (gpu("GPU-1"),)], "node-psu")

    assert (scope.label, set(scope.keys), scope.lacking) == ("node-psu", {"psu:node0"}, 1)
    assert "the run began with node-psu, but not every node can measure it" in scope.complaint


def test_scope_of_a_run_is_kept_without_sensors():
    scope = keep_scope([(BLIND,)], "gpu")

    assert (scope.label, set(scope.keys)) == ("gpu", {"GPU-blind"})
    assert "is incomplete" in scope.complaint


# --- in a job -----------------------------------------------------------------------------------


class Cluster(Job):
    """Nodes with the given devices; each node has one rank."""

    def __init__(self, *nodes: tuple[Device, ...], ledger=None, **settings):
        super().__init__(len(nodes), ledger, **settings)
        self.nodes = list(nodes)
        for rank in range(len(nodes)):
            self.introduce(rank)

    def introduce(self, rank, *more):
        self.nodes[rank] = (*self.nodes[rank], *more)
        self.join(rank, devices=self.nodes[rank], host=f"node{rank}")

    def window(self, number, watts=None, without=()):
        """Close a window of 10 s; each device draws 100 W, or its `watts`; devices in `without` are not read."""
        for rank, devices in enumerate(self.nodes):
            windows = tuple(
                device_window(one.key, wall=full(10.0, (watts or {}).get(one.key, 100.0)))
                if one.energy_method
                else device_window(one.key, wall=Integrals(NOT_MEASURED, 1.0, 10.0, 1.0, 10.0))
                for one in devices
                if one.key not in without
            )
            self.send(row(rank, number, devices=windows))
        (report,) = self.closed()
        return report


def test_module_energy_shown_by_two_gpus_is_counted_once():
    job = Cluster((module("GPU-0"), module("GPU-1"), cpu()))
    report = job.window(1, {"GPU-0": 900.0, "GPU-1": 900.0})

    assert (report.power_scope, report.last.energy.joules) == ("module", 9000.0)
    assert report.last.energy.gpus_j == 9000.0
    assert job.summary().energy.by_device == {"module:node0:1": 9000.0}


def test_energy_of_two_dies_is_measured_by_the_die_with_a_sensor():
    dies = gpu("die-0", energy_key="die-0"), gpu("die-1", energy_key="die-0", energy_method=None, power_scope=None)
    report = Cluster(dies).window(1)

    assert (report.coverage.energy, report.last.energy.joules) == (1.0, 1000.0)
    assert report.values["energy/watts_per_gpu"] == 50.0


def test_watts_per_gpu_include_only_gpus_in_every_scope():
    job = Cluster((gpu("GPU-0", power_limit_w=400.0), cpu(), psu()))
    report = job.window(1, {"GPU-0": 300.0, "cpu:node0": 150.0, "psu:node0": 800.0})

    assert report.power_scope == "node-psu"
    assert report.values["window/aec_watts"] == pytest.approx(800.0)
    assert report.values["energy/watts_per_gpu"] == pytest.approx(300.0)
    assert report.values["energy/power_limit_ratio"] == pytest.approx(0.75)


def test_gauges_of_gpus_do_not_include_sensors_of_the_node():
    wall = Integrals(EnergyAmount(30_000.0, 10.0))
    supply = device_window("psu:node0", wall=wall, power_peak_w=3000.0, power_histogram_s={300: 10.0})
    one = device_window("GPU-0", power_peak_w=500.0, power_histogram_s={50: 10.0})
    job = Cluster((gpu("GPU-0"), psu()))
    job.send(row(0, 1, devices=(one, supply)))

    (report,) = job.closed()
    assert report.coverage.memory == report.coverage.utilization == 1.0
    assert (report.coverage.gpus_expected, report.coverage.gpus_measured) == (1, 1)
    assert (report.run.devices.power_peak_w, report.run.devices.power_histogram_s) == (500.0, {50: 10.0})


def test_sensor_found_later_does_not_change_the_scope():
    job = Cluster((gpu("GPU-0"),))
    job.window(1)
    job.introduce(0, psu())
    report = job.window(2, {"psu:node0": 800.0})

    assert (report.power_scope, report.run.energy.joules) == ("gpu", 2000.0)
    assert job.summary().energy.by_device == {"GPU-0": 2000.0}
    assert job.summary().not_measured == (
        "power scope: node-psu was not measured from the start of the run, so gpu is still used",
    )


def test_sensor_unread_in_the_first_window_is_not_in_the_scope():
    job = Cluster((gpu("GPU-0"), cpu(), psu()))
    report = job.window(1, without=("psu:node0",))

    assert (report.power_scope, report.run.energy.is_complete, report.run.energy.joules) == ("gpu+cpu", True, 2000.0)


@pytest.mark.parametrize(("covered_s", "label", "coverage"), [(6.0, "node-psu", 0.6), (4.0, "gpu", 1.0)])
def test_scope_is_the_widest_measured_in_the_first_window(covered_s, label, coverage):
    job = Cluster((gpu("GPU-0"), psu()))
    late = device_window("psu:node0", wall=Integrals(EnergyAmount(1000.0, covered_s)))
    job.send(row(0, 1, devices=(device_window("GPU-0"), late)))

    (report,) = job.closed()
    assert (report.power_scope, report.coverage.energy) == (label, pytest.approx(coverage))


@pytest.mark.parametrize(("least", "expected_j"), [(1.0, None), (0.5, 1000.0)])
def test_window_without_a_supply_needs_at_least_min_coverage(least, expected_j):
    job = Cluster((gpu("GPU-0"), psu()), (gpu("GPU-1"), psu("node1")), min_coverage=least)
    job.window(1)
    report = job.window(2, without=("psu:node1",))

    assert report.coverage.energy == pytest.approx(0.5)
    assert report.last.energy.joules == expected_j
    assert job.summary().energy.total_joules is None, "a supply is missing"
    assert job.summary().energy.measured_joules == pytest.approx(3000.0)


def test_late_node_without_the_scope_counts_as_a_gap_in_energy():
    job = Job().join(0, devices=(gpu("GPU-0"), psu()))
    job.send(row(0, 1, devices=(device_window("GPU-0"), device_window("psu:node0"))))
    job.aggregator.close_all()
    job.join(1, devices=(gpu("GPU-1"),), host="node1")
    job.send(row(0, 2, devices=(device_window("GPU-0"), device_window("psu:node0"))), row(1, 2))

    report = job.closed()[-1]
    assert (report.power_scope, report.coverage.energy) == ("node-psu", pytest.approx(0.5))


@pytest.mark.parametrize("next_attempt", [False, True])
def test_next_aggregator_and_attempt_keep_the_scope(next_attempt):
    first = Cluster((gpu("GPU-0"), cpu()))
    first.window(1)
    ledger = first.next_ledger("job") if next_attempt else first.ledger()
    second = Cluster((gpu("GPU-0"), cpu(), psu()), ledger=ledger)
    report = second.window(1 if next_attempt else 2)

    assert (report.power_scope, report.job.energy.joules) == ("gpu+cpu", 4000.0)


def test_rank_without_a_device_counts_as_a_gap_in_energy():
    report = Cluster((gpu("GPU-0"),), ()).window(1)

    assert report.coverage.energy == pytest.approx(0.5)
    assert (report.coverage.gpus_expected, report.coverage.gpus_measured) == (2, 1)
    assert report.run.energy.joules is None


def test_node_power_includes_ranks_without_a_device():
    report = Cluster((psu(),)).window(1)

    assert (report.power_scope, report.last.energy.joules, report.last.energy.gpus_j) == ("node-psu", 1000.0, None)


def test_node_sensor_counts_as_a_gap_after_its_rank_has_left():
    job = Job(3)
    nodes = {0: ("node0", gpu("GPU-0"), psu()), 1: ("node0", gpu("GPU-1")), 2: ("node1", gpu("GPU-2"), psu("node1"))}
    for rank, (host, *devices) in nodes.items():
        job.join(rank, devices=tuple(devices), host=host)
    for window, ranks in ((1, (0, 1, 2)), (2, (1, 2))):
        for rank in ranks:
            job.send(row(rank, window, devices=tuple(device_window(one.key) for one in nodes[rank][1:])))
        job.bye(0)

    reports_of = job.closed()
    assert [report.coverage.energy for report in reports_of] == [1.0, 0.5]
    assert [report.power_scope for report in reports_of] == ["node-psu", "node-psu"]
