"""How many windows have a loss above its threshold: the evidence that a loss is regular. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from effllm.job.losses import MIN_PADDING_RATIO, THRESHOLDS
from effllm.job.rows import Rows
from effllm.records.job import DATA_WAIT, ClusterReport
from effllm.records.rank import CHECKPOINT, EVALUATION
from effllm.records.verdict import LossWindows


class Prevalence(Struct):
    """The number of windows with iterations, and the windows of each loss, by part."""

    windows: int = 0
    by_cause: dict[str, LossWindows] = {}

    def close(self, rows: Rows, report: ClusterReport) -> None:
        """Add a closed window, which must be neither a correction nor without reports."""
        if report.iteration_last < report.iteration_first:
            return
        self.windows += 1
        for cause, share in _shares(rows, report):
            limit = MIN_PADDING_RATIO if cause == "padding" else THRESHOLDS[cause].share
            if share >= limit:
                known = self.by_cause.get(cause)
                here = LossWindows(1, report.iteration, report.iteration, report.iteration, share)
                self.by_cause[cause] = here if known is None else known.with_later(here)


def _shares(rows: Rows, report: ClusterReport) -> Iterator[tuple[str, float]]:
    """Yield the share of each loss in the wall time of the ranks; for padding, in the processed positions."""
    wall_s = float(rows.numbers["wall_s"].sum())
    if wall_s > 0:
        yield "data_loading", _wait_s(rows, report) / wall_s
        yield "evaluation", rows.phases_s.get(EVALUATION, 0.0) / wall_s
        yield "checkpoint", rows.phases_s.get(CHECKPOINT, 0.0) / wall_s
        # In the first window of a verdict, `straggling_gpu_s` also has the waits of earlier windows.
        health = report.last.health
        yield "straggler", (health.straggling_s or 0.0) * max(len(rows) - health.stragglers, 0) / wall_s
    if rows.counts["tokens_processed"]:
        yield "padding", 1.0 - rows.counts["tokens"] / rows.counts["tokens_processed"]


def _wait_s(rows: Rows, report: ClusterReport) -> float:
    """Return the data waits of all ranks; stragglers by their data wait count as the mean of the other ranks."""
    late = {rank for one in report.stragglers if one.evidence == DATA_WAIT for rank in one.ranks}
    waits = rows.numbers["wait_s"]
    if late:
        waits = waits[[rank not in late for rank in rows.ranks]]
    return float(waits.mean()) * len(rows) if waits.size else 0.0
