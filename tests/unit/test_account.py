"""effllm/job/account.py: each token, joule and second of the cluster is counted once."""

import numpy as np
import pytest
from builders import GIB, device_window, full, gpu, row
from cases import cases
from hypothesis import given
from hypothesis import strategies as st

from effllm import metrics
from effllm.job.account import Account, Rows
from effllm.job.closed_windows import add_devices, add_rows
from effllm.job.energy_account import Scope, is_covered, window_energy
from effllm.job.ledger import Ledger
from effllm.job.merged import MAX_REASONS, Expected, merge_devices
from effllm.job.reporting import Window
from effllm.records.energy import NOT_MEASURED, EnergyAmount
from effllm.records.job import JobConstants
from effllm.records.rank import Gauge, Integrals
from effllm.store.reader import totals_by_key


def gpus(count):
    devices = Expected({f"GPU-{rank}": gpu(f"GPU-{rank}") for rank in range(count)})
    return devices, {key: {rank} for rank, key in enumerate(devices)}


def scope_of(devices):
    return Scope("gpu" if any(one.energy_method for one in devices.values()) else None, "gpu", frozenset(devices))


def totals_of(windows, devices, members, *, wall=False, least=1.0, absent=0):
    account, devices = Account(wall=wall), Expected(devices)
    for rows in map(Rows, windows):
        merged = merge_devices(rows, devices, members)
        account.add_rows(rows)
        account.add_devices(merged)
        energy = window_energy(merged, devices, scope_of(devices), absent)
        account.add_energy(rows[0].window if rows else 0, energy, rows, least)
    return account.totals(JobConstants(parameters=1000, gpus=len(devices), world_size=2))


def test_longest_data_wait_is_used_if_ranks_have_equal_times():
    rows = [row(0, 1, busy_s=9.0, wait_s=1.0), row(1, 1, busy_s=8.0, wait_s=2.0)]

    assert totals_of([rows], *gpus(2)).loop.wait_s == totals_of([rows[::-1]], *gpus(2)).loop.wait_s == 2.0


def test_cluster_time_is_the_largest_total_time_of_a_rank():
    windows = [
        [row(0, 1, busy_s=9.0, wait_s=1.0), row(1, 1, busy_s=18.0, wait_s=2.0)],
        [row(0, 2, busy_s=19.0, wait_s=2.0), row(1, 2, busy_s=9.0, wait_s=1.0)],
    ]

    totals = totals_of(windows, *gpus(2))

    # Rank 0 takes 10 + 21 s, and rank 1 takes 20 + 10 s.  The sum of each window's largest time would be 20 + 21 s.
    assert totals.loop.time_s == 31.0
    assert totals.loop.wait_s == 3.0, "of the rank with the largest T"


def test_latency_is_the_largest_mean_step_time_of_a_rank():
    totals = totals_of([[row(0, busy_s=9.0), row(1, busy_s=12.0)]], *gpus(2))

    assert (totals.loop.slowest_step_s, totals.loop.slowest_iterations) == (12.0, 10)
    assert metrics.table.al_seconds(totals) == pytest.approx(1.2)


def test_each_token_and_sample_is_counted_once():
    windows = [[row(0, window), row(1, window, tokens=500)] for window in (1, 2)]

    totals = totals_of(windows, *gpus(2))

    assert (totals.counts.tokens, totals.counts.tokens_processed, totals.counts.samples) == (3000, 4000, 40)
    assert totals.counts.iterations == 20


def test_gpu_shared_by_two_ranks_is_counted_once():
    rows = [row(rank, devices=(device_window("GPU-0", 10.0),)) for rank in (0, 1)]

    totals = totals_of([rows], {"GPU-0": gpu()}, {"GPU-0": {0, 1}})

    assert totals.energy.joules == 100.0 * 10.0
    assert totals.devices.memory_mean_bytes == GIB
    assert totals.devices.utilization_mean == 0.5


