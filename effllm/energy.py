"""Energy between two samples of one device, pure: the counter where it can be believed, else power.

A counter's step is exact however far apart its readings are; power is only a reading of a moment, so a
long gap between two of them is a hole.
"""

from __future__ import annotations

from effllm.schema import Sample

NS = 1e-9


def joules_between(first: Sample, second: Sample, longest_gap_ns: int) -> float | None:
    """Return the energy that flowed from one sample to the next, or ``None`` where it was not measured.

    A counter that goes back (driver reload, GPU reset, wrap-around that the device file did not undo) is
    no measurement of the stretch in which it did.
    """
    if first.energy_j is not None and second.energy_j is not None and second.energy_j >= first.energy_j:
        return second.energy_j - first.energy_j
    if first.power_w is None or second.power_w is None or second.time_ns - first.time_ns > longest_gap_ns:
        return None
    return (first.power_w + second.power_w) / 2.0 * (second.time_ns - first.time_ns) * NS


def share_of(first: Sample, second: Sample, from_ns: int, to_ns: int, joules: float) -> float:
    """Return the part of ``joules``, which flowed between two samples, that falls in ``[from_ns, to_ns]``.

    Between two readings of a counter the power is taken as constant, between two readings of power as a
    straight line; with both, the line is scaled to the counter's step.
    """
    span_ns = second.time_ns - first.time_ns
    share = (to_ns - from_ns) / span_ns
    if first.power_w is None or second.power_w is None or first.power_w + second.power_w <= 0:
        return joules * share
    middle = ((from_ns + to_ns) / 2.0 - first.time_ns) / span_ns
    local_w = first.power_w + (second.power_w - first.power_w) * middle
    return joules * share * (2.0 * local_w / (first.power_w + second.power_w))
