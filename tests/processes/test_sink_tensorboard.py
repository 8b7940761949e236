"""The sink tensorboard: its event file, read with the readers of TensorBoard."""

from __future__ import annotations

import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from sink_examples import complete_totals, make_report, make_run, totals, with_keys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto import event_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG

from effllm import metrics
from effllm.metrics.output_names import chart_tag, has_chart
from effllm.records.job import SPREADS, STEP_SECONDS, Coverage, Spread
from effllm.sinks import SinkUnavailable, open_sink


def written(folder: Path, *reports, attempt=1):
    sink = open_sink("tensorboard", make_run(folder, attempt=attempt))
    for report in reports:
        sink.write(report)
    sink.close()
    return read(folder)


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def event_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("events.out.tfevents.*"))


def raw_events(folder: Path) -> list[event_pb2.Event]:
    return [
        event_pb2.Event.FromString(data)
        for file in event_files(folder)
        for data in RawEventFileLoader(str(file)).Load()
    ]


def points(accumulator: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in accumulator.Scalars(chart_tag(tag))]


def tags(*reports, folder: Path) -> set[str]:
    return set(written(folder, *reports).Tags()["scalars"])


def whole_report(iteration=100, **changes):
    whole = complete_totals()
    return make_report(iteration, run=whole, last=whole, job=whole, **changes)


def test_every_value_of_a_report_is_written_at_its_iteration(tmp_path):
    report = whole_report()
    back = written(tmp_path, report)

    charted = {tag: value for tag, value in report.values.items() if has_chart(tag)}
    for tag, value in charted.items():
        assert points(back, tag) == [(100, pytest.approx(value, rel=1e-6))]
    assert {metrics.metric_of_tag(tag).name for tag in charted} == {
        entry.name for entry in metrics.METRICS.values() if entry.chart
    }
    assert back.Scalars("efficientllm/amu_gb")[0].wall_time == report.time_s


CONTRACT = {
    "efficientllm/amu_gb", "efficientllm/pcu_ratio", "efficientllm/al_seconds", "efficientllm/aec_watts",
    "efficientllm/tt_tokens_per_param_per_sec", "efficientllm/st_samples_per_param_per_sec",
}  # fmt: skip
SECOND_UNITS = {"efficientllm-energy/total_wh", "efficientllm-energy/joules_per_10k_tokens"}


def test_six_tags_of_the_metrics_contract_are_written_and_no_second_unit(tmp_path):
    found = tags(whole_report(), folder=tmp_path)

    assert found >= CONTRACT
    assert "efficientllm-energy/total_joules" in found and not SECOND_UNITS & found


def test_charts_of_health_and_of_the_spread_of_ranks_are_drawn(tmp_path):
    spread = {
        "step_seconds": Spread(8, 0.5, 0.5, 0.625, 0.75, 1.0),
        "gpu_watts": Spread(8, 100.0, 110.0, 400.0, 512.0, 600.0),
        "utilization_ratio": Spread(8, 0.0, 0.25, 0.75, 1.0, 1.0),
    }
    coverage = Coverage(8, 6, 8, 5, 4, 3, (1, 2), energy=0.625)
    back = written(tmp_path, make_report(coverage=coverage, simulated=True, spread=spread))

    expected = {
        "health/ranks_reporting": 6, "health/gpus_measured": 5, "health/reports_lost": 4, "health/reports_late": 3,
        "health/energy_coverage_ratio": 0.625, "health/simulated": 1, "health/p5_utilization_ratio": 0.25,
        "straggler/p95_step_seconds": 0.75, "straggler/worst_rank": 17,
        "straggler/worst_rank_slowdown_ratio": 4.2 / 4.04,
    }  # fmt: skip
    assert {tag: points(back, tag) for tag in expected} == {
        tag: [(100, pytest.approx(value))] for tag, value in expected.items()
    }


def test_tags_are_the_same_for_10000_and_for_8_ranks(tmp_path):
    coverage = Coverage(10_000, 6_666, 10_000, 6_666, 9, 9, tuple(range(0, 10_000, 3)), 0.6, 0.6, 0.6)
    common = {"simulated": True, "spread": dict.fromkeys(SPREADS, Spread(10_000, 0.0, 0.1, 0.2, 0.3, 0.4))}
    few = tags(whole_report(**common), folder=tmp_path / "few")

    assert len(few) > 40
    assert tags(whole_report(coverage=coverage, **common), folder=tmp_path / "many") == few


