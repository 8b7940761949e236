"""The scope of a job's energy, the energy of windows, with their coverage, and of runs, with errors. No I/O.

Each joule is counted once.  The scope is the widest that every node has; from the narrowest to the widest: GPUs;
modules of GPU, CPU and memory (Grace-Hopper, measured as a whole); GPUs and CPUs; power supplies of the whole node.

Consecutive windows share an edge, at which their random errors cancel.  So a sum of windows keeps the variances at its
open ends, and drops the variances at shared edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, cast

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from effllm.job.merged import Expected, Merged
from effllm.records.columns import Array, Positions, Table, decode_array
from effllm.records.energy import AMOUNT, END_J2, JOULES, NORMAL_95, START_J2, EnergyAmount, edge_j2
from effllm.records.rank import CPU, GPU, MODULE, NODE_PSU, Device

#: Number of last windows that a late report can still change; edges of older windows are final.
OPEN_WINDOWS = 10
#: Maximum relative random error of a window's energy; a window with a larger error is too short.
MAX_RANDOM_ERROR = 0.05
#: Rounding error of a coverage: a coverage above 1 - 1e-6 is full.
ROUNDING = 1e-6

GPU_AND_CPU = "gpu+cpu"
#: The choices of a node; `GPU` means modules if GPUs are in modules, and CPUs if the node has no GPU.
WIDEST_FIRST = (NODE_PSU, GPU_AND_CPU, GPU)

#: The devices of a node.
Node = Sequence[Device]


class Scope(Struct, frozen=True):
    """The devices whose energy is counted as the energy of the job."""

    label: str | None = None  # name for display; None if no device measures energy
    choice: str = ""  # one of WIDEST_FIRST, from which `keep_scope` restores this scope
    keys: frozenset[str] = frozenset()
    lacking: int = 0  # number of nodes without a sensor of this scope; their energy counts as not measured
    complaint: str = ""  # one sentence, if the sums keep another scope than the widest one


def common_scopes(nodes: Sequence[Node]) -> list[Scope]:
    """Return the scopes that every node has, the widest first; empty if no node measures energy."""
    if not any(device.energy_method for node in nodes for device in node):
        return []
    offers = [_devices_by_choice(node) for node in nodes]  # for each node, the devices of each choice that it has
    return [_scope_of_choice(offers, choice) for choice in WIDEST_FIRST if all(choice in offer for offer in offers)]


def keep_scope(nodes: Sequence[Node], choice: str) -> Scope:
    """Return the scope of a run's sums so far, by its `Scope.choice`, even if other devices have joined."""
    widest = next(iter(common_scopes(nodes)), Scope())
    if widest.choice == choice:
        return widest
    kept = _scope_of_choice([_devices_by_choice(node) for node in nodes], choice)
    if kept.lacking or not widest.label:
        text = f"the run began with {kept.label}, but not every node can measure it: the run's energy is incomplete"
    else:
        text = f"{widest.label} was not measured from the start of the run, so {kept.label} is still used"
    return replace(kept, complaint=f"power scope: {text}")


def _scope_of_choice(offers: Sequence[Mapping[str, Node]], choice: str) -> Scope:
    """Return the scope with one choice on all nodes, from the devices of each node by choice."""
    devices = {device.key: device for offer in offers for device in offer.get(choice, ())}
    measured_scopes = {device.power_scope for device in devices.values() if device.energy_method}
    # The label has the actual scopes: a job on CPUs is not called ``gpu``.
    label = "+".join(scope for scope in (GPU, MODULE, CPU, NODE_PSU) if scope in measured_scopes) or choice
    return Scope(label, choice, frozenset(devices), lacking=sum(choice not in offer for offer in offers))


def _devices_by_choice(node: Node) -> dict[str, Node]:
    """Return the devices of a node for each possible `Scope.choice`, including devices without a sensor.

    The narrowest choice always exists: a GPU without a sensor makes the sum incomplete, not smaller.
    """
    measured = [device for device in node if device.energy_method]
    supplies = [device for device in measured if device.power_scope == NODE_PSU]
    cpus = [device for device in measured if device.power_scope == CPU]
    gpus = [device for device in node if device.is_gpu]
    # The energy of a module already includes its CPU.
    in_module = any(device.power_scope == MODULE for device in measured)
    offers: dict[str, Node] = {GPU: gpus or cpus or [device for device in node if not device.only_power]}
    if gpus and in_module:
        offers[GPU_AND_CPU] = gpus
    elif cpus:
        offers[GPU_AND_CPU] = [*gpus, *cpus]
    if supplies:
        offers[NODE_PSU] = supplies[:1]  # two sensors of one node's supplies show the same watts
    return offers


def total_of(amounts: Array) -> EnergyAmount:
    """Return the energy of several devices in one window: their random errors are independent."""
    return EnergyAmount(*np.nan_to_num(amounts).sum(axis=0).tolist())


