"""Compares verdicts with the truth: records of jobs, the goals, and tables."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.judged.healthy import HEALTHY, RIGHT, healthy_case
from benchmarks.judged.job import device_seconds
from benchmarks.judged.kinds import Case, planted_case
from benchmarks.judged.reports import named_ranks, summary_of_job
from effllm.records.iteration_times import MAX_ITERATIONS
from effllm.records.job import Summary

UNKNOWN = "unknown"
MAX_EXCESS, MAX_RATIO, MUCH = 0.02, 1.5, 0.10
WORST = 5

Found = dict[str, Any]


def virtual(kind: str, seed: int) -> Found:
    """Run a job in virtual time, and compare its verdict with the truth."""
    began_s = time.monotonic()
    case = healthy_case(kind, seed) if kind == HEALTHY else planted_case(kind, seed)
    return judged("virtual", kind, seed, case, summary_of_job(case.job), case.gain, time.monotonic() - began_s)


def judged(path: str, kind: str, seed: int, case: Case, summary: Summary, gain: float, spent_s: float) -> Found:
    verdict, job = summary.verdict, case.job
    assert verdict is not None
    is_right = verdict.cause in case.right
    has_bound = is_right and verdict.bound is not None and gain > 0 and kind != HEALTHY
    joined = job.interval * math.ceil(job.min_window_s / (job.interval * job.step_s))
    return {
        "path": path, "kind": kind, "seed": seed, "cause": verdict.cause, "right": list(case.right),
        "is_right": is_right, "gain": gain, "visible": case.visible, "bound": verdict.bound,
        "excess": gain - (verdict.bound or 0.0) if has_bound else None,
        "ratio": (verdict.bound or 0.0) / gain if has_bound else None,
        "named": sorted(set(named_ranks(summary)) - case.slow),
        "has_times": max(joined, job.interval) <= MAX_ITERATIONS,
        "job": f"{job.way.name}; {job.ranks} ranks, {job.count} x {1000 * job.step_s:.3g} ms, reports of {job.interval}"
        + (", joined" if job.min_window_s else "") + (f", profile {job.profile_every}" if job.profile_every else ""),
        "text": verdict.text, "why": verdict.why, "spent_s": round(spent_s, 2),
        "device_seconds": device_seconds(job),
    }  # fmt: skip


def is_accused(one: Found) -> bool:
    """Whether a cause or a rank of a healthy job is accused."""
    return one["cause"] not in (*RIGHT, UNKNOWN) or bool(one["named"])


def is_wrong(one: Found) -> bool:
    return not one["is_right"] and one["cause"] != UNKNOWN


def is_missed(one: Found) -> bool:
    """Whether a job that loses much outside of communication that is not split is called healthy."""
    return one["cause"] in RIGHT and one["visible"] >= MUCH and one["kind"] != HEALTHY


def over(one: Found) -> float:
    return float(one["excess"]) if one["excess"] is not None else -math.inf


def goals(found: Sequence[Found]) -> list[str]:
    """Return each goal, and whether it is met."""
    planted = [one for one in found if one["kind"] != HEALTHY]
    healthy = [one for one in found if one["kind"] == HEALTHY]
    lines = []

    def goal(text: str, is_met: bool) -> None:
        lines.append(f"{'met    ' if is_met else 'NOT MET'}  {text}")

    if planted:
        count = len(planted)
        right, wrong = sum(one["is_right"] for one in planted), sum(map(is_wrong, planted))
        unknown, missed = count - right - wrong, sum(map(is_missed, planted))
        goal(f"cause right in {right} of {count}: {100 * right / count:.1f} %, at least 95 %", right >= 0.95 * count)
        goal(f"cause wrong in {wrong}: {100 * wrong / count:.1f} %, at most 1 %", wrong <= 0.01 * count)
        goal(f"unknown in {unknown}: {100 * unknown / count:.1f} %, at most 5 %", unknown <= 0.05 * count)
        goal(f"healthy or none_found where 10 % or more is lost: {missed}, at most 0", missed == 0)
        exceeded = [one for one in planted if over(one) > MAX_EXCESS]
        most = 100 * max(map(over, planted), default=0.0)
        goal(f"gain above the bound by more than 2 points: {len(exceeded)} jobs, most {most:.1f}", not exceeded)
        ratios = [one["ratio"] for one in planted if one["ratio"] is not None]
        median = statistics.median(ratios) if ratios else 0.0
        goal(f"median of bound / gain: {median:.2f}, at most {MAX_RATIO}", median <= MAX_RATIO)
        named = sum(bool(one["named"]) for one in planted)
        lines.append(f"         ranks named that are not slow: in {named} planted jobs")
    if healthy:
        accused, fine = sum(map(is_accused, healthy)), sum(one["cause"] in RIGHT for one in healthy)
        goal(f"accusations in healthy jobs: {accused} of {len(healthy)}, at most 0", accused == 0)
        goal(f"healthy jobs without an accusation or unknown: {fine}, at least 95 %", fine >= 0.95 * len(healthy))
    return lines


def table(found: Sequence[Found]) -> Iterable[str]:
    """Yield the lines of a table for documents, a line for each kind."""
    yield "| kind | jobs | right | wrong | unknown | > 2 points above the bound (most) | bound / gain | falsely named |"
    yield "|---|---|---|---|---|---|---|---|"
    for kind in dict.fromkeys(one["kind"] for one in found):
        of = [one for one in found if one["kind"] == kind]
        wrong = Counter(one["cause"] for one in of if is_wrong(one))
        exceeded = [over(one) for one in of if one["excess"] is not None]
        beyond = f"{sum(one > MAX_EXCESS for one in exceeded)} ({100 * max(exceeded):+.1f})" if exceeded else "–"
        ratios = [one["ratio"] for one in of if one["ratio"] is not None]
        cells = (
            kind, len(of), sum(one["is_right"] for one in of),
            ", ".join(f"{name} {count}" for name, count in wrong.most_common()),
            sum(one["cause"] == UNKNOWN for one in of), beyond,
            f"{statistics.median(ratios):.2f}" if ratios else "", sum(bool(one["named"]) for one in of),
        )  # fmt: skip
        yield "| " + " | ".join(str(one or "–") for one in cells) + " |"


def worst(found: Sequence[Found]) -> Iterable[str]:
    """Yield the five worst cases of each kind: wrong causes first, then unknown ones, then bounds that are wrong."""

    def badness(one: Found) -> tuple[float, ...]:
        accused = bool(one["named"]) + (one["kind"] == HEALTHY and is_accused(one))
        return (is_wrong(one), accused, not one["is_right"], one["gain"] if not one["is_right"] else over(one))

    def is_bad(one: Found) -> bool:
        return not one["is_right"] or bool(one["named"]) or over(one) > 0 or (one["ratio"] or 0.0) > MAX_RATIO

    for kind in dict.fromkeys(one["kind"] for one in found):
        cases = sorted((one for one in found if one["kind"] == kind and is_bad(one)), key=badness, reverse=True)
        for one in cases[:WORST]:
            bound = f"{100 * one['bound']:.1f} %" if one["bound"] is not None else "none"
            mark = "wrong" if is_wrong(one) else "" if one["is_right"] else UNKNOWN
            yield (
                f"{kind}:{one['seed']} {mark} {one['cause']}; gain {100 * one['gain']:.1f} %, bound {bound}"
                + (f"; named {one['named']}" if one["named"] else "")
                + ("" if one["has_times"] else "; no times of single iterations")
                + f" [{one['job']}] {one['why']}"
            )