def test_first_groups_are_what_most_people_look_for_and_the_contract(tmp_path):
    spread = {STEP_SECONDS: Spread(8, 0.1, 0.2, 0.5, 0.75, 0.9)}
    found = sorted(tags(whole_report(simulated=True, spread=spread), folder=tmp_path))

    groups = sorted({tag.split("/")[0] for tag in found})  # TensorBoard compares characters, too
    assert groups[:2] == ["EffLLM", "efficientllm"]
    assert [tag.removeprefix("EffLLM/") for tag in found if tag.startswith("EffLLM/")] == [
        "data_wait", "joules_per_token", "loss", "mfu", "step_p50_seconds", "step_p95_seconds",
        "tokens_per_second_per_gpu", "watts_per_gpu",
    ]  # fmt: skip
    assert len([tag for tag in found if tag.endswith("/amu_gb")]) == 1, "no third copy of the contract's metrics"
    assert len(found) <= 60


def described(folder: Path) -> dict[str, str]:
    """Return the metadata of the first value of each tag."""
    values = [value for event in raw_events(folder) for value in event.summary.value]
    return {one.tag: one.metadata for one in values if one.metadata.plugin_data.plugin_name == "scalars"}


def test_first_value_of_a_tag_is_written_with_help_and_unit(tmp_path):
    written(tmp_path, make_report(100, values={"amu_gb": 45.0}), make_report(110, values={"amu_gb": 45.0, "new": 1.0}))

    amu = described(tmp_path)["efficientllm/amu_gb"]
    assert amu.display_name == "efficientllm/amu_gb (GiB, run)"
    assert amu.summary_description == f"Run to date. {metrics.METRICS['amu_gb'].help}"
    assert "efficientllm/new" in described(tmp_path)


def test_every_chart_description_marks_a_simulated_run(tmp_path):
    written(tmp_path, make_report(simulated=True))

    texts = [one.summary_description for one in described(tmp_path).values()]
    assert len(texts) > 30
    assert all(text.startswith("**Simulated.**") for text in texts)


def test_values_that_are_not_finite_are_not_written(tmp_path):
    values = {"amu_gb": math.nan, "pcu_ratio": math.inf, "al_seconds": 1.5}

    assert CONTRACT & tags(make_report(values=values), folder=tmp_path) == {"efficientllm/al_seconds"}


def test_reports_without_values_write_nothing(tmp_path):
    assert tags(make_report(values={}, warming_up=True), folder=tmp_path) == set()
    assert len(raw_events(tmp_path)) == 1  # the file has only its header


def test_report_is_on_disk_when_write_returns(tmp_path):
    sink = open_sink("tensorboard", make_run(tmp_path))
    sink.write(make_report(100))

    assert len(points(read(tmp_path), "amu_gb")) == 1  # the file is read while the sink is still open
    sink.close()
    sink.close()


def layout(folder: Path) -> layout_pb2.Layout:
    values = [value for event in raw_events(folder) for value in event.summary.value]
    pages = [value.tensor.string_val[0] for value in values if value.tag == CONFIG_SUMMARY_TAG]
    return layout_pb2.Layout.FromString(pages[-1])


def test_every_tag_is_in_a_group_of_the_custom_scalars_page(tmp_path):
    found = tags(make_report(90, values={"amu_gb": 1.0}), whole_report(simulated=True), folder=tmp_path)
    page = layout(tmp_path)

    groups = ["energy", "throughput", "memory", "health", "goodput", "straggler"]
    assert [one.title for one in page.category] == ["at a glance", "efficiency: run to date", *groups]
    patterns = [tag for category in page.category for chart in category.chart for tag in chart.multiline.tag]
    assert [tag for tag in found if len([one for one in patterns if re.match(one, tag)]) != 1] == []
    first = page.category[1].chart[0]
    assert (first.title, len(first.multiline.tag)) == ("amu_gb (GiB)", 1)


