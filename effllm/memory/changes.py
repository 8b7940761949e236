"""The smallest changes of a plan that make it fit, in the order of their cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, NamedTuple

from effllm.memory.estimate import ByteRange, MemoryEstimate, estimate
from effllm.memory.plan import ImpossiblePlan, MemoryPlan, ModelShape

FITS, DOES_NOT_FIT, UNCLEAR = "fits", "does not fit", "unclear"
MAX_CHANGES, MAX_COMBINED = 5, 3


def verdict(total: ByteRange, usable_bytes: float) -> str:
    """Return whether a plan fits: unclear if the interval contains the memory of the GPU."""
    return FITS if total.high <= usable_bytes else DOES_NOT_FIT if total.low > usable_bytes else UNCLEAR


@dataclass(frozen=True)
class PlanChange:
    """A change of a plan by one or more options."""

    cost: str
    cost_rank: float  # the order of costs; several changes have the sum
    settings: Mapping[str, Any]
    implied: Mapping[str, Any] = field(default_factory=dict)  # settings that are not among the options

    @property
    def options(self) -> str:
        names = {name: name.removesuffix("_rank").replace("_", "-") for name in self.settings}
        return " ".join(f"--{names[name]} {value}" for name, value in self.settings.items())


class FittingChange(NamedTuple):
    """Changes that together make a plan fit."""

    options: str
    costs: tuple[str, ...]
    cost_rank: float
    plan: MemoryPlan
    total: ByteRange


def fitting_changes(given: MemoryEstimate, usable_bytes: float, *, keeps_gpus: bool = False) -> list[FittingChange]:
    """Return the cheapest changes with which the upper limit of the interval fits; none contains another.

    If ``keeps_gpus``, the number of GPUs is given, so that a larger TP leaves fewer ranks for data parallelism.
    """
    if not given.shape.has_known_layers:
        return []
    changes = list((_training_changes if given.plan.is_training else _serving_changes)(given.plan))
    changes += _splitting_changes(given.shape, given.plan, keeps_gpus)
    fitting_options: list[frozenset[str]] = []  # the options of each change in `fitting`
    fitting: list[FittingChange] = []
    for count in range(1, MAX_COMBINED + 1):
        for chosen in combinations(changes, count):
            options = frozenset(change.options for change in chosen)
            changed = [pair for change in chosen for pair in (*change.settings.items(), *change.implied.items())]
            settings = dict(changed)
            if len(settings) < len(changed) or any(subset <= options for subset in fitting_options):  # a setting twice
                continue
            change = _combined(chosen, replace(given.plan, **settings), given, keeps_gpus)
            if change is not None and change.total.high <= usable_bytes:
                fitting_options.append(options)
                fitting.append(change)
        if len(fitting) >= MAX_CHANGES:
            break
    return sorted(fitting, key=lambda change: (change.cost_rank, change.total.high))[:MAX_CHANGES]


def _combined(
    chosen: Sequence[PlanChange], plan: MemoryPlan, given: MemoryEstimate, keeps_gpus: bool
) -> FittingChange | None:
    """Return changes as one, or ``None`` if impossible; with a smaller DP, accumulation keeps the global batch."""
    before = given.plan
    costs, options = [change.cost for change in chosen if change.cost], [change.options for change in chosen]
    if keeps_gpus and plan.gpus > before.gpus:
        options.insert(0, f"--gpus {plan.gpus}")
    if plan.gpus > before.gpus:
        costs.append(f"{plan.gpus // before.gpus} times as many GPUs")
    if plan.dp < before.dp and plan.is_training:
        plan = replace(plan, accumulation=plan.accumulation * before.dp // plan.dp)
        costs.append(f"DP {plan.dp} instead of {before.dp}, with the accumulation that keeps the global batch")
    elif plan.dp < before.dp:
        costs.append(f"replicas on these GPUs: {plan.dp} instead of {before.dp}")
    if plan.accumulation != before.accumulation:
        options.append(f"--accumulation {plan.accumulation}")
    try:
        total = estimate(given.shape, plan).total
    except ImpossiblePlan:
        return None
    return FittingChange(" ".join(options), tuple(costs), sum(change.cost_rank for change in chosen), plan, total)


def _serving_changes(plan: MemoryPlan) -> Iterator[PlanChange]:
    if plan.attention == "eager":
        yield PlanChange("none", 0.1, {"attention": "sdpa"})
    for divisor in (2, 4, 8):
        if plan.micro_batch >= divisor:
            yield PlanChange("fewer sequences at a time", 1 + divisor / 8, {"micro_batch": plan.micro_batch // divisor})
    if plan.numbers.bytes_per_weight == 4:
        yield PlanChange("weights in 16 bits", 2.0, {"precision": "bf16"})
    if not plan.base_bits:
        yield from (PlanChange("quantized weights", 7 - bits / 4, {"base_bits": bits}) for bits in (8, 4))


def _training_changes(plan: MemoryPlan) -> Iterator[PlanChange]:
    type_16_bits = "fp16" if plan.precision.startswith("fp16") else "bf16"
    if plan.attention == "eager":
        yield PlanChange("none", 0.1, {"attention": "sdpa"})
        if plan.checkpointing == "none":
            yield PlanChange("1 to 3 % more time (arXiv 2205.05198)", 0.8, {"checkpointing": "selective"})
    if plan.checkpointing != "full":
        yield PlanChange("30 to 40 % more time for a step (arXiv 2205.05198)", 3.0, {"checkpointing": "full"})
    for stage, cost_rank in ((1, 0.5), (2, 0.7), (3, 2.5)):
        if plan.dp > 1 and plan.zero < stage:
            cost = "little communication" if stage < 3 else "the weights of each layer are gathered twice in a step"
            yield PlanChange(cost, cost_rank, {"zero": stage})
    for divisor in (2, 4, 8, 16):
        if plan.micro_batch % divisor == 0:
            sizes, more = {"micro_batch": plan.micro_batch // divisor}, {"accumulation": plan.accumulation * divisor}
            yield PlanChange("smaller matrix products, the same result", 1 + divisor / 16, sizes, more)
    if plan.optimizer == "adamw" and not plan.lora_rank:
        yield PlanChange("quantized optimizer states (arXiv 2110.02861)", 2.0, {"optimizer": "adamw-8bit"})
    if plan.numbers.bytes_per_weight == 4 and not plan.lora_rank:
        yield PlanChange("no weights in 32 bits: small updates are lost", 5.0, {"precision": type_16_bits})
    if not plan.lora_rank:
        adapters: dict[str, Any] = {"precision": type_16_bits, "lora_rank": 16}
        implied = {"optimizer": "adamw"}
        yield PlanChange("only adapters are trained", 6.0, adapters, implied)
        yield PlanChange("only adapters are trained, on a base of 4 bits", 7.0, {**adapters, "base_bits": 4}, implied)
    elif not plan.base_bits:
        yield PlanChange("a base of 4 bits (arXiv 2305.14314)", 4.0, {"base_bits": 4})
    for divisor in (2, 4):
        if plan.seq_length >= 512 * divisor:
            yield PlanChange("shorter texts", 9.0 + divisor, {"seq_length": plan.seq_length // divisor})


def _splitting_changes(shape: ModelShape, plan: MemoryPlan, keeps_gpus: bool) -> Iterator[PlanChange]:
    """Yield changes that divide the model further: between the same GPUs if possible, or between more GPUs."""
    for factor in (2, 4, 8):
        tp = plan.tp * factor
        if shape.heads % tp == 0 and tp <= 8:
            sizes = {"tp": tp, "dp": plan.dp // factor}
            is_same = keeps_gpus and plan.dp % factor == 0
            same = PlanChange("communication in each layer", 3.0 + factor / 4, sizes)
            yield same if is_same else PlanChange("", 8.0 * factor, {"tp": tp})  # _combined adds the cost of GPUs
        if plan.is_training and plan.dp == 1:
            yield PlanChange("", 7.5 * factor, {"dp": factor, "zero": 3})