class WindowEnergy(Struct, frozen=True):
    """The energy of one window of the cluster."""

    coverage: float | None  # measured device-seconds over expected device-seconds; None if there is no sensor
    wall: EnergyAmount
    iterations: EnergyAmount
    phases_j: dict[str, float]
    owners: Sequence[str]  # the measured devices
    amounts: Array  # energy of each measured device over the wall time; columns: AMOUNT
    gpus_coverage: float | None = None  # coverage of the GPUs, in any scope
    gpus_wall_j: float = 0.0
    gpus_iterations_j: float = 0.0
    num_owners: int = 0  # number of devices whose energy belongs to the window
    lowest_coverage: float = 1.0  # coverage of the device with the lowest coverage; 0 if a device or a rank is missing
    num_left: int = 0  # number of devices whose ranks have left while other ranks train; not in any coverage

    @property
    def measured_share(self) -> float:
        """Measured share of the window's energy, including devices whose ranks have left."""
        num_owners = self.num_owners + self.num_left
        return (self.coverage or 0.0) * self.num_owners / num_owners if num_owners else 0.0

    @property
    def iterations_j(self) -> float:
        """Joules in iterations; complete only at full coverage."""
        return self.iterations.joules or 0.0


def window_energy(
    merged: Merged,
    expected: Expected,
    scope: Scope,
    num_not_joined: int = 0,
    num_without_device: int = 0,
    departed: Iterable[str] = (),
) -> WindowEnergy:
    """Return the energy of a window and its coverage.

    The ranks of the ``departed`` devices have all left while other ranks train.
    """
    # Devices that belong to the window and have no row, at least one for each rank and node without a device.
    num_lacking = num_not_joined + scope.lacking + (0 if scope.choice == NODE_PSU else num_without_device)
    rows = expected.rows_in(merged)
    is_in_scope = np.array([key in scope.keys for key in expected.sorted_keys], bool)
    owners, best_rows = _best_row_of_owners(merged, expected, rows, is_in_scope)
    gpu_owners, best_gpu_rows = _best_row_of_owners(merged, expected, rows, expected.is_gpu)
    wall, iterations = merged.wall.energy, merged.iterations.energy
    is_measured = best_rows >= 0
    is_measured[is_measured] = ~np.isnan(wall[best_rows[is_measured], JOULES])  # of the rows that exist
    measured_rows = best_rows[is_measured]
    phases_j: dict[str, float] = {}
    for row in set(merged.phases_j).intersection(measured_rows.tolist()) if merged.phases_j else ():
        for name, joules in merged.phases_j[row].items():
            phases_j[name] = phases_j.get(name, 0.0) + (joules or 0.0)
    is_complete = bool(is_measured.all()) and not num_lacking
    amounts = wall[measured_rows]
    gpu_rows = best_gpu_rows[best_gpu_rows >= 0]
    return WindowEnergy(
        coverage=_coverage(best_rows, merged, num_lacking) if scope.label else None,
        wall=total_of(amounts),
        iterations=total_of(iterations[measured_rows]),
        phases_j=phases_j,
        owners=owners if is_measured.all() else list(compress(owners, is_measured)),
        amounts=amounts,
        gpus_coverage=_coverage(best_gpu_rows, merged, num_not_joined + num_without_device) if gpu_owners else None,
        gpus_wall_j=float(np.nan_to_num(wall[gpu_rows, JOULES]).sum()),
        gpus_iterations_j=float(np.nan_to_num(iterations[gpu_rows, JOULES]).sum()),
        num_owners=len(owners) + num_lacking,
        lowest_coverage=float(merged.energy_coverage[best_rows].min(initial=1.0)) if is_complete else 0.0,
        num_left=sum(key in scope.keys for key in departed),
    )


def _best_row_of_owners(
    merged: Merged, expected: Expected, expected_rows: Positions, chosen: NDArray[np.bool_]
) -> tuple[list[str], Positions]:
    """Return each energy key of the chosen devices once, with the row of its device with the best coverage, or -1."""
    owners, owner_rows = expected.owners, expected_rows
    if not chosen.all():
        owners, owner_rows = list(compress(owners, chosen)), expected_rows[chosen]
    if len(set(owners)) == len(owners):
        return owners, owner_rows.copy()
    best_rows: dict[str, int] = {}
    coverage = merged.energy_coverage
    for owner, row in zip(owners, owner_rows.tolist(), strict=True):
        best_row = best_rows.setdefault(owner, row)
        if row >= 0 and (best_row < 0 or coverage[row] > coverage[best_row] + ROUNDING):
            best_rows[owner] = row
    return list(best_rows), np.array(list(best_rows.values()), np.intp)


def _coverage(best_rows: Positions, merged: Merged, num_lacking: int) -> float:
    """Return measured over expected device-seconds; a device without a row is expected for the longest report."""
    if not len(merged):
        return 0.0
    max_s = float(merged.span_s.max())
    rows = best_rows[best_rows >= 0]
    expected_s = float(merged.span_s[rows].sum()) + (len(best_rows) - len(rows) + num_lacking) * max_s
    covered_s = float((merged.energy_coverage[rows] * merged.span_s[rows]).sum())
    return covered_s / expected_s if expected_s > 0 else float(max_s <= 0)  # an empty window is fully covered


