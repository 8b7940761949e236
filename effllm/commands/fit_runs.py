"""The measured peaks of earlier runs, for ``effllm fit --runs``: paired with the estimates of the same plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from effllm.analysis.measured_peaks import RecordedPeak, read_peaks
from effllm.memory.estimate import MemoryEstimate, estimate
from effllm.memory.known_models import find_model
from effllm.memory.learned import Correction, MeasuredPeak, corrected, family_of, learn
from effllm.memory.model import ModelShape
from effllm.memory.parameters import count_parameters
from effllm.memory.plan import ImpossiblePlan, MemoryPlan
from effllm.memory.recorded_plan import UnknownPlan, recorded_plan

#: Largest relative difference between the parameters of a run and those of its model.
TOLERANCE = 0.02


@dataclass(frozen=True)
class LearnedRuns:
    """The corrections by family, and the number of runs that were left out by reason."""

    corrections: dict[Hashable, Correction]
    left_out: Counter[str]

    def estimate(self, shape: ModelShape, plan: MemoryPlan) -> MemoryEstimate:
        """Return the corrected estimate of a plan."""
        found = estimate(shape, plan)
        return corrected(found, self.correction(found))

    def correction(self, found: MemoryEstimate) -> Correction:
        """Return the correction of an estimate's family; an empty one if it has no runs."""
        return self.corrections.get(family_of(found), learn(()))


def learn_from(path: Path, models: Iterable[ModelShape]) -> LearnedRuns:
    """Return the corrections from the runs at a path.

    A run belongs to one of the given models, or to the model of the table with its name, if the number of parameters
    is the same.

    Raises:
        UnreadableRun: the path has neither run folders nor lines of a ledger.
    """
    recorded, left_out = read_peaks(path)
    shapes, by_family = list(models), dict[Hashable, list[MeasuredPeak]]()
    for one in recorded:
        try:
            found = _estimated(one, recorded_plan(one.facts, one.positions), shapes)
            if found is None:
                left_out["no known model"] += 1
                continue
            peak = MeasuredPeak(found, one.peak_bytes)
        except UnknownPlan as error:
            left_out[str(error)] += 1
        except ImpossiblePlan:
            left_out["an impossible plan"] += 1
        else:
            by_family.setdefault(peak.family, []).append(peak)
    return LearnedRuns({family: learn(peaks) for family, peaks in by_family.items()}, left_out)


def _estimated(run: RecordedPeak, plan: MemoryPlan, given: Sequence[ModelShape]) -> MemoryEstimate | None:
    """Return the estimate of the run's model, which has the name or is given, and has the parameters of the run.

    Raises:
        ImpossiblePlan: the model cannot have this plan.
    """
    named = find_model(run.model) if run.model else None
    for shape in [*([named.shape] if named else []), *given]:
        adapters = estimate(shape, plan).trained if plan.lora_rank else 0.0
        total = count_parameters(shape).total + adapters
        if run.parameters and abs(run.parameters - total) <= TOLERANCE * total:
            return estimate(shape, plan)
    return None