def test_energy_of_a_shared_gpu_is_from_the_rank_with_most_coverage():
    half = device_window("GPU-0", wall=Integrals(EnergyAmount(500.0, 5.0), GIB * 5.0, 5.0, 2.5, 5.0))
    rows = [row(0, devices=(half,)), row(1, devices=(device_window("GPU-0", 10.0),))]

    totals = totals_of([rows], {"GPU-0": gpu()}, {"GPU-0": {0, 1}})

    assert (totals.energy.joules, totals.energy.is_complete) == (1000.0, True)


def host_row(rank, watts=None, memory_bytes=GIB, utilization=0.25, wall_s=10.0):
    wall = full(wall_s, watts or 0.0, memory_bytes, utilization)
    if watts is None:
        wall = Integrals(NOT_MEASURED, wall.memory_byte_seconds, wall_s, wall.utilization_seconds, wall_s)
    return row(rank, devices=(device_window("node0", wall=wall, memory_peak_bytes=2 * memory_bytes),))


HOST = {"node0": gpu("node0", kind="host", is_gpu=False, shared=True)}


@pytest.mark.parametrize("wall", [False, True])
def test_memory_and_cpu_are_summed_and_host_energy_counts_once(wall):
    rows = [host_row(0, watts=300.0), host_row(1, memory_bytes=3 * GIB, utilization=0.5)]

    totals = totals_of([rows], HOST, {"node0": {0, 1}}, wall=wall)

    assert totals.devices.memory_mean_bytes == pytest.approx(4 * GIB)
    assert totals.devices.utilization_mean == pytest.approx(0.75)
    assert totals.devices.memory_peak_bytes == pytest.approx(8 * GIB)
    assert totals.energy.joules == 3000.0


def test_memory_of_ranks_is_summed_over_windows_of_unequal_length():
    rows = [host_row(0, wall_s=10.0), host_row(1, wall_s=20.0)]

    assert totals_of([rows], HOST, {"node0": {0, 1}}).devices.memory_mean_bytes == pytest.approx(2 * GIB)


def test_memory_and_cpu_of_a_host_need_reports_of_all_its_ranks():
    totals = totals_of([[host_row(0, watts=300.0)]], HOST, {"node0": {0, 1}})

    devices = totals.devices
    assert devices.memory_mean_bytes is devices.utilization_mean is devices.memory_peak_bytes is None
    assert totals.energy.joules == 3000.0, "read once, by one rank"


def test_undeclared_device_is_ignored():
    totals = totals_of([[row(0), row(1)]], {"GPU-0": gpu()}, {"GPU-0": {0}})

    assert totals.energy.joules == 1000.0


def test_spread_uses_device_means_and_peak_uses_readings():
    low = device_window("GPU-0", wall=full(10.0, memory_bytes=GIB, utilization=0.2), memory_peak_bytes=5 * GIB)
    high = device_window("GPU-1", wall=full(10.0, memory_bytes=3 * GIB, utilization=0.8), memory_peak_bytes=4 * GIB)

    totals = totals_of([[row(0, devices=(low,)), row(1, devices=(high,))]], *gpus(2))

    devices = totals.devices
    memory = devices.memory_min_bytes, devices.memory_mean_bytes, devices.memory_max_bytes, devices.memory_peak_bytes
    assert memory == (GIB, 2 * GIB, 3 * GIB, 5 * GIB)
    utilization = devices.utilization_min, devices.utilization_mean, devices.utilization_max
    assert utilization == pytest.approx((0.2, 0.5, 0.8))


def test_time_of_phases_is_in_wall_time_and_not_in_iterations():
    evaluation = {"evaluation": full(5.0, watts=40.0)}
    window = device_window("GPU-0", wall=full(15.0, watts=80.0), phases=evaluation)
    rows = [row(0, phases_s={"evaluation": 5.0}, devices=(window,))]

    of_iterations, of_wall = totals_of([rows], *gpus(1)), totals_of([rows], *gpus(1), wall=True)

    assert (of_iterations.loop.time_s, of_iterations.energy.joules) == (10.0, 15 * 80.0 - 5 * 40.0)
    assert (of_wall.loop.time_s, of_wall.energy.joules) == (15.0, 15 * 80.0)


