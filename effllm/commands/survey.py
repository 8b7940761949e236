"""The tests of ``effllm check``: measurable metrics on this machine, their sources and their cost."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from effllm.commands import survey_gpus, survey_host
from effllm.commands.survey_gpus import GpuState
from effllm.commands.survey_host import BROKEN, MISSING, OK, Finding
from effllm.config.settings import VARIABLES, Config, cache_folder, read_config
from effllm.config.switches import PREFIX
from effllm.devices import DeviceUnavailable, Reader, Site, open_device
from effllm.devices import node as node_power
from effllm.devices._nvml_identity import text_of
from effllm.devices.known.hardware import Hardware, find_by_driver_name, why_no_peak
from effllm.job.energy_account import Scope, common_scopes
from effllm.job.job_facts import peak_of
from effllm.metrics import METRICS
from effllm.metrics.measurable import FROM_LOOP, FROM_SETTINGS, OWN, READ, InputSource, Measurable, measurable
from effllm.records.rank import AVERAGE, COUNTER, INSTANT, Device, Sample
from effllm.sensor_profile import SensorSummary, measured_or_cached_sensor
from effllm.trainer.preflight import without_wrong_values

NUM_READS, READS_APART_S = 15, 0.02


class Cost(Struct, frozen=True):
    """The cost of measuring on this machine."""

    read_ms: float | None = None  # median of a device read
    core_share: float | None = None  # share of a core for device reads at the configured interval
    interval_s: float | None = None


class DeviceSurvey(NamedTuple):
    """The results of the tests of the device."""

    sources: dict[str, InputSource]  # by input of metrics, such as energy
    finding: Finding
    cost: Cost
    device: Device | None = None
    sensor: SensorSummary | None = None


class Survey(Struct, frozen=True):
    """The results of all tests."""

    measured: bool  # whether a run would be measured
    device: Device | None
    metrics: list[Measurable]
    findings: list[Finding]
    cost: Cost
    sensor: SensorSummary | None = None  # calibration of the GPU's sensor
    hardware: Hardware | None = None  # the row of the hardware table for the GPU
    gpus: list[GpuState] = []  # all GPUs of this machine


def survey(environ: Mapping[str, str], device: str, *, has_load: bool) -> Survey:
    """Run all tests; ``device`` replaces the configured device if it is not empty."""
    findings = [*survey_host.python_findings(), *survey_host.setting_findings(environ)]
    config = read_config(without_wrong_values({**environ, f"{PREFIX}DEVICE": device} if device else environ))
    sources, finding, cost, own_device, sensor = _survey_device(config, environ)
    meters, meter_findings = _survey_node_power(config, own_device)
    own_devices = [own_device] if own_device else []
    scope = next(iter(common_scopes([[*own_devices, *meters]])), Scope())  # the widest, or empty without energy
    if scope.label and meters:
        sources["energy"] = InputSource(by=" and ".join(_meter_text(row) for row in meters if row.key in scope.keys))
    sources |= {need: InputSource(by=f"your loop: {need}") for need in FROM_LOOP}
    sources |= {need: InputSource(by=f"effllm: {need}") for need in OWN}
    sources |= {need: _setting_source(config, need) for need in FROM_SETTINGS}
    sources["peak"] = _peak_source(config, own_device)
    gpus = survey_gpus.read_states()
    if has_load:
        survey_gpus.measure_under_load(gpus)
    findings += [finding, _driver_finding(), *survey_gpus.findings(gpus), *meter_findings]
    if scope.label:
        findings.append(Finding("power scope", OK, scope.label))
    findings += [*survey_host.sink_findings(config), survey_host.run_folder_finding(config)]
    findings += [*survey_host.aggregator_findings(config), survey_host.security_finding(config)]
    return Survey(
        measured=all(finding.state != BROKEN for finding in findings),
        device=own_device,
        metrics=[measurable(name, sources) for name in METRICS],
        findings=findings,
        cost=cost,
        sensor=sensor,
        hardware=find_by_driver_name(own_device.name) if own_device and own_device.is_gpu else None,
        gpus=gpus,
    )


def _survey_device(config: Config, environ: Mapping[str, str]) -> DeviceSurvey:
    site = Site(
        trainer_pid=os.getpid(),
        host=platform.node(),
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
        rocr_visible_devices=environ.get("ROCR_VISIBLE_DEVICES"),
        hip_visible_devices=environ.get("HIP_VISIBLE_DEVICES"),
    )
    try:
        reader = open_device(config.device, site)
    except DeviceUnavailable as error:
        advice = f"or set {PREFIX}DEVICE=auto to sample any available device"
        sources = dict.fromkeys(READ, InputSource(why_not="no device, see above"))
        finding = Finding("device", BROKEN, f"{config.device}: {error}", advice)
        return DeviceSurvey(sources, finding, Cost(interval_s=config.collection_interval_s))
    samples, failures, wall_s, cpu_s = _read_repeatedly(reader)
    sensor = measured_or_cached_sensor(reader, cache_folder() / "calibration")
    reader.close()
    device = reader.device
    simulated = ", SIMULATED: no hardware is measured" if device.simulated else ""
    no_gpu = "".join(f"; no {sentence}" for sentence in device.not_measured if sentence.startswith("GPU: "))
    finding = Finding("device", OK, f"{device.kind}: {device.name}, {device.key}{simulated}{no_gpu}")
    cost = Cost(1e3 * statistics.median(wall_s), cpu_s / config.collection_interval_s, config.collection_interval_s)
    return DeviceSurvey(_sources_by_need(device, samples, failures), finding, cost, device, sensor)


def _read_repeatedly(reader: Reader) -> tuple[list[Sample], dict[str, str], list[float], float]:
    """Return samples, reasons of failures, elapsed seconds of each read, and mean CPU seconds per read."""
    wall_s, samples = [], []
    failures: dict[str, str] = {}
    start_cpu_s = time.thread_time()
    for _ in range(NUM_READS):
        start_s = time.perf_counter()
        sample, new_failures = reader.read()
        wall_s.append(time.perf_counter() - start_s)
        samples.append(sample)
        failures |= new_failures
        time.sleep(READS_APART_S)
    return samples, failures, wall_s, (time.thread_time() - start_cpu_s) / NUM_READS


def _sources_by_need(device: Device, samples: list[Sample], failures: Mapping[str, str]) -> dict[str, InputSource]:
    """Return the source of each input in `READ`, from samples and the reasons of failed reads."""
    missing = [sentence.partition(": ")[::2] for sentence in device.not_measured]

    def of_fields(quantity: str, by: str, *fields: str) -> InputSource:
        if any(getattr(sample, field) is not None for sample in samples for field in fields):
            return InputSource(by=f"{device.kind}: {by}")
        reasons = [why for name, why in missing if name == quantity] + [failures[f] for f in fields if f in failures]
        return InputSource(why_not=f"{quantity}: {reasons[0] if reasons else f'not reported by device {device.kind}'}")

    def of_gauge(quantity: str, by: str, why_not: str, *names: str) -> InputSource:
        if any(name in sample.gauges for sample in samples for name in names):
            return InputSource(by=f"{device.kind}: {by}")
        return InputSource(why_not=f"{quantity}: {failures.get('gauges', why_not)}")

    def of_fact(is_reported: bool, by: str, why_not: str) -> InputSource:
        return InputSource(by=f"{device.kind}: {by}") if is_reported else InputSource(why_not=why_not)

    limit, has_reasons = device.power_limit_w, any(sample.throttled_by is not None for sample in samples)
    unreported = f"not reported by device {device.kind}"
    no_gpm = f"{unreported}; NVIDIA GPUs report their activity through GPM, from Hopper on"
    return {
        "gpu": InputSource(by="") if device.is_gpu else InputSource(why_not=f"gpu: device {device.kind} is not a GPU"),
        "memory": of_fields("memory", "memory in use", "memory_bytes"),
        "utilization": of_fields("utilization", "share of time in which the device was busy", "utilization"),
        "energy": of_fields("energy", _method_text(device), "energy_j", "power_w", "power_average_w"),
        "power": of_fields("power", "power readings", "power_w"),
        "power limit": of_fact(bool(limit), f"power limit of {limit or 0:g} W", f"limit: {unreported}"),
        "throttling": of_fact(has_reasons, "reasons for lower clocks", f"throttling: {unreported}"),
        "temperature": of_gauge("temperature", "temperature", unreported, "temperature_c"),
        "clocks": of_gauge("clocks", "clocks", unreported, "sm_clock_hz"),
        "activity": of_gauge("activity", "GPM", no_gpm, "sm_activity_ratio"),
    }


def _method_text(device: Device) -> str:
    ways = {COUNTER: "energy counter", INSTANT: "power readings, integrated", AVERAGE: "mean power, integrated"}
    scope = f" ({device.power_scope})" if device.power_scope else ""
    return ways.get(device.energy_method or "", "energy") + scope


def _meter_text(device: Device) -> str:
    return f"{device.kind}: {_method_text(device)}"


def _survey_node_power(config: Config, own: Device | None) -> tuple[list[Device], list[Finding]]:
    """Read each meter of the node once, as the agent of local rank 0 does; return those that work, and findings."""
    if own is not None and own.simulated:
        return [], []
    devices, findings = [], []
    credentials = Path(config.node_power_credentials) if config.node_power_credentials else None
    for opener in node_power.openers(config.node_power, platform.node(), credentials):
        if opener.name == "cpu" and own is not None and own.kind == "host":
            continue  # the host device already reads the power of the CPUs
        name = {"cpu": "CPU power", "psu": "node power"}.get(opener.name, opener.name)
        try:
            reader = opener.open()
        except DeviceUnavailable as error:
            findings.append(Finding(name, MISSING, str(error).removeprefix("energy: ").removeprefix("node power: ")))
            continue
        _, failed = reader.read()
        reader.close()
        if failed:
            findings.append(Finding(name, MISSING, "; ".join(failed.values())))
            continue
        devices.append(reader.device)
        note = f": {reader.device.energy_note}" if reader.device.energy_note else ""
        findings.append(Finding(name, OK, f"{_meter_text(reader.device)}, {reader.device.name}{note}"))
    return devices, findings


def _setting_source(config: Config, need: str) -> InputSource:
    variable, meaning = FROM_SETTINGS[need]
    value = getattr(config, next(row.field for row in VARIABLES if row.name == variable))
    if value is None or (need in ("baseline", "profile") and not value):  # 0 switches these off
        return InputSource(why_not=f"{need}: set {PREFIX}{variable} to {meaning}")
    return InputSource(by=f"{PREFIX}{variable}={value:g}")


def _peak_source(config: Config, device: Device | None) -> InputSource:
    if config.peak_tflops:
        return InputSource(by=f"{PREFIX}PEAK_TFLOPS={config.peak_tflops:g}")
    peak = peak_of(device.name) if device and device.is_gpu else None
    if peak:
        return InputSource(by=f"peak: {peak.text}")
    unknown = f"{why_no_peak(device.name)}; " if device and device.is_gpu else ""
    return InputSource(why_not=f"peak: {unknown}set {PREFIX}PEAK_TFLOPS to the peak TFLOP/s of one device")


def _driver_finding() -> Finding:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        reason = f"no NVIDIA driver answers ({error})"
        return Finding("driver", MISSING, reason, "without a GPU, the host is sampled")
    try:
        driver, library = map(text_of, (pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetNVMLVersion()))
        return Finding("driver", OK, f"NVIDIA {driver}, NVML {library}")
    except pynvml.NVMLError as error:
        return Finding("driver", BROKEN, f"NVML fails: {error}", "run nvidia-smi for details; reload the driver")
    finally:
        pynvml.nvmlShutdown()
