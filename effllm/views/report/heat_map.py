"""The step times of ranks by window, as a heat map: how much longer a rank takes than the median of the ranks."""

from __future__ import annotations

import statistics

from effllm.analysis.recorded_run import MAX_TIMED_RANKS, RecordedRun
from effllm.views.report.markup import Markup, element, together
from effllm.views.report.plot import WIDTH

_CELL = 14  # height of a rank
_FULL = 0.25  # excess over the median that has the full colour


def heat_map(run: RecordedRun) -> Markup | None:
    """Return the heat map; ``None`` for one rank or one window."""
    times = run.ranks.times
    ranks = sorted({rank for _, by_rank in times.columns for rank in by_rank})
    if len(ranks) < 2 or len(times.columns) < 2:
        return None
    width, row = WIDTH / len(times.columns), {rank: at for at, rank in enumerate(ranks)}
    cells, largest = [], 0.0
    for at, (last, by_rank) in enumerate(times.columns):
        means = {rank: seconds / count for rank, (seconds, count) in by_rank.items() if count}
        usual_s = statistics.median(means.values()) if means else 0.0
        for rank, mean_s in means.items():
            excess = max(mean_s / usual_s - 1, 0.0) if usual_s > 0 else 0.0
            largest = max(largest, excess)
            text = f"rank {rank}, to iteration {last:,}: {1000 * mean_s:,.1f} ms, {100 * excess:.0f} % above the median"
            place = {"x": f"{at * width:.5g}", "y": row[rank] * _CELL, "width": f"{width - 1:.5g}", "height": _CELL - 1}
            colour = {"class_": "lost", "fill_opacity": f"{max(min(excess / _FULL, 1.0), 0.04):.2g}"}
            cells.append(element("rect", element("title", text), **place, **colour))
    what = "own time, from the start of a step to the first wait for other ranks" if times.has_own else "step time"
    limit = f" The first {MAX_TIMED_RANKS} ranks." if len(ranks) == MAX_TIMED_RANKS else ""
    label = f"Each rank's {what}, against the median of the ranks, over the windows"
    about = (
        f"{label}: at most {100 * largest:.0f} % longer; the full colour is {100 * _FULL:.0f} %. "
        f"Rank {ranks[0]} is at the top, rank {ranks[-1]} at the bottom.{limit}"
    )
    size = f"0 0 {WIDTH} {len(ranks) * _CELL}"
    drawing = element("svg", cells, viewBox=size, preserveAspectRatio="none", role="img", aria_label=label)
    return together(element("p", about), element("div", drawing, class_="heat"))