def half_covered_row(rank, window, covered_s):
    wall = Integrals(EnergyAmount(100.0 * covered_s, covered_s), 0.0, 10.0, 0.0, 10.0)
    return row(rank, window, devices=(device_window(f"GPU-{rank}", wall=wall),))


def test_window_below_min_coverage_is_not_in_the_energy_of_the_run():
    windows = [[row(0, 1), row(1, 1)], [row(0, 2), half_covered_row(1, 2, 4.0)]]

    totals = totals_of(windows, *gpus(2))

    # In the second window, 14 of the 20 seconds of the two devices are covered.
    assert (totals.energy.joules, totals.energy.time_s, totals.energy.counts.tokens) == (2000.0, 10.0, 2000)
    assert (totals.energy.is_complete, totals.energy.measured_j) == (False, 2000.0 + 1000.0 + 400.0)
    assert metrics.table.aec_watts(totals) == 200.0
    assert metrics.energy.total_joules(totals) is None


@cases(("least", "joules", "is_complete"), [(0.7, 3400.0, False), (0.71, 2000.0, False), (0.4, 3400.0, True)])
def test_each_window_and_device_is_compared_with_min_coverage(least, joules, is_complete):
    windows = [[row(0, 1), row(1, 1)], [row(0, 2), half_covered_row(1, 2, 4.0)]]

    energy = totals_of(windows, *gpus(2), least=least).energy
    assert (energy.joules, energy.is_complete) == (joules, is_complete)


def test_memory_and_utilization_means_have_values_without_energy():
    totals = totals_of([[half_covered_row(0, 1, 0.0)]], *gpus(1))

    assert (totals.energy.joules, totals.devices.utilization_mean) == (None, 0.0)


def test_absent_rank_counts_as_one_unmeasured_device():
    energy = window_energy(merge_devices(Rows([row(0)]), *gpus(1)), gpus(1)[0], scope_of(gpus(1)[0]), num_not_joined=1)

    assert energy.coverage == pytest.approx(0.5)


def test_energy_coverage_is_none_without_energy_sensors():
    devices = Expected({"GPU-0": gpu(energy_method=None)})
    window = device_window("GPU-0", wall=Integrals(NOT_MEASURED, GIB, 10.0, 5.0, 10.0))

    merged = merge_devices(Rows([row(0, devices=(window,))]), devices, {"GPU-0": {0}})
    energy = window_energy(merged, devices, scope_of(devices))

    assert energy.coverage is None
    assert not is_covered(energy.coverage, 0.0)
    assert energy.owners == []


def test_float_rounding_does_not_reduce_full_coverage():
    assert is_covered(1.0 - 1e-9, 1.0)
    assert not is_covered(0.999, 1.0)


SECONDS = st.integers(1, 100_000).map(lambda milliseconds: milliseconds / 1000)


@st.composite
def clusters(draw):
    """Return windows of up to four ranks whose GPUs are measured completely or partly."""
    ranks = draw(st.integers(1, 4))
    windows = []
    for window in range(1, draw(st.integers(1, 5)) + 1):
        rows = []
        for rank in range(ranks):
            busy_s, wait_s, phase_s = draw(SECONDS), draw(SECONDS), draw(SECONDS)
            wall_s = busy_s + wait_s + phase_s
            measured = draw(st.sampled_from([True, True, True, False]))
            wall = full(wall_s, watts=float(draw(st.integers(1, 900))))
            phases = {"evaluation": full(phase_s, watts=wall.energy.joules / wall_s)}
            if not measured:
                wall, phases = Integrals(), {}
            device = device_window(f"GPU-{rank}", wall=wall, phases=phases)
            counts = {"tokens": draw(st.integers(1, 10**6)), "samples": draw(st.integers(1, 100))}
            times = {"busy_s": busy_s, "wait_s": wait_s, "phases_s": {"evaluation": phase_s}}
            rows.append(row(rank, window, devices=(device,), **times, **counts))
        windows.append(rows)
    return windows, ranks