def test_charts_without_values_are_not_on_the_custom_scalars_page(tmp_path):
    written(tmp_path, make_report(values={"amu_gb": 45.0}))

    titles = [chart.title for category in layout(tmp_path).category for chart in category.chart]
    assert "amu_gb (GiB)" in titles
    assert not [title for title in titles if title.startswith(("pcu_ratio", "joules"))]


def test_correction_is_written_at_the_newest_step(tmp_path):
    run = with_keys(totals(100), memory_mean_bytes=2**30)
    back = written(tmp_path, make_report(100), make_report(200), make_report(100, run=run, last=run, correction=True))

    steps = [step for step, _ in points(back, "amu_gb")]
    assert steps == [100, 200, 200]
    assert points(back, "amu_gb")[-1] == (200, 1.0)
    assert [step for step, _ in points(back, "throughput/mfu_ratio")] == [100, 200]


def test_attempt_from_an_earlier_iteration_replaces_later_points(tmp_path):
    written(tmp_path, make_report(100), make_report(200), make_report(300))
    back = written(tmp_path, make_report(210), make_report(220), attempt=2)

    assert [step for step, _ in points(back, "amu_gb")] == [100, 200, 210, 220]
    assert len(event_files(tmp_path)) == 2


def test_name_of_the_event_file_ends_with_efficientllm(tmp_path):
    written(tmp_path, make_report())

    (file,) = event_files(tmp_path)
    assert re.fullmatch(r"events\.out\.tfevents\.\d{10}\.\d{9}\..+\.efficientllm", file.name)


def test_later_points_are_readable_after_a_full_disk(tmp_path):
    sink = open_sink("tensorboard", make_run(tmp_path))
    sink.write(make_report(100))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (event_files(tmp_path)[0].stat().st_size + 100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            sink.write(make_report(110))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    sink.write(make_report(120))
    sink.close()

    assert [step for step, _ in points(read(tmp_path), "amu_gb")] == [100, 120]


def test_unwritable_folder_is_reported_with_advice(tmp_path):
    folder = tmp_path / "tensorboard"
    folder.write_text("a file")

    with pytest.raises(SinkUnavailable, match=r"tensorboard: File exists; set tensorboard:dir=FOLDER"):
        open_sink("tensorboard", make_run(folder))
    with pytest.raises(SinkUnavailable, match="set tensorboard:dir=FOLDER in EFFICIENTLLM_SINKS"):
        open_sink("tensorboard", make_run())


def test_installed_tensorflow_and_torch_are_not_imported(tmp_path):
    for name in ("tensorflow", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    script = (
        "import sys; from pathlib import Path; from sink_examples import *; from effllm.sinks import open_sink\n"
        f"sink = open_sink('tensorboard', make_run(Path({str(tmp_path)!r})))\n"
        "sink.write(make_report()); sink.close()\n"
        "print(sorted({'tensorflow', 'torch'} & set(sys.modules)))"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.stdout, done.stderr) == ("[]\n", "")


SCRIPT = """
import sys, time
import effllm

effllm.initialize_efficientllm_metrics(10, facts={"tensorboard_dir": sys.argv[1]} if len(sys.argv) > 1 else {})
collector = effllm.get_metrics_collector()
for iteration in range(4):
    collector.record_iteration_start()
    time.sleep(0.01)
    collector.record_iteration_end(8, 1)
effllm.finalize_efficientllm_metrics()
"""


@pytest.mark.parametrize(
    ("framework", "is_here", "sinks", "place"),
    [
        ("framework", True, None, "framework/efficientllm"),
        ("framework", False, None, "runs/mine"),  # the folder of another host
        ("framework", True, "tensorboard:dir={}/chosen", "chosen/mine"),
        (None, False, None, "runs/mine"),
    ],
    ids=["framework", "framework of another host", "setting", "default"],
)
def test_event_file_is_in_one_folder(launch, tmp_path, framework, is_here, sinks, place):
    (tmp_path / "loop.py").write_text(SCRIPT)
    if is_here:
        (tmp_path / framework).mkdir()
    arguments = [tmp_path / framework] if framework else []
    settings = {"sinks": sinks.format(tmp_path)} if sinks else {}
    launch.python(tmp_path / "loop.py", *arguments, log_interval=2, run_name="mine", **settings).done()

    (file,) = tmp_path.rglob("events.out.tfevents.*")
    assert file.parent == tmp_path / place
