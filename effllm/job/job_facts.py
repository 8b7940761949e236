"""Facts of the job from the HELLOs of all ranks: parameters, peak, power, scope of energy, gaps. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache, cached_property
from typing import Any, NamedTuple

from effllm.config.settings import Config
from effllm.devices.known import hardware
from effllm.devices.known.hardware import peak_clock_hz
from effllm.energy.sensor_timing import is_measured_share_unknown
from effllm.job.audit import KnownJob
from effllm.job.energy_account import Node, Scope, common_scopes, keep_scope
from effllm.job.ledger import Ledger
from effllm.records.job import JobConstants
from effllm.records.plain_text import one_line
from effllm.records.rank import METHODS, Device
from effllm.records.wire import Hello

MAX_NAMED = 4  # maximum number of nodes or of ranks in a text


class NodeGpus(NamedTuple):
    """The GPUs of a node that a scheduler states as allocated, and those that its ranks use."""

    host: str
    stated: int
    used: int
    source: str  # the scheduler's variable that states the number

    @property
    def unused(self) -> int:
        return max(self.stated - self.used, 0)

    @property
    def text(self) -> str:
        return f"host {self.host}: {self.stated} GPUs are allocated ({self.source}), and its ranks use {self.used}"


class JobFacts:
    """Facts of the whole job, each computed once; after a new HELLO or a change of scope a new object is made."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        hellos: Mapping[int, Hello],
        devices: Mapping[str, Device],
        members: Mapping[str, Collection[int]],
        whole_model_rank: int | None,
    ) -> None:
        self._config, self._ledger = config, ledger
        self._hellos, self._devices, self._members = hellos, devices, members  # see `Roster`
        self._whole_model_rank = whole_model_rank  # which declared the parameters of the whole model

    @cached_property
    def parameters(self) -> int | None:
        """Parameter count of the configured kind: of the whole model if declared, else the sum of all ranks' shares."""
        kind = self._config.parameters
        if self._whole_model_rank is not None:
            value = getattr(self._hellos[self._whole_model_rank].parameters, kind)
            return int(value) if value is not None else None
        counts = [hello.parameters for hello in self._hellos.values()]
        shares = [getattr(count, kind) for count in counts if count.is_share]
        if len(shares) != self._ledger.world_size or not shares or None in shares:
            return None
        return sum(shares) or None

    @cached_property
    def _gpus(self) -> list[Device]:
        return [device for device in self._devices.values() if device.is_gpu]

    @property
    def num_gpus(self) -> int:
        return len(self._gpus)

    @cached_property
    def shared_gpu(self) -> str:
        """A sentence about a GPU that several ranks use, although nothing says that they share it; or empty."""
        for key, device in self._devices.items():
            ranks = sorted(self._members[key])
            if device.is_gpu and len(ranks) > 1 and not all(self._hellos[rank].shares_gpu for rank in ranks):
                named = ", ".join(map(str, ranks[:MAX_NAMED])) + (" and more" if len(ranks) > MAX_NAMED else "")
                return (
                    f"ranks {named} use the same GPU ({key} on {self._hellos[ranks[0]].host}), so values per GPU are "
                    "withheld: call torch.cuda.set_device(local_rank) before the model is moved; if it is shared on "
                    "purpose, let each rank see only this GPU (CUDA_VISIBLE_DEVICES), or use MPS"
                )
        return ""

    @cached_property
    def node_gpus(self) -> list[NodeGpus]:
        """The GPUs of each node; empty until all ranks have joined, and if a rank states no number of GPUs.

        The only process of a node may use several GPUs (DataParallel, device_map), while its agent measures one. Then
        nothing is stated.
        """
        nodes: dict[str, list[Hello]] = {}
        for hello in self._hellos.values():
            nodes.setdefault(hello.host, []).append(hello)
            if not hello.stated_gpus:
                return []
        if len(self._hellos) < max(self._ledger.world_size, 1):
            return []
        gpus = []
        for host, hellos in nodes.items():
            lowest = min(hellos, key=lambda hello: hello.stated_gpus)  # a scheduler's step may have a part of the node
            keys = {device.key for hello in hellos for device in hello.devices if device.is_gpu}
            if len(hellos) == len(keys) == 1 < lowest.stated_gpus:
                return []
            # Ranks that have not selected their GPU all show the first GPU.
            gpus.append(NodeGpus(host, lowest.stated_gpus, max(len(keys), len(hellos)), lowest.gpus_source))
        return gpus

    @cached_property
    def unused_text(self) -> str:
        """A sentence about the nodes with unused GPUs; empty without such a node."""
        texts = [node.text for node in self.node_gpus if node.unused]
        more = f"; and {len(texts) - MAX_NAMED:,} more hosts" if len(texts) > MAX_NAMED else ""
        return "; ".join(texts[:MAX_NAMED]) + more

    @cached_property
    def peak_flops_per_s(self) -> float | None:
        """Peak FLOP/s of the job: as configured per device, or from the hardware table if the table has all GPUs."""
        peak = self._config.peak_tflops
        if peak:
            return peak * 1e12 * (self.num_gpus or self._ledger.world_size)
        peaks = [peak_of(device.name) for device in self._gpus]
        flops = [peak.flops_per_s for peak in peaks if peak]
        return sum(flops) if flops and len(flops) == len(peaks) else None

    @cached_property
    def peak_source(self) -> str:
        """The peak FLOP/s of the devices and their source, as text; empty without a peak."""
        if self.peak_flops_per_s is None:
            return ""
        if self._config.peak_tflops:
            return f"{self._config.peak_tflops:g} TFLOP/s per device, as configured"
        peaks = {peak_of(device.name) for device in self._gpus}
        return "; ".join(sorted(peak.text for peak in peaks if peak))

    @cached_property
    def constants(self) -> JobConstants:
        config, shared = self._config, bool(self.shared_gpu)
        return JobConstants(
            parameters=self.parameters,
            gpus=self.num_gpus,
            world_size=self._ledger.world_size,
            peak_flops_per_s=None if shared else self.peak_flops_per_s,
            flops_per_token=self.flops_per_token,
            hardware_flops_per_token=self._declared("hardware_flops_per_token"),
            power_limit_w=self._sum_of_limits("power_limit_w"),
            baseline_w=self._baseline_w(),
            carbon_g_per_kwh=config.carbon_intensity,
            pue=config.pue,
            price_per_kwh=config.price_per_kwh,
            price_per_gpu_hour=config.price_per_gpu_hour,
            power_limit_default_w=self._sum_of_limits("power_limit_default_w"),
            gpus_with_clock=sum(bool(device.sm_clock_reference_hz) for device in self._gpus),
            has_shared_gpu=shared,
        )

    def _sum_of_limits(self, name: str) -> float | None:
        """Return the sum of the power limits of all GPUs, if all are known; one die may have the limit of the card."""
        limits_w: dict[str, float] = {}  # by the key of the card
        for device in self._gpus:
            card = device.energy_key or device.key
            limits_w[card] = limits_w.get(card, 0.0) + (getattr(device, name) or 0.0)
        return sum(limits_w.values()) if limits_w and all(limits_w.values()) else None

    def _baseline_w(self) -> float | None:
        """Return the idle power of all devices in scope, if it was measured on each device."""
        by_card: dict[str, float | None] = {}
        for key in self.scope.keys:
            by_card[self._devices[key].energy_key or key] = self._devices[key].baseline_w
        watts = [baseline_w for baseline_w in by_card.values() if baseline_w is not None]
        return sum(watts) if watts and len(watts) == len(by_card) else None

    @property
    def flops_per_token(self) -> float | None:
        flops: float | None = self._declared("flops_per_token")
        return flops

    def _declared(self, name: str) -> Any:
        """Return a field of the first HELLO that declares it, or ``None``."""
        return next((value for hello in self._hellos.values() if (value := getattr(hello, name))), None)

    @cached_property
    def known_job(self) -> KnownJob:
        """The constants that the audit uses; the facts are those of the first rank."""
        facts = self._hellos[min(self._hellos)].facts if self._hellos else {}
        max_positions = facts.get("max_positions_per_iteration")
        clocks = {peak_clock_hz(device.name) for device in self._gpus}
        return KnownJob(
            reading_s=self._config.collection_interval_s,
            devices=self.num_gpus or self._ledger.world_size or 1,
            peak_flops_per_s=self.peak_flops_per_s,
            flops_per_token=self.flops_per_token,
            max_positions=max_positions if type(max_positions) is int else 0,
            precision=str(facts.get("precision") or ""),
            peak_clock_hz=clocks.pop() if len(clocks) == 1 else None,
        )

    @cached_property
    def total_iterations(self) -> int | None:
        total: int | None = self._declared("total_iterations")
        return total

    @cached_property
    def iteration_name(self) -> str:
        """Name of an iteration in this job."""
        return "Step" if any(hello.style == "Step" for hello in self._hellos.values()) else "Iteration"

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """Facts of a rank that has the training framework; empty without such a rank."""
        hellos = self._hellos.values()
        return next((hello.facts for hello in hellos if isinstance(hello.facts.get("framework"), str)), {})

    @cached_property
    def is_simulated(self) -> bool:
        return any(device.simulated for device in self._devices.values())

    @cached_property
    def measures_energy(self) -> bool:
        return any(device.energy_method for device in self._devices.values())

    @property
    def scope(self) -> Scope:
        """The power scope of the job; it does not change after the first sum of energy."""
        return self.possible_scopes[0]

    @cached_property
    def possible_scopes(self) -> list[Scope]:
        """The scope of the sums so far; before the first sum, all scopes that every node has, the widest first."""
        nodes, kept = self._devices_by_node(), self._ledger.scope
        return [keep_scope(nodes, kept)] if kept else common_scopes(nodes) or [Scope()]

    def _devices_by_node(self) -> list[Node]:
        nodes: dict[str, list[Device]] = {hello.host: [] for hello in self._hellos.values()}
        for key, ranks in self._members.items():
            nodes[self._hellos[min(ranks)].host].append(self._devices[key])
        return list(nodes.values())

    @cached_property
    def energy_method(self) -> str | None:
        methods = {self._devices[key].energy_method for key in self.scope.keys}
        return "+".join(method for method in METHODS if method in methods) or None

    @cached_property
    def not_measured(self) -> tuple[str, ...]:
        """Sorted sentences about quantities that devices cannot measure; the order of joining has no effect."""
        sentences = {
            one_line(text)
            for hello in self._hellos.values()
            for device in hello.devices
            # If another agent reads a device's energy, the sentences of an agent that cannot read it are ignored.
            if device.energy_method or not self._devices[device.key].energy_method
            for text in device.not_measured
        }
        if self.flops_per_token and not self._config.peak_tflops:
            reasons = {hardware.why_no_peak(device.name) for device in self._gpus if not device.simulated}
            sentences |= {one_line(f"MFU: {why}; EFFICIENTLLM_PEAK_TFLOPS sets the peak") for why in reasons if why}
        return tuple(sorted(sentences | ({self.scope.complaint} if self.scope.complaint else set())))

    @cached_property
    def unknown_tick_share(self) -> str:
        """A sentence if the measured share of an energy counter's ticks is unknown; else empty."""
        devices = filter(is_measured_share_unknown, self._devices.values())
        models = {device.name or "GPUs without a name" for device in devices}
        if not models:
            return ""
        text = (
            f"share of each tick that the energy counter measures ({', '.join(sorted(models))}): unknown; timing "
            "errors are computed for every possible share; `effllm profile` measures this share, once per model and "
            "driver"
        )
        return one_line(text)


class Peak(NamedTuple):
    """The peak of a device, and a text with its source."""

    flops_per_s: float
    text: str


@cache  # called for every window and GPU
def peak_of(name: str) -> Peak | None:
    """Return a GPU's dense peak in BF16, or in FP16 if it has no BF16, from the hardware table."""
    row = hardware.find_by_driver_name(name)
    for precision in ("bf16", "fp16"):
        if row and (peak := hardware.peak_flops_per_s(name, precision)):
            doubt = ", unconfirmed" if row.source.evidence == "unconfirmed" else ""
            text = f"{peak / 1e12:g} TFLOP/s per GPU, dense {precision.upper()}, {row.names[0]} in the hardware table"
            return Peak(peak, text + doubt)
    return None