@given(clusters(), st.booleans(), st.sampled_from([0.5, 1.0]))
def test_power_times_time_is_energy_in_total_and_per_token(cluster, wall, least):
    windows, ranks = cluster

    totals = totals_of(windows, *gpus(ranks), wall=wall, least=least)
    power_w, per_token = metrics.table.aec_watts(totals), metrics.energy.joules_per_token(totals)

    if totals.energy.joules is None:
        assert power_w is None
        assert per_token is None
        return
    assert power_w * totals.energy.time_s == pytest.approx(totals.energy.joules, rel=1e-9)
    assert power_w * totals.energy.time_s / totals.energy.counts.tokens == pytest.approx(per_token, rel=1e-9)
    if totals.energy.is_complete:  # the energy covers all seconds and tokens of the job
        assert power_w * totals.loop.time_s == pytest.approx(totals.energy.joules, rel=1e-9)
        assert power_w * totals.loop.time_s / totals.counts.tokens == pytest.approx(per_token, rel=1e-9)


@given(clusters(), st.randoms(use_true_random=False), st.booleans())
def test_merge_order_of_ranks_does_not_change_totals(cluster, random, wall):
    windows, ranks = cluster
    shuffled = [random.sample(rows, len(rows)) for rows in windows]

    one, other = (totals_by_key(totals_of(each, *gpus(ranks), wall=wall)) for each in (windows, shuffled))

    assert one.keys() == other.keys()
    for name, value in one.items():
        assert other[name] == (pytest.approx(value, rel=1e-11) if isinstance(value, float) else value), name


@given(clusters(), st.booleans())
def test_removing_a_window_restores_the_sums(cluster, wall):
    windows, ranks = cluster
    devices, members = gpus(ranks)
    account = Account(wall=wall)
    for rows in map(Rows, windows):
        merged = merge_devices(rows, devices, members)
        energy = window_energy(merged, devices, scope_of(devices))
        account.add_devices(merged)
        account.add_energy(7, energy, rows, 1.0)
        account.add_devices(merged, -1)
        account.add_energy(7, energy, rows, 1.0, -1)

    left = account.totals(JobConstants())

    assert (left.energy.joules, left.energy.counts.tokens, left.devices.memory_mean_bytes) == (None, 0, None)
    assert (account.holes, account.measured_j) == (0, 0.0)


# --- each joule is counted once, with its error ---------------------------------------------------


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=8))
def test_shared_gpu_energy_is_counted_once_if_window_lengths_differ(edges_s):
    # Each rank's windows are adjacent; their lengths differ between the ranks. The GPU always draws 100 W.
    devices, members = {"GPU-0": gpu()}, {"GPU-0": {0, 1}}

    def windows(rank, number, span_s):
        return row(rank, number, busy_s=span_s, wait_s=0.0, devices=(device_window("GPU-0", span_s),))

    rows = [[windows(rank, number, edges[rank]) for rank in (0, 1)] for number, edges in enumerate(edges_s, start=1)]
    totals = totals_of(rows, devices, members, wall=True)

    assert totals.energy.is_complete
    assert totals.energy.joules == pytest.approx(100.0 * sum(spans_s[0] for spans_s in edges_s))


def test_shared_gpu_energy_is_from_one_rank_also_if_its_memory_has_a_gap():
    """The windows of rank 1 begin 1 s later; in the second one, rank 0 has memory for a part of the time."""
    gap = device_window("GPU-0", wall=Integrals(EnergyAmount(2000.0, 10.0), GIB * 8.0, 8.0, 5.0, 10.0))
    other = device_window("GPU-0", 10.5)
    windows = [
        [row(0, number, devices=(mine,)), row(1, number, busy_s=10.5, wait_s=0.0, devices=(other,))]
        for number, mine in ((1, device_window("GPU-0", 10.0)), (2, gap))
    ]

    totals = totals_of(windows, {"GPU-0": gpu()}, {"GPU-0": {0, 1}}, wall=True)

    assert (totals.energy.joules, totals.energy.is_complete) == (3000.0, True)


