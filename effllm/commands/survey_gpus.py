"""The GPUs of this machine for ``effllm check``: clocks, limits, links and errors against each other, and under load.

NVML is read without a CUDA context.  Nothing here was measured on a GPU.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pynvml
from msgspec import Struct

from effllm.agent.series import FAULTLESS
from effllm.commands.survey_host import DIFFERS, MISSING, OK, Finding
from effllm.devices._nvml_chip import throttle_reasons
from effllm.devices._nvml_identity import text_of
from effllm.sensor_profile.load import LoadUnavailable, TorchLoad

LOAD_S, SETTLED_S = 5.0, 3.0  # of the load, and the time after which the clocks under load are read
MIN_RATE = 0.95  # a smaller share of the best peer's rate is a difference
#: A link repeats a transfer now and then: a difference is more than these, and ten times the errors of any peer.
MANY_ERRORS, MANY_TIMES = 100, 10
NVLINKS = 18  # of a GPU


class GpuState(Struct):
    """One GPU; ``None`` means that NVML does not report the value."""

    index: int
    name: str = ""
    uuid: str = ""
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    throttled_by: tuple[str, ...] = ()
    temperature_c: int | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    ecc_uncorrected: int | None = None  # since the start of the driver
    pcie_generation: int | None = None  # lower while the GPU is idle
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks: int | None = None  # active links
    nvlink_errors: int | None = None  # of all links, since the start of the driver
    processes: tuple[str, ...] = ()  # that use the GPU
    flops_per_second: float | None = None  # of the matrix product with --load
    copy_bytes_per_second: float | None = None  # from the memory of the host
    load: str = ""  # what the load computed, or why the GPU was not loaded


_RESEAT = "reseat the GPU, and look at the slot and the riser"
#: Values that are equal on all GPUs of one model: field, what it is, unit, and the advice for a difference.
_EQUAL_FIELDS = (
    ("sm_clock_max_mhz", "maximum SM clock", " MHz", "reset its clocks: nvidia-smi -rgc"),
    ("power_limit_w", "power limit", " W", "set it to the default: nvidia-smi -pl"),
    ("pcie_generation_max", "PCIe generation", "", "look at the slot and the riser"),
    ("pcie_width", "PCIe lanes", "", _RESEAT),
    ("nvlinks", "active NVLinks", "", "look at nvidia-smi nvlink -s, and at the fabric manager"),
)


def read_states() -> list[GpuState]:
    """Return the state of each GPU; empty without a driver."""
    with suppress(pynvml.NVMLError), _open_nvml():
        return [_read_state(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return []


@contextmanager
def _open_nvml() -> Iterator[None]:
    """Use NVML; an error is raised without a driver."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _read_state(index: int) -> GpuState:
    state = GpuState(index)
    with suppress(pynvml.NVMLError):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        state.uuid, state.name = text_of(pynvml.nvmlDeviceGetUUID(gpu)), text_of(pynvml.nvmlDeviceGetName(gpu))
        _update_state(state)
    return state


def _update_state(state: GpuState) -> None:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(state.index)
    state.sm_clock_mhz = _query(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM)
    state.sm_clock_max_mhz = _query(pynvml.nvmlDeviceGetMaxClockInfo, gpu, pynvml.NVML_CLOCK_SM)
    state.throttled_by = throttle_reasons(_query(pynvml.nvmlDeviceGetCurrentClocksEventReasons, gpu) or 0)
    state.temperature_c = _query(pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU)
    queries = pynvml.nvmlDeviceGetEnforcedPowerLimit, pynvml.nvmlDeviceGetPowerManagementDefaultLimit
    limits_mw = (_query(query, gpu) for query in queries)
    state.power_limit_w, state.power_limit_default_w = (None if mw is None else mw / 1e3 for mw in limits_mw)
    errors = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    state.ecc_uncorrected = _query(pynvml.nvmlDeviceGetTotalEccErrors, gpu, *errors)
    state.pcie_generation = _query(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, gpu)
    state.pcie_generation_max = _query(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, gpu)
    state.pcie_width = _query(pynvml.nvmlDeviceGetCurrPcieLinkWidth, gpu)
    state.pcie_width_max = _query(pynvml.nvmlDeviceGetMaxPcieLinkWidth, gpu)
    active = [link for link in range(NVLINKS) if _query(pynvml.nvmlDeviceGetNvLinkState, gpu, link)]
    counters = (pynvml.NVML_NVLINK_ERROR_DL_REPLAY, pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,
                pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT)  # fmt: skip
    counts = [_query(pynvml.nvmlDeviceGetNvLinkErrorCounter, gpu, link, kind) for link in active for kind in counters]
    measured = [count for count in counts if count is not None]
    state.nvlinks, state.nvlink_errors = len(active) or None, sum(measured) if measured else None
    processes = _query(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu) or ()
    state.processes = tuple(_process_text(process.pid) for process in processes)


