"""The energy of one window of the job, and its coverage. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from effllm.job.energy_account import JOULES, WindowEnergy, total_of
from effllm.job.merged import Expected, Merged
from effllm.job.power_scope import Scope
from effllm.records.columns import Positions
from effllm.records.rank import NODE_PSU, Device

#: Rounding error of a coverage: a coverage above 1 - 1e-6 is full.
ROUNDING = 1e-6


def window_energy(
    merged: Merged,
    devices: Mapping[str, Device],
    absent: int,
    blind: int = 0,
    scope: Scope | None = None,
    left: Iterable[str] = (),
) -> WindowEnergy:
    """Return the energy of a window and its coverage.

    Args:
        merged: the window's devices.
        devices: every device that the window should have.
        absent: number of ranks that have not joined.
        blind: number of ranks that have joined without a device.
        scope: the power scope of the job; ``None`` for all devices.
        left: devices whose ranks have all left while other ranks train.
    """
    expected = Expected.of(devices)
    lacking = absent + (scope.lacking if scope else 0) + (0 if scope and scope.choice == NODE_PSU else blind)
    is_measurable = expected.is_measurable if scope is None else bool(scope.label)
    rows = expected.positions(merged)
    owners, shown = _shown(merged, expected, rows, expected.within(scope))
    gpu_owners, gpus = _shown(merged, expected, rows, expected.is_gpu)
    wall, iterations = merged.wall.energy, merged.iterations.energy
    there = shown >= 0
    there[there] = ~np.isnan(wall[shown[there], JOULES])
    measured = shown[there]
    phases_j: dict[str, float] = {}
    for at in set(merged.phases_j).intersection(measured.tolist()) if merged.phases_j else ():
        for name, joules in merged.phases_j[at].items():
            phases_j[name] = phases_j.get(name, 0.0) + (joules or 0.0)
    names = owners if there.all() else [owner for owner, is_there in zip(owners, there, strict=True) if is_there]
    amounts = wall[measured]
    present = gpus[gpus >= 0]
    is_all_there = bool(there.all()) and not lacking
    return WindowEnergy(
        coverage=_coverage(shown, merged, lacking) if is_measurable else None,
        wall=total_of(amounts),
        iterations=total_of(iterations[measured]),
        phases_j=phases_j,
        owners=names,
        amounts=amounts,
        gpus_coverage=_coverage(gpus, merged, absent + blind) if gpu_owners else None,
        gpus_wall_j=float(np.nan_to_num(wall[present, JOULES]).sum()),
        gpus_iterations_j=float(np.nan_to_num(iterations[present, JOULES]).sum()),
        num_owners=len(owners) + lacking,
        lowest_coverage=float(merged.energy_coverage[shown].min(initial=1.0)) if is_all_there else 0.0,
        num_left=sum(scope is None or key in scope.keys for key in left),
    )


def _shown(
    merged: Merged, expected: Expected, rows: Positions, chosen: NDArray[np.bool_]
) -> tuple[list[str], Positions]:
    """Return each energy key once, with the row of the device with the best coverage, or -1 without a row."""
    if chosen.all():
        owners, found = expected.owners, rows
    else:
        owners, found = [expected.owners[i] for i in np.flatnonzero(chosen)], rows[chosen]
    if len(set(owners)) == len(owners):
        return owners, found.copy()
    best: dict[str, int] = {}
    coverage = merged.energy_coverage
    for owner, at in zip(owners, found.tolist(), strict=True):
        known = best.setdefault(owner, at)
        if at >= 0 and (known < 0 or coverage[at] > coverage[known] + ROUNDING):
            best[owner] = at
    return list(best), np.array(list(best.values()), np.intp)


def _coverage(shown: Positions, merged: Merged, lacking: int) -> float:
    if not len(merged):
        return 0.0
    span_s = float(merged.span_s.max())
    there = shown[shown >= 0]
    expected_s = float(merged.span_s[there].sum()) + (len(shown) - len(there) + lacking) * span_s
    covered_s = float((merged.energy_coverage[there] * merged.span_s[there]).sum())
    return covered_s / expected_s if expected_s > 0 else float(span_s <= 0)  # an empty window is fully covered


def is_covered(coverage: float | None, minimum: float) -> bool:
    """Whether a window's coverage is high enough to add its energy to sums."""
    return coverage is not None and coverage >= minimum - ROUNDING