def test_rank_without_host_energy_does_not_change_the_energy_error():
    energy = EnergyAmount(3000.0, 10.0, start_j2=4.0, end_j2=5.0, estimated_j=7.0)
    wall = Integrals(energy, GIB * 10.0, 10.0, 5.0, 10.0)
    rows = [row(0, devices=(device_window("node0", wall=wall),)), host_row(1)]

    totals = totals_of([rows], HOST, {"node0": {0, 1}}, wall=True)

    assert totals.energy.error_j == pytest.approx(1.96 * 3.0)
    assert totals.energy.estimated_j == 7.0


def test_power_percentiles_weight_ten_watt_bins_by_time():
    # The power is 300 to 310 W for 94 s, 500 to 510 W for 5 s, and 690 to 700 W for 1 s.
    busy = device_window("GPU-0", power_peak_w=699.0, power_histogram_s={30: 44.0, 50: 5.0})
    idle = device_window("GPU-1", power_histogram_s={30: 50.0, 69: 1.0})

    totals = totals_of([[row(0, devices=(busy,)), row(1, devices=(idle,))]], *gpus(2))

    assert [metrics.energy.power_percentile(totals, share) for share in (0.5, 0.94, 0.95, 0.99, 1.0)] == [
        305.0, 305.0, 505.0, 505.0, 695.0,
    ]  # fmt: skip
    assert metrics.energy.power_percentile(totals_of([[row(0)]], *gpus(1)), 0.5) is None


def test_gauges_are_averaged_and_temperature_is_the_maximum():
    def heated(name, degrees, clock_hz, seconds):
        gauges = {
            "temperature_c": Gauge(degrees * seconds, seconds, degrees - 5.0, degrees + 5.0),
            "sm_clock_hz": Gauge(clock_hz * seconds, seconds, clock_hz, clock_hz),
            "unknown_gauge": Gauge(1.0, 1.0, 1.0, 1.0),
        }
        return device_window(name, gauges=gauges, throttled_s={"any": 1.0, "power_cap": 1.0}, throttle_covered_s=5.0)

    rows = [row(0, devices=(heated("GPU-0", 60.0, 1e9, 10.0),)), row(1, devices=(heated("GPU-1", 70.0, 2e9, 30.0),))]
    totals = totals_of([rows], *gpus(2))

    assert (totals.devices.temperature_max_c, totals.devices.sm_clock_hz) == (75.0, pytest.approx(1.75e9))
    assert metrics.health.throttled_ratio(totals) == pytest.approx(0.2)
    assert metrics.health.sm_clock_mhz(totals) == pytest.approx(1750.0)
    assert metrics.health.sm_activity_ratio(totals) is None


def test_number_of_reasons_of_throttling_is_bounded():
    """A report may have any names of reasons, and the sums of a run are written to its state."""
    windows = [
        [row(0, window, devices=(device_window("GPU-0", throttled_s={f"{window}-{n}": 1.0 for n in range(60)}),))]
        for window in range(1, 4)
    ]
    assert len(totals_of(windows, *gpus(1)).devices.throttled_by_s) == MAX_REASONS


@st.composite
def classed_windows(draw):
    """Return windows of up to three ranks, with phases, gaps and devices without measurements."""
    ranks, windows = draw(st.integers(1, 3)), []
    names = ("evaluation", "checkpoint", "other", "startup", "shutdown")
    for number in range(1, draw(st.integers(1, 5)) + 1):
        rows = []
        for rank in range(ranks):
            phases_s = {name: draw(SECONDS) for name in draw(st.sets(st.sampled_from(names)))}
            share = draw(st.sampled_from([1.0, 1.0, 0.5, 0.0]))  # measured share of the window
            parts = {
                name: Integrals(EnergyAmount(share * seconds * draw(st.floats(0, 900)), share * seconds))
                for name, seconds in {"iterations": 10.0, **phases_s}.items()
            }
            joules = sum(part.energy.joules for part in parts.values())
            wall = Integrals(EnergyAmount(joules, share * (10.0 + sum(phases_s.values())))) if share else Integrals()
            del parts["iterations"]
            one = device_window(f"GPU-{rank}", wall=wall, phases=parts if share else {})
            rows.append(row(rank, number, phases_s=phases_s, devices=(one,)))
        windows.append(rows)
    return windows, ranks