def is_covered(coverage: float | None, minimum: float) -> bool:
    """Whether a window's coverage is high enough to add its energy to sums."""
    return coverage is not None and coverage >= minimum - ROUNDING


class EnergyTotals(Table):
    """Energy of devices over many windows; all devices have the same numbers of windows.

    ``inside_j2`` includes the variances of edges that no later window can share.
    """

    NAMES = tuple(name for name in AMOUNT if name not in ("start_j2", "end_j2"))

    def __init__(self) -> None:
        super().__init__()
        self._edges: dict[int, Array] = {}  # last window before an edge -> device x (before, after) in J2; nan: unknown
        self._newest_window = 0

    def add_window(self, window: int, keys: Sequence[str], amounts: Array, sign: int = 1) -> None:
        """Add the energy of each device in a window (columns: `AMOUNT`), or with a sign of -1 subtract it."""
        rows = self.find_or_add(keys)
        self._values[rows] += sign * np.nan_to_num(amounts[:, _SUMMED_COLUMNS])
        self._set_edge(window - 1, 1, rows, amounts[:, START_J2], sign)
        self._set_edge(window, 0, rows, amounts[:, END_J2], sign)
        self._newest_window = max(self._newest_window, window)
        for boundary in [boundary for boundary in self._edges if boundary < self._newest_window - OPEN_WINDOWS]:
            self._add_final_edge(self._edges.pop(boundary))

    def end_attempt(self) -> None:
        """End an attempt of the job: the next attempt's windows are numbered from 1 and share no old edges."""
        for edge in self._edges.values():
            self._add_final_edge(edge)
        self._edges, self._newest_window = {}, 0

    def joules_by_key(self) -> dict[str, float]:
        return self._by_key(self.column("joules"))

    def errors_by_key_j(self) -> dict[str, float]:
        """Return the random error of each device (half-width, 95 %)."""
        return self._by_key(NORMAL_95 * np.sqrt(self._total_variance_j2()))

    def total(self) -> EnergyAmount:
        """Return the energy of all devices: their random errors are independent."""
        sums = dict(zip(self.NAMES, self.values.sum(axis=0).tolist(), strict=True))
        return EnergyAmount(**{**sums, "inside_j2": float(self._total_variance_j2().sum())})

    def packed(self) -> dict[str, Any]:
        edges = {str(boundary): edge.astype("<f8").tobytes() for boundary, edge in self._edges.items()}
        return {**super().packed(), "edges": edges, "newest": self._newest_window}

    @classmethod
    def unpacked(cls, stored: Mapping[str, Any]) -> EnergyTotals:
        """Return the table from a result of `packed` that was stored as JSON, with text in place of bytes.

        Raises:
            ValueError: the stored values have another form.
        """
        table = cast("EnergyTotals", super().unpacked(stored))
        try:
            table._edges = {int(key): decode_array(text).reshape(-1, 2) for key, text in stored["edges"].items()}
            table._newest_window = int(stored["newest"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a table of energies: {error}") from error
        return table

    def _by_key(self, values: Array) -> dict[str, float]:
        return dict(zip(cast("list[str]", list(self.keys)), values.tolist(), strict=True))

    def _add_final_edge(self, edge: Array) -> None:
        self.column("inside_j2")[: len(edge)] += _open_j2(edge)

    def _total_variance_j2(self) -> Array:
        """Return the variance of each device's energy, with the edges that are not final."""
        variances_j2 = self.column("inside_j2").copy()
        if self._edges:
            edges = list(self._edges.values())  # older edges may have fewer devices
            rows, open_j2 = np.concatenate([np.arange(len(edge)) for edge in edges]), _open_j2(np.concatenate(edges))
            variances_j2 += np.bincount(rows, open_j2, len(variances_j2))
        return np.maximum(variances_j2, 0.0)  # subtraction leaves rounding errors

    def _set_edge(self, boundary: int, side: int, rows: Positions, side_j2: Array, sign: int) -> None:
        """Set one side of a boundary, or clear it for a sign of -1; side 0 is the window before it, 1 after it."""
        if boundary < self._newest_window - OPEN_WINDOWS:  # old boundaries are final
            self._values[rows, self.NAMES.index("inside_j2")] += sign * side_j2
            return
        edge = self._edges.get(boundary)
        if edge is None or len(edge) < len(self):
            wider = np.full((len(self), 2), np.nan)
            if edge is not None:
                wider[: len(edge)] = edge
            edge = self._edges[boundary] = wider
        edge[rows, side] = side_j2 if sign > 0 else np.nan
        if sign < 0 and np.isnan(edge).all():
            del self._edges[boundary]


def _open_j2(edge: Array) -> Array:
    """Return the variance that a boundary adds to each device's sum: 0 if both its windows are in the sum."""
    before_j2, after_j2 = np.nan_to_num(edge).T
    open_j2: Array = edge_j2(before_j2, after_j2, ~np.isnan(edge).any(axis=1))
    return open_j2


_SUMMED_COLUMNS = [AMOUNT.index(name) for name in EnergyTotals.NAMES]