def _query(query: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer of a function of NVML; ``None`` for an error, as of a quantity that the GPU does not have."""
    try:
        return query(*arguments)
    except (pynvml.NVMLError, UnicodeDecodeError):
        return None


def _process_text(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} ({pid})"
    except psutil.Error:  # of another user or container
        return f"process {pid}"


def measure_under_load(gpus: Sequence[GpuState]) -> None:
    """Put each GPU under load, one after the other, and add its rates and its state under load.

    A GPU that a process uses is left out.
    """
    for gpu in gpus:
        if gpu.processes:
            gpu.load = f"not loaded: {', '.join(gpu.processes)} uses it"
            continue
        print(f"GPU {gpu.index}: matrix products and copies, {LOAD_S:g} s", file=sys.stderr)
        child = TorchLoad(gpu.uuid)
        try:
            child.opened()
            gpu.load = child.name
            child.start_rates(LOAD_S)
            is_state_read, settled_monotonic_s = False, time.monotonic() + SETTLED_S
            while (rates := child.take_rates()) is None:
                time.sleep(0.05)
                if not is_state_read and time.monotonic() > settled_monotonic_s:
                    is_state_read = True
                    with suppress(pynvml.NVMLError), _open_nvml():
                        _update_state(gpu)
            gpu.flops_per_second, gpu.copy_bytes_per_second = rates
        except LoadUnavailable as error:
            gpu.load = f"not loaded: {error}"
        finally:
            child.close()


def findings(gpus: Sequence[GpuState]) -> Iterator[Finding]:
    """Yield a line for each GPU, with what is wrong, or differs from its peers: GPUs of the same model."""
    for gpu in gpus:
        name = f"GPU {gpu.index}"
        if not gpu.uuid:
            yield Finding(name, MISSING, "cannot be read", "run nvidia-smi for details")
            continue
        peers = [peer for peer in gpus if peer.name == gpu.name and peer is not gpu]
        wrong = list(_faults_with_advice(gpu, peers))
        text = ", ".join([gpu.name, gpu.uuid, *_shown_facts(gpu)])
        if wrong:
            text += f": {'; '.join(fault for fault, _ in wrong)}"
        yield Finding(name, DIFFERS if wrong else OK, text, "; ".join(dict.fromkeys(advice for _, advice in wrong)))


def _shown_facts(gpu: GpuState) -> Iterator[str]:
    if gpu.sm_clock_mhz is not None and gpu.sm_clock_max_mhz is not None:
        yield f"{gpu.sm_clock_mhz:,} of {gpu.sm_clock_max_mhz:,} MHz"
    if gpu.temperature_c is not None:
        yield f"{gpu.temperature_c} °C"
    if gpu.power_limit_w is not None:
        default = f" of {gpu.power_limit_default_w:g}" if gpu.power_limit_default_w is not None else ""
        yield f"limit {gpu.power_limit_w:g}{default} W"
    if gpu.pcie_width is not None:
        yield f"PCIe {gpu.pcie_generation or gpu.pcie_generation_max or '?'} x{gpu.pcie_width}"
    if gpu.nvlinks is not None:
        errors = f" with {gpu.nvlink_errors:,} errors" if gpu.nvlink_errors else ""
        yield f"{gpu.nvlinks} NVLinks{errors}"
    if gpu.ecc_uncorrected is not None:
        yield f"{gpu.ecc_uncorrected:,} ECC errors"
    if gpu.flops_per_second is not None:
        yield f"{gpu.flops_per_second / 1e12:.4g} TFLOP/s"
    if gpu.copy_bytes_per_second is not None:
        yield f"copy {gpu.copy_bytes_per_second / 1e9:.3g} GB/s"
    if gpu.load:
        yield gpu.load


def _faults_with_advice(gpu: GpuState, peers: Sequence[GpuState]) -> Iterator[tuple[str, str]]:
    """Yield each fault of a GPU, or difference to its peers, and the advice for it."""
    if reasons := [reason for reason in gpu.throttled_by if reason not in FAULTLESS]:
        names = ", ".join(reasons).replace("_", " ")
        yield f"its clock is lowered ({names})", "check its cooling and its power supply"
    if gpu.ecc_uncorrected:
        yield "uncorrected memory errors", "drain the host, and reset the GPU"
    of_peers = max((peer.nvlink_errors or 0 for peer in peers), default=0)
    if (gpu.nvlink_errors or 0) > MANY_TIMES * of_peers + MANY_ERRORS:
        yield "many more errors of its NVLinks than its peers have", "look at nvidia-smi nvlink -e, and reset the GPU"
    if gpu.pcie_width is not None and gpu.pcie_width < (gpu.pcie_width_max or 0):
        yield f"{gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes", _RESEAT
    if gpu.power_limit_w is not None and gpu.power_limit_w < (gpu.power_limit_default_w or 0.0):
        yield "power limit below its default", "set it to the default: nvidia-smi -pl"
    for field, what, unit, advice in _EQUAL_FIELDS:
        values = Counter(value for device in (gpu, *peers) if (value := getattr(device, field)) is not None)
        own = getattr(gpu, field)
        if own is not None and values and values[own] < max(values.values()):
            usually = max(values, key=values.__getitem__)
            yield f"{what} {own:g}{unit}, of its peers {usually:g}{unit}", advice
    for field, what in (("flops_per_second", "matrix products"), ("copy_bytes_per_second", "copies")):
        rates = [rate for peer in peers if (rate := getattr(peer, field)) is not None]
        own = getattr(gpu, field)
        if own is not None and rates and own < MIN_RATE * max(rates):
            yield f"{what} at {100 * own / max(rates):.0f} % of its fastest peer", "exclude the host from large jobs"
