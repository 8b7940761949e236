"""How many windows have a loss above its threshold: the evidence that a loss is regular. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from effllm.job.losses import MIN_PADDING_RATIO, THRESHOLDS
from effllm.job.rows import Rows
from effllm.records.job import ClusterReport
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
        yield "data_loading", float(rows.numbers["wait_s"].sum()) / wall_s
        yield "evaluation", rows.phases_s.get(EVALUATION, 0.0) / wall_s
        yield "checkpoint", rows.phases_s.get(CHECKPOINT, 0.0) / wall_s
        yield "straggler", report.last.health.straggling_gpu_s / wall_s
    if rows.counts["tokens_processed"]:
        yield "padding", 1.0 - rows.counts["tokens"] / rows.counts["tokens_processed"]