@given(classed_windows(), st.integers(0, 40), st.sampled_from([0.5, 1.0]))
def test_energy_classes_sum_to_the_measured_energy(job, warmup, least):
    windows, ranks = job
    devices, members = gpus(ranks)
    ledger = Ledger(attempt=1, job="job", started_time_s=0.0)
    for rows in map(Rows, windows):
        number = rows[0].window
        merged = merge_devices(rows, devices, members)
        ledger.note_warmup(number, rows, warmup, 0.0)
        add_rows(ledger, number, rows)
        energy = window_energy(merged, devices, scope_of(devices))
        add_devices(ledger, Window(number, rows, merged, energy), least)
    run, whole, by_class = *(one.totals(JobConstants()) for one in (ledger.run, ledger.whole)), ledger.energy_by_class()

    assert sum(by_class.values()) == pytest.approx(whole.energy.measured_j or 0.0, rel=1e-9, abs=1e-6)
    if whole.energy.is_complete:
        assert sum(by_class.values()) == pytest.approx(whole.energy.joules, rel=1e-9)
    # The run to date has the energy of all iterations, except the warm-up.
    measured_in_run = run.energy.measured_j or 0.0
    assert measured_in_run + ledger.warmup_j == pytest.approx(by_class["iterations"], rel=1e-9, abs=1e-6)


def test_inference_throughput_uses_the_longest_generation_time():
    def generating(rank, window, tokens, seconds):
        return row(rank, window, generated_tokens=tokens, generation_s=seconds, prompt_tokens=25)

    windows = [
        [generating(0, 1, 600, 2.0), generating(1, 1, 400, 1.0)],
        [generating(0, 2, 500, 1.0), generating(1, 2, 500, 3.0)],
    ]

    totals = totals_of(windows, *gpus(2))

    # Rank 0 generates for 2 + 1 s, and at the same time rank 1 generates for 1 + 3 s.  The sum of each window's
    # largest time would be 2 + 3 s.
    assert (totals.counts.generated_tokens, totals.loop.generation_s, totals.counts.prompt_tokens) == (2000, 4.0, 100)
    assert metrics.table.it_tokens_per_sec(totals) == 500.0
    assert totals.counts.tokens == 4000, "what is generated is not what is trained on"


def sampled(values, peak):
    """Return the totals of a GPU whose utilization and memory (as a share of the peak) were sampled once a second."""
    count = len(values)
    integrals = Integrals(
        memory_byte_seconds=float(values.sum()) * peak,
        memory_covered_s=count,
        utilization_seconds=float(values.sum()),
        utilization_covered_s=count,
    )
    devices, members = gpus(1)
    rows = [row(0, busy_s=count, wait_s=0.0, devices=(device_window("GPU-0", wall=integrals, memory_peak_bytes=peak),))]
    account = Account()
    account.add_devices(merge_devices(Rows(rows), devices, members))
    return account.totals(JobConstants(gpus=1), sample_s=1.0)


def test_sampling_error_covers_the_true_mean_in_95_percent_of_runs():
    chance = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        busy = chance.uniform(0.1, 0.9)  # busy share of each period; samples are at random times
        totals = sampled((chance.random(100) < busy).astype(float), 8.0 * GIB)
        covered += abs(totals.devices.utilization_mean - busy) <= totals.devices.utilization_error
        assert totals.devices.memory_error_bytes == pytest.approx(8.0 * GIB * totals.devices.utilization_error)

    assert covered >= 0.93 * 400


def test_mean_memory_and_utilization_have_errors_in_the_summary():
    totals = sampled(np.array([0.0, 1.0] * 50), 8.0 * GIB)

    found = metrics.errors(totals, totals)
    # 1.96 sqrt(0.5 * 0.5 / 100)
    assert found["pcu_ratio"] == found["job/pcu_ratio"] == (pytest.approx(0.098), 0.0)
    assert found["amu_gb"] == (pytest.approx(8 * 0.098), 0.0)
    assert sampled(np.ones(100), 8.0 * GIB).devices.memory_error_bytes == 0.0
