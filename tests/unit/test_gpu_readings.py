"""Readings of the GPUs of a window: sums over the reports of all ranks."""

import pytest
from builders import device_window, gpu, hello, reports, row
from cases import cases

from effllm.config.settings import Config
from effllm.job.account import Rows
from effllm.job.aggregator import Aggregator
from effllm.job.merged import Expected, merge_devices
from effllm.job.open_windows import OpenWindow
from effllm.records.clock import Now
from effllm.records.rank import Gauge


def read(name, degrees, seconds=10.0, **changes):
    gauges = {"temperature_c": Gauge(degrees * seconds, seconds, degrees - 1.0, degrees + 1.0)}
    known = {"gauges": gauges, "power_histogram_s": {int(degrees): seconds}, "power_peak_w": 2.0 * degrees}
    return device_window(name, **{**known, **changes})


def readings_of(rows, *devices):
    known = Expected({device.key: device for device in devices})
    members = {key: {rank} for rank, key in enumerate(known)}
    return merge_devices(Rows.in_rank_order({one.rank: one for one in rows}), known, members).gpus


def test_gauges_have_sums_and_maxima_over_gpus():
    rows = [row(1, devices=(read("GPU-1", 70.0),)), row(0, devices=(read("GPU-0", 50.0, 5.0),))]

    readings = readings_of(rows, gpu("GPU-0"), gpu("GPU-1"))

    heat = readings.gauges["temperature_c"]
    assert (heat.value_seconds, heat.covered_s, heat.most) == (950.0, 15.0, 71.0)
    assert heat.mean == pytest.approx(63.333, abs=1e-3)
    assert readings.power_histogram_s == {70: 10.0, 50: 5.0}
    assert readings.power_peak_w == 140.0


def test_throttled_seconds_add_up_and_unknown_gauges_are_ignored():
    throttled = read("GPU-0", 50.0, throttled_s={"any": 2.0, "power_cap": 2.0}, throttle_covered_s=10.0)
    strange = read("GPU-1", 60.0, gauges={"no_such_gauge": Gauge(1.0, 1.0, 1.0, 1.0)}, throttle_covered_s=4.0)

    rows = [row(0, devices=(throttled,)), row(1, devices=(strange,))]
    readings = readings_of(rows, gpu("GPU-0"), gpu("GPU-1"))

    assert (readings.throttled_s, readings.throttle_covered_s) == (2.0, 14.0)
    assert list(readings.gauges) == ["temperature_c"]
    assert readings.gauges["temperature_c"].covered_s == 10.0


@cases(
    ("why", "rows", "devices"),
    [
        ("each has one GPU", [("GPU-0",), ("GPU-1",)], [gpu("GPU-0"), gpu("GPU-1")]),
        ("one is no GPU", [("GPU-0",), ("host",)], [gpu("GPU-0"), gpu("host", is_gpu=False)]),
        ("one is not known", [("GPU-0",), ("GPU-9",)], [gpu("GPU-0")]),
        ("two sit on one", [("GPU-0",), ("GPU-0",)], [gpu("GPU-0")]),
        ("one has two", [("GPU-0", "GPU-1"), ("GPU-2",)], [gpu("GPU-0"), gpu("GPU-1"), gpu("GPU-2")]),
        ("one has no device", [("GPU-0", "GPU-1"), ()], [gpu("GPU-0"), gpu("GPU-1")]),
        ("shares of one", [("GPU-0",), ("GPU-1",)], [gpu("GPU-0", shared=True), gpu("GPU-1")]),
    ],
)
def test_gauges_count_each_gpu_once(why, rows, devices):
    rows = [row(rank, devices=tuple(read(key, 50.0 + rank) for key in keys)) for rank, keys in enumerate(rows)]

    readings = readings_of(rows, *devices)

    gpus = {device.key for device in devices if device.is_gpu}
    assert readings.gauges["temperature_c"].covered_s == 10.0 * len(gpus), why


def test_sums_at_the_receipt_of_reports_equal_sums_at_the_close_of_the_window():
    throttled = {"throttled_s": {"any": 2.0, "power_cap": 1.0}, "throttle_covered_s": 8.0}
    changes = [{}, throttled, {"gauges": {}}, {"power_peak_w": None}, {**throttled, "throttled_s": {"any": 4.0}}]
    rows = {
        rank: row(rank, devices=(read(f"GPU-{rank}", 40.0 + 8 * rank, **change),))
        for rank, change in enumerate(changes)
    }
    opened = OpenWindow(1, 0.0)
    for rank in (3, 0, 4, 1, 2):
        opened.rows[rank] = rows[rank]
        opened.add_readings(rows[rank])
    devices = Expected({name: gpu(name) for name in (f"GPU-{rank}" for rank in rows)})
    in_order, members = Rows.in_rank_order(rows), {f"GPU-{rank}": {rank} for rank in rows}

    at_receipt = merge_devices(in_order, devices, members, opened.whole_readings)

    assert at_receipt.gpus is opened.whole_readings
    assert at_receipt.gpus == merge_devices(in_order, devices, members).gpus


def test_second_report_of_a_rank_in_a_window_replaces_the_first():
    aggregator = Aggregator(Config(), "job", 1, 0.0)
    for rank in range(2):
        assert aggregator.hello(hello(rank, 2), Now(0.0, 0.0)) == ""
    for sequence in (1, 2):
        again = row(0, 1, sequence=sequence, devices=(read("GPU-0", 40.0 + 10.0 * sequence),))
        aggregator.reports(reports(again), Now(1.0, 1.0))
    aggregator.reports(reports(row(1, 1, devices=(read("GPU-1", 55.0),))), Now(1.0, 1.0))

    (closed,) = aggregator.closed_windows.take_windows()

    assert closed.report.last.devices.temperature_max_c == 61.0
    assert closed.report.last.devices.power_histogram_s == {60: 10.0, 55: 10.0}
