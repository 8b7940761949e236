"""The energy ledger of one device, pure: readings in, the energy between any two moments out, with its error.

A counter's single step is never trusted: it must be physically possible.  What a counter does not tell
(it was reset, it stood still, it could not be read) is filled from power and marked as estimated; what
nothing tells is missing, never zero.  Windows end at iterations and counters move at ticks: between two
ticks the energy is interpolated with the power on either side.

The model of the errors is that of docs/energy.md.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from msgspec.structs import replace

from effllm.energy.cross_check import CrossCheck
from effllm.energy.lag_evidence import MIN_ERROR_S, SAME_S, LagEvidence, TickRead, measures_whole_tick
from effllm.energy.power_spread import PowerSpread
from effllm.energy.tick_clock import TickClock
from effllm.energy.tick_energy import beat, beat_of, in_tick
from effllm.records.energy import NORMAL_95, NOT_MEASURED, EnergyAmount
from effllm.schema import AVERAGE, COUNTER, INSTANT, METHODS, Device, Event, Sample, Sensor

NS = 1e-9

#: From this tick on a clock is worth keeping; RAPL's millisecond is not.
LEAST_TICK_S = 0.005
#: A tick that is known worse than this is a guess, from which no moment can be told.
MOST_OPEN = 0.1
#: A step of a counter may exceed what the power limit allows by so much (boosts, board losses).
OVERSHOOT = 1.2
#: Where no limit is known: no accelerator, module or node sensor exceeds it for long.
UNLIMITED_W = 20_000.0
#: A counter that stands still while this much flowed by power is frozen.
FROZEN_J, LEAST_STANDING_S = 20.0, 0.5
#: Readings nearer than this to a moment that may be asked for are kept as they are.
LEAST_MARGIN_NS = 10_000_000_000
#: A phase that is known worse than this is looked for with one more reading at each edge.
WIDE_NS = 100_000.0
#: Iterations keep step with the sensor from this share of the largest possible aliasing on; reported above the error.
LOCKED, LOCKED_ERROR = 0.25, 0.02
#: Fewer iterations than this show no rhythm.
MIN_RHYTHM = 64
#: Power rises and falls once in an iteration, each time anywhere in a tick of which the sensor sees a part: 2 / 12.
STEPS_J2 = 1 / 6


class _Point(NamedTuple):
    """A reading, entered: the cumulative energy and how the step before it was come by."""

    time_ns: int
    total_j: float
    power_w: float | None
    method: str | None  # of the step from the point before; None: a hole
    estimated: bool
    variance_j2: float  # of that step
    holes_ns: int  # running total of time in holes
    estimated_j: float  # running total
    variances_j2: float  # running total


class _Step(NamedTuple):
    """What a reading adds."""

    method: str | None  # None: nobody knows
    joules: float
    variance_j2: float
    is_estimated: bool


class _Level(NamedTuple):
    """The cumulative energy at one moment, interpolated."""

    joules: float
    variance_j2: float
    power_w: float
    estimated_j: float = 0.0  # of it
    shift_s2: float = 0.0  # variance of when the readings around it are from


class _Base(NamedTuple):
    """A counter reading that made sense, and what was entered until then."""

    time_ns: int
    counter_j: float
    total_j: float
    variances_j2: float
    flow_j: float  # ... and by power alone


class EnergyLedger:
    """Enters the readings of one device and answers how much energy flowed when.

    Args:
        device: whose sensor's behaviour (tick, lag, duty), power limit and method count.
        longest_gap_s: readings of power further apart than this leave a hole between them.
    """

    def __init__(self, device: Device, longest_gap_s: float) -> None:
        self._device = device
        self._sensor = self._known = device.sensor  # with, and without what this run shows of the lag
        self._longest_gap_ns = round(longest_gap_s / NS)
        self.clock = _clock_of(device.sensor)
        self._limit_w = device.power_limit_w * OVERSHOOT if device.power_limit_w else UNLIMITED_W
        self._points: deque[_Point] = deque()
        self._last_counter: tuple[int, float] | None = None
        self._trust: _Base | None = None  # while the counter is in doubt: where it last made sense
        self._left: _Base | None = None  # where it made sense before it went on from elsewhere: it may return
        self._moved: _Base | None = None  # when it last moved
        self._flow_j = 0.0  # running total by power alone
        self._has_told_doubt = False
        self._powers = PowerSpread()
        self._held_ns = 0.0  # the tick in which power was last read
        self._edges: dict[int, _Level] = {}
        self._events: list[tuple[str, str]] = []
        self._check = CrossCheck()
        self._rhythm: tuple[float, float] | None = None
        self._method = device.energy_method
        self._lag = LagEvidence() if measures_whole_tick(device) else None
        self._run_iterations = 0
        self._run_j = 0.0  # of all windows

    def calibrate(self, sensor: Sensor) -> None:
        """Take what has been learnt of the sensor, and learn its ticks from the readings so far."""
        self._sensor = self._known = sensor
        self._lag = LagEvidence() if measures_whole_tick(self._device) else None
        self.clock = _clock_of(sensor)
        previous: _Point | None = None
        for point in self._points:
            if self.clock is not None and previous is not None and point.method == COUNTER:
                if point.total_j > previous.total_j:
                    self.clock.moved(previous.time_ns, point.time_ns)
                else:
                    self.clock.stood(previous.time_ns, point.time_ns)
            previous = point

    def expect_lag(self, kept_s: float) -> None:
        """Take the lag that an earlier run found, which narrows nothing before the readings have shown the same."""
        if self._lag is not None:
            self._lag = LagEvidence(kept_s)

    def found_lag_s(self) -> float | None:
        """Return the lag that the readings of this run have shown, to `SAME_S`; ``None`` where they have not."""
        is_found = self._is_lag_open and self._lag is not None and self._lag.is_shown
        return self._sensor.lag_s if is_found and self._sensor.lag_error_s <= SAME_S else None

    @property
    def is_contradicted(self) -> bool:
        """Whether the readings contradict the calibrated tick, so that the sensor must be learnt anew."""
        return self.clock is not None and self.clock.is_contradicted

    def allow_gap(self, longest_gap_s: float) -> None:
        """Let readings of power lie further apart before there is a hole between them."""
        self._longest_gap_ns = max(self._longest_gap_ns, round(longest_gap_s / NS))

    # --- readings in ---

    def add(self, sample: Sample) -> None:
        """Enter a reading, which must be newer than the last."""
        self._limit_w = max(self._limit_w, sample.gauges.get("power_limit_w", 0.0) * OVERSHOOT)  # it can be raised
        power_w = _usable(sample.power_w if sample.power_w is not None else sample.power_average_w)
        if power_w is not None and power_w > UNLIMITED_W:
            power_w = None
        counter_j = _usable(sample.energy_j) if self._method == COUNTER else None
        if power_w is None and counter_j is None and self._last_counter is not None:
            return  # a failed read: the counter will tell what it misses, if it comes back
        if power_w is not None:
            is_repeated = self._is_repeated(sample.time_ns, power_w)
            self._powers.add(sample.time_ns, power_w, self._sensor.tick_s, is_repeated=is_repeated)
        if self._points:
            step = self._step(self._points[-1], sample, counter_j, power_w)
        else:
            step = _Step(None, 0.0, 0.0, False)
        self._enter(sample.time_ns, power_w, step)
        if counter_j is not None:
            if self._last_counter is None or counter_j != self._last_counter[1]:
                self._moved = self._base(sample.time_ns, counter_j)
            self._last_counter = (sample.time_ns, counter_j)
        self._cross_check()

    def _is_repeated(self, time_ns: int, power_w: float) -> bool:
        """Whether a held power reading was read before in the same tick, so that it shows nothing of changes."""
        if not self._sensor.is_held or self.clock is None:
            return False
        last = self.clock.tells(time_ns + self._sensor.lag_s / NS)
        if last is None:  # of the tick before or the one after
            return bool(self._points) and power_w == self._points[-1].power_w
        before_ns, self._held_ns = self._held_ns, last[0]
        return abs(last[0] - before_ns) < self.clock.tick_ns / 2

    def _enter(self, time_ns: int, power_w: float | None, step: _Step) -> None:
        total_j = estimated_j = variances_j2 = 0.0
        holes_ns = 0
        if self._points:
            last = self._points[-1]  # not that from which the step was taken, where it puts right what was entered
            total_j, estimated_j, variances_j2 = last.total_j, last.estimated_j, last.variances_j2
            holes_ns = last.holes_ns + (time_ns - last.time_ns if step.method is None else 0)
        self._points.append(
            _Point(
                time_ns=time_ns,
                total_j=total_j + step.joules,
                power_w=power_w,
                method=step.method,
                estimated=step.is_estimated,
                variance_j2=step.variance_j2,
                holes_ns=holes_ns,
                estimated_j=estimated_j + (step.joules if step.is_estimated else 0.0),
                variances_j2=variances_j2 + step.variance_j2,
            )
        )

    def set_rhythm(self, step_s: float, deviation_s: float) -> None:
        """Tell how long an iteration takes and how much that varies, for ticks may beat with iterations."""
        self._rhythm = (step_s, deviation_s)

    def take_events(self, time_s: float) -> list[Event]:
        """Return what happened to the measurement since the last call; ``time_s`` is the newest sample's unix time."""
        events, self._events = self._events, []
        return [Event(time_s, kind, text) for kind, text in events]

    def _step(self, last: _Point, sample: Sample, counter_j: float | None, power_w: float | None) -> _Step:
        """Return the step to a reading; that of a counter may begin before the last one."""
        by_power = self._by_power(last, sample.time_ns - last.time_ns, power_w)
        if self._method != COUNTER:
            return _Step(self._method, *by_power, False) if by_power else _Step(None, 0.0, 0.0, False)
        expected_j = by_power[0] if by_power else None
        self._flow_j += expected_j or 0.0
        if counter_j is not None and self._last_counter is not None:
            step = self._by_counter(last, sample.time_ns, counter_j, expected_j)
            if step is not None:
                return step
        elif self._trust is None and self._last_counter is not None:
            self._trust = self._base(*self._last_counter)  # it cannot be read now
        if by_power is None:
            return _Step(None, 0.0, 0.0, False)
        return _Step(INSTANT if sample.power_w is not None else AVERAGE, *by_power, True)

    def _by_counter(self, last: _Point, time_ns: int, counter_j: float, expected_j: float | None) -> _Step | None:
        """Return the step by the counter, or ``None`` where it cannot be believed."""
        assert self._last_counter is not None
        before_ns, before_j = self._last_counter
        step_j = counter_j - before_j
        is_possible = 0.0 <= step_j <= self._most_j(time_ns - before_ns)
        if self._trust is not None:
            return self._by_doubted(last, time_ns, counter_j, expected_j, is_possible)
        if self._left is not None:  # as if it had never left; that is so if power says so, now or as a rule
            as_if_j = counter_j - self._left.counter_j - (last.total_j - self._left.total_j)
            returned = 0.0 <= as_if_j <= self._most_j(time_ns - before_ns)
            usual_j = self._powers.mean_w * (time_ns - before_ns) * NS or None
            if returned and (not is_possible or _nearer(as_if_j, step_j, expected_j or usual_j)):
                return _Step(COUNTER, as_if_j, 0.0, False)
        if not is_possible:
            self._distrust(self._base(before_ns, before_j), _what_happened(step_j))
            return None
        if step_j == 0.0 and self._stands_still(time_ns):
            assert self._moved is not None
            flow_j = self._flow_j - self._moved.flow_j
            self._distrust(self._moved, "it stands still while power flows")
            variance_j2 = self._powers.sampling_j2((time_ns - self._moved.time_ns) * NS)
            return self._put_right(time_ns, self._moved, flow_j, variance_j2, INSTANT)
        if self.clock is not None:
            learn = self.clock.moved if step_j > 0.0 else self.clock.stood
            learn(before_ns, time_ns)
        return _Step(COUNTER, step_j, 0.0, False)

    def _by_doubted(
        self, last: _Point, time_ns: int, counter_j: float, expected_j: float | None, is_possible: bool
    ) -> _Step | None:
        """Return the step by a counter in doubt, if it is back where it was or goes on from where it is."""
        assert self._trust is not None and self._last_counter is not None
        trust, (before_ns, before_j) = self._trust, self._last_counter
        since_j, entered_j = counter_j - trust.counter_j, last.total_j - trust.total_j
        is_back = counter_j != before_j and 0.0 <= since_j <= self._most_j(time_ns - trust.time_ns)
        goes_on = is_possible and counter_j != before_j and trust.time_ns < before_ns == last.time_ns
        if is_back and not (goes_on and _nearer(counter_j - before_j, since_j - entered_j, expected_j)):
            self._tell_trusted()
            # What windows were told meanwhile by power is as open as that was.
            return self._put_right(time_ns, trust, since_j, last.variances_j2 - trust.variances_j2, COUNTER)
        if goes_on:
            self._left = trust
            self._tell_trusted()
            return _Step(COUNTER, counter_j - before_j, 0.0, False)
        return None

    def _put_right(self, time_ns: int, since: _Base, joules: float, variance_j2: float, method: str) -> _Step:
        """Return the one step that replaces all since a reading, but for those that windows were told of."""
        told_ns = max([since.time_ns, *self._edges])
        while len(self._points) > 1 and self._points[-2].time_ns >= told_ns:
            self._points.pop()
        last = self._points[-1]
        left_j = since.total_j + joules - last.total_j
        most_j = self._most_j(time_ns - last.time_ns)
        is_told = last.time_ns > since.time_ns or method != COUNTER
        return _Step(method, min(max(left_j, 0.0), most_j), variance_j2 if is_told else 0.0, method != COUNTER)

    def _base(self, time_ns: int, counter_j: float) -> _Base:
        last = self._points[-1]
        return _Base(time_ns, counter_j, last.total_j, last.variances_j2, self._flow_j)

    def _most_j(self, span_ns: int) -> float:
        return self._limit_w * (span_ns * NS + max(2 * self._sensor.tick_s, 0.1) + self._sensor.lag_s)

    def _stands_still(self, time_ns: int) -> bool:
        """Whether it has not moved for longer than its ticks explain, though power flowed."""
        if self._moved is None:
            return False
        stood_s = (time_ns - self._moved.time_ns) * NS
        longest_s = max(3 * self._sensor.tick_s, LEAST_STANDING_S) + self._sensor.lag_s
        return stood_s > longest_s and self._flow_j - self._moved.flow_j > FROZEN_J

    def _distrust(self, base: _Base, why: str) -> None:
        self._trust = base
        self._has_told_doubt = True
        self._events.append(("energy_counter", f"the energy counter is not believed: {why}; power fills the gap"))

    def _tell_trusted(self) -> None:
        self._trust = None
        if self._has_told_doubt:  # that it could not be read, the sampler told
            self._events.append(("energy_counter", "the energy counter is believed again"))
        self._has_told_doubt = False

    def _by_power(self, last: _Point, span_ns: int, power_w: float | None) -> tuple[float, float] | None:
        """Return energy and variance of a step by the power at its ends."""
        if last.power_w is None or power_w is None or span_ns > self._longest_gap_ns:
            return None
        span_s = span_ns * NS
        return (last.power_w + power_w) / 2 * span_s, self._powers.sampling_j2(span_s)

    # --- energy out ---

    def energy(self, start_ns: int, end_ns: int) -> EnergyAmount:
        """Return what flowed in ``[start_ns, end_ns]``."""
        if not self._points or end_ns <= start_ns:
            return NOT_MEASURED
        if len(self._points) == 1:
            return self._standing(start_ns, end_ns)
        first_ns, last_ns = self._points[0].time_ns, self._points[-1].time_ns
        # What a sensor said stands until its next update.
        last_ns += self._reach_ns()
        from_ns, to_ns = max(start_ns, first_ns), min(end_ns, max(last_ns, start_ns))
        if to_ns <= from_ns:
            return NOT_MEASURED
        holes_ns = self._holes_ns(to_ns) - self._holes_ns(from_ns)
        covered_s = (to_ns - from_ns - holes_ns) * NS
        start, end = self._level(from_ns), self._level(to_ns)  # of holes, too: what was told is not told again
        if covered_s <= 0:
            return NOT_MEASURED
        joules = max(end.joules - start.joules, 0.0)
        # What is open about both edges moves them alike, so that only a difference of power between them counts;
        # what is open about one of them alone, for more was known at the other, moves that one.
        both_s2 = min(start.shift_s2, end.shift_s2)
        # However alike the edges of this stretch are, those of a run are not; and of a fast wave the power at an edge
        # says little of that next to it.
        spread_w2 = self._powers.variance_w2 * (1 + 3 * self._powers.fastness()) / 4
        rise_j2 = both_s2 * max((end.power_w - start.power_w) ** 2 / 2, spread_w2)
        before_j2, after_j2 = self._variances_j2(from_ns), self._variances_j2(to_ns)
        return EnergyAmount(
            joules=joules,
            covered_s=covered_s,
            start_j2=start.variance_j2 + rise_j2 + (start.shift_s2 - both_s2) * start.power_w**2,
            end_j2=end.variance_j2 + rise_j2 + (end.shift_s2 - both_s2) * end.power_w**2,
            inside_j2=after_j2 - before_j2 + self._alias_j2(covered_s),
            gain_j=self._sensor.gain_error * joules,
            estimated_j=max(end.estimated_j - start.estimated_j, 0.0),
        )

    def newest_ns(self) -> int:
        """Time of the newest reading, 0 before the first."""
        return self._points[-1].time_ns if self._points else 0

    def reads_for(self, edge_ns: int) -> list[int]:
        """Return when to read so that the energy at an edge can be told: moments at and after it, soonest first."""
        if self.clock is None or self._method != COUNTER:
            return [edge_ns, edge_ns + late_ns] if (late_ns := self._late_ns()) else [edge_ns]
        shown_ns = edge_ns + max(round(self._sensor.lag_s / NS), 0)  # when the counter will show it
        last = self.clock.before(shown_ns)
        tick_ns = self.clock.tick_ns
        if last is None:  # find the ticks first
            return [shown_ns + round(tick_ns * part / 8) for part in range(18)]
        next_ns, half_ns = last[0] + tick_ns, last[1]
        reads = [shown_ns, round(next_ns + tick_ns / 4), round(next_ns + 1.25 * tick_ns)]
        if half_ns > WIDE_NS and next_ns - shown_ns > half_ns:
            reads.insert(1, round(next_ns))  # which halves what is open about the phase
        if self._lag is not None and self._is_lag_open:
            probe_s = self._lag.probe_s(tick_ns * NS, (half_ns + self.clock.spread_ns) * NS)
            if probe_s is not None:  # between the last two
                since_ns = probe_s / NS
                reads.insert(-1, round(next_ns + (since_ns if since_ns > tick_ns / 4 else tick_ns + since_ns)))
        if shown_ns > edge_ns:  # the tick before, which is not over yet
            reads.insert(0, max(edge_ns, shown_ns - round(tick_ns)))
        return reads

    def is_settled(self, edge_ns: int) -> bool:
        """Whether nothing that is read later could tell the energy at an edge better."""
        newest_ns = self.newest_ns()
        if self.clock is None or self._method != COUNTER:
            return newest_ns + self._reach_ns() >= edge_ns + self._late_ns()
        edge_ns += max(round(self._sensor.lag_s / NS), 0)
        last = self.clock.before(edge_ns)
        tick_ns = self.clock.tick_ns
        return newest_ns >= (edge_ns + 2 * tick_ns if last is None else last[0] + 2.05 * tick_ns + last[1])

    def _late_ns(self) -> int:
        """Return how long after an edge a reading tells of it, where no ticks are known and it is worth waiting."""
        late_ns = self._shift_ns()
        return late_ns if late_ns >= LEAST_TICK_S / NS else 0

    def _reach_ns(self) -> int:
        """Return for how long after a reading its power stands: until the sensor's next update, or our next look."""
        if self._method == COUNTER:
            return 0
        look_ns = self._longest_gap_ns // 5 if self._device.only_power else 0
        return max(round(self._sensor.tick_s / NS), look_ns)

    def _standing(self, start_ns: int, end_ns: int) -> EnergyAmount:
        """Return the energy of a sensor that has been read once."""
        (point,) = self._points
        from_ns, to_ns = max(start_ns, point.time_ns), min(end_ns, point.time_ns + self._reach_ns())
        if to_ns <= from_ns or point.power_w is None:
            return NOT_MEASURED
        covered_s = (to_ns - from_ns) * NS
        joules = point.power_w * covered_s
        return EnergyAmount(joules, covered_s, gain_j=self._sensor.gain_error * joules)

    def forget_before(self, time_ns: int) -> None:
        """Drop the readings that no stretch from ``time_ns`` on needs."""
        keep_ns = time_ns - round(3 * self._sensor.tick_s / NS)
        while len(self._points) > 2 and self._points[1].time_ns <= keep_ns:
            self._points.popleft()
        for edge_ns in [edge for edge in self._edges if edge < time_ns]:
            del self._edges[edge_ns]

    @property
    def margin_ns(self) -> int:
        """How far around a moment readings may tell of the energy at it."""
        sensor = self._sensor
        return max(round((6 * sensor.tick_s + sensor.lag_s + sensor.average_s) / NS), LEAST_MARGIN_NS)

    def fold(self, edges_ns: Collection[int], until_ns: int, margin_ns: int) -> None:
        """Make one step of all steps in which no stretch that is to come begins or ends; running totals stay exact.

        Args:
            edges_ns: moments at which a stretch may begin or end.
            until_ns: ... as at every one from here on.
            margin_ns: how far around them readings are kept.
        """
        bases = [base.time_ns for base in (self._trust, self._left, self._moved) if base is not None]
        times = [point.time_ns for point in self._points]
        for run in runs_between(times, [*edges_ns, *self._edges, *bases], until_ns, margin_ns):
            points = list(self._points)
            first, last = points[run.start], points[run.stop - 1]
            methods = {point.method for point in points[run.start + 1 : run.stop] if point.method}
            step = last._replace(
                method=max(methods, key=METHODS.index) if methods else None,
                estimated=last.estimated_j - first.estimated_j > (last.total_j - first.total_j) / 2,
                variance_j2=last.variances_j2 - first.variances_j2,
            )
            self._points = deque([*points[: run.start + 1], step, *points[run.stop :]])

    # --- levels ---

    def _level(self, time_ns: int) -> _Level:
        """Return the cumulative energy at a moment; the same again for the same moment, though more is known then."""
        if time_ns not in self._edges:
            self._learn_lag(time_ns)
            anchors = self._anchors(time_ns) if self.clock is not None else None
            level = self._between_ticks(time_ns, anchors) if anchors else self._between_points(time_ns)
            # What has been learnt since may contradict what was told, but no window is negative.
            least_j = max((edge.joules for at_ns, edge in self._edges.items() if at_ns < time_ns), default=-math.inf)
            most_j = min((edge.joules for at_ns, edge in self._edges.items() if at_ns > time_ns), default=math.inf)
            told_j = min(max(level.joules, least_j), most_j)
            self._edges[time_ns] = level._replace(
                joules=told_j, estimated_j=self._estimated_j(told_j), shift_s2=self._shift_s2(time_ns)
            )
        return self._edges[time_ns]

    def _anchors(self, time_ns: int) -> dict[int, float] | None:
        """Return the counter's level at the ticks around a moment, by their distance from the tick at or before it.

        ``None`` where the clock or the counter does not tell.
        """
        assert self.clock is not None
        moment_ns = time_ns + self._sensor.lag_s / NS
        last = self.clock.before(moment_ns)
        if last is None:
            return None
        tick_ns, anchors = self.clock.tick_ns, {}
        implied: dict[int, float] = {}
        low = bisect.bisect_left(self._points, round(last[0] - 2 * tick_ns), key=lambda point: point.time_ns)
        for index in range(low, len(self._points)):
            point = self._points[index]
            if point.time_ns > last[0] + 4 * tick_ns:
                break
            told = self.clock.tells(point.time_ns)
            if told is None or (point.method != COUNTER and index > 0):
                continue
            tick = round((told[0] - last[0]) / tick_ns)
            anchors[tick] = point.total_j
            # It is that of the tick before, until the next, which a counter that lags shows later than power does.
            is_of_tick = self._sensor.is_held and point.time_ns - told[0] < tick_ns - self._sensor.lag_s / NS
            if is_of_tick and point.power_w is not None:
                implied.setdefault(tick - 1, point.total_j - point.power_w * tick_ns * NS)
        anchors = {**implied, **anchors}
        return anchors if 0 in anchors or 1 in anchors else None

    @property
    def _is_lag_open(self) -> bool:
        """Whether the lag is a guess that the readings of a run can better."""
        known = self._known
        is_alike = known.is_held and known.duty == 1.0 and not known.lag_s
        return self._lag is not None and is_alike and known.lag_error_s >= MIN_ERROR_S

    def _learn_lag(self, time_ns: int) -> None:
        """Learn from the readings around a moment how late the counter is, or that it cannot be told any more."""
        if self._lag is None or not self._is_lag_open or self.clock is None:
            return
        if (last := self.clock.before(time_ns)) is None:
            return
        tick_s, open_s = self.clock.tick_ns * NS, (last[1] + self.clock.spread_ns) * NS + self._known.call_s / 2
        low = bisect.bisect_left(self._points, round(last[0] - self.clock.tick_ns), key=lambda point: point.time_ns)
        self._lag.learn(
            [
                TickRead((point.time_ns - last[0]) * NS, point.total_j, point.power_w)
                for point in islice(self._points, max(low, 1), None)
                if point.method == COUNTER and point.power_w is not None
            ],
            tick_s,
            open_s,
        )
        found = self._lag.lag_s(tick_s)
        is_better = found is not None and found[1] < self._known.lag_error_s
        self._sensor = (
            replace(self._known, lag_s=found[0], lag_error_s=found[1]) if found and is_better else self._known
        )

    def _between_ticks(self, time_ns: int, anchors: dict[int, float]) -> _Level:
        assert self.clock is not None
        tick_s = self.clock.tick_ns * NS
        last = self.clock.before(time_ns + self._sensor.lag_s / NS)
        assert last is not None
        since_s = (time_ns + self._sensor.lag_s / NS - last[0]) * NS
        before_w = _mean_w(anchors, -1, 0, tick_s)
        after_w = _mean_w(anchors, 1, 2, tick_s)
        if 0 in anchors and 1 in anchors:
            joules, variance_j2, power_w = in_tick(
                since_s, tick_s, anchors[1] - anchors[0], before_w, after_w, self._powers
            )
            return _Level(anchors[0] + joules, variance_j2, power_w)
        local_w = self._power_at(time_ns)
        # One side of the tick was read: power leads there.
        if 0 in anchors:
            power_w = local_w or before_w or 0.0
            return _Level(anchors[0] + power_w * since_s, self._powers.jump_j2(since_s), power_w)
        power_w = local_w or after_w or 0.0
        rest_s = tick_s - since_s
        return _Level(anchors[1] - power_w * rest_s, self._powers.jump_j2(rest_s), power_w)

    def _between_points(self, time_ns: int) -> _Level:
        """Return the level between two readings, for counters that move all the time, unknown ticks, and power."""
        shift_ns = self._shift_ns()
        times = _Times(self._points, shift_ns)
        index = min(max(bisect.bisect_right(times, time_ns), 1), len(self._points) - 1)
        first, second = self._points[index - 1], self._points[index]
        first_ns, second_ns = times[index - 1], times[index]
        span_s = (second_ns - first_ns) * NS
        since_s = (time_ns - first_ns) * NS
        joules = second.total_j - first.total_j
        mean_w = self._mean_w(index) if second.method else 0.0
        first_w = first.power_w if first.power_w is not None else mean_w
        second_w = second.power_w if second.power_w is not None else mean_w
        tick_j2 = (mean_w * self._sensor.tick_s) ** 2 / 12 if self._method == COUNTER else 0.0
        if not 0.0 <= since_s <= span_s:  # before the first or after the last reading: the shift asks for more
            return _Level(
                (first.total_j if since_s < 0 else second.total_j)
                + (first_w * since_s if since_s < 0 else second_w * (since_s - span_s)),
                tick_j2 + self._powers.jump_j2(min(abs(since_s), abs(since_s - span_s))),
                first_w if since_s < 0 else second_w,
            )
        if second.method is None:
            return _Level(first.total_j, 0.0, 0.0)
        rest_s = span_s - since_s
        local_w = first_w + (second_w - first_w) * since_s / span_s
        share_j = (first_w + local_w) / 2 * since_s
        total_j = (first_w + second_w) / 2 * span_s
        # The counter's step is exact; what power says differently is spread in proportion to time.
        share_j += (joules - total_j) * since_s / span_s
        variance_j2 = self._powers.bridge_j2(since_s, rest_s, second_w - first_w)
        return _Level(first.total_j + min(max(share_j, 0.0), joules), tick_j2 + variance_j2, local_w)

    def _mean_w(self, index: int) -> float:
        """Return the mean power around a step, over two ticks at least: within one a counter stands or jumps."""
        first = second = index
        tick_ns = self._sensor.tick_s / NS
        while first > 0 and (first == second or self._points[index].time_ns - self._points[first].time_ns < tick_ns):
            first -= 1
        while second < len(self._points) - 1 and self._points[second].time_ns - self._points[index].time_ns < tick_ns:
            second += 1
        span_ns = self._points[second].time_ns - self._points[first].time_ns
        return (self._points[second].total_j - self._points[first].total_j) / (span_ns * NS)

    def _shift_ns(self) -> int:
        """Return by how much readings are older than they look, on average."""
        if self._method == COUNTER:
            return round((self._sensor.lag_s + self._sensor.tick_s / 2) / NS)
        return round((self._sensor.average_s / 2 if self._method == AVERAGE else self._sensor.lag_s) / NS)

    def _shift_s2(self, time_ns: int) -> float:
        """Return the variance of when readings are from, as far as is known now."""
        last = self.clock.before(time_ns) if self.clock is not None else None
        phase_s = last[1] * NS if last is not None else 0.0
        return (self._sensor.lag_error_s**2 + phase_s**2) / 3

    def _power_at(self, time_ns: int) -> float | None:
        index = bisect.bisect_left(self._points, time_ns, key=lambda point: point.time_ns)
        near = [self._points[i] for i in (index - 1, index) if 0 <= i < len(self._points)]
        known = [point for point in near if point.power_w is not None]
        return min(known, key=lambda point: abs(point.time_ns - time_ns)).power_w if known else None

    def _holes_ns(self, time_ns: int) -> int:
        index = bisect.bisect_left(self._points, time_ns, key=lambda point: point.time_ns)
        if index >= len(self._points):
            return self._points[-1].holes_ns
        point = self._points[index]
        return point.holes_ns if point.method else point.holes_ns - (point.time_ns - time_ns)

    def _estimated_j(self, total_j: float) -> float:
        """Return how much of a cumulative energy was estimated."""
        index = bisect.bisect_left(self._points, total_j, key=lambda point: point.total_j)
        if index >= len(self._points):
            return self._points[-1].estimated_j
        point = self._points[index]
        return point.estimated_j - (point.total_j - total_j if point.estimated else 0.0)

    def _variances_j2(self, time_ns: int) -> float:
        """Return the running total of variances at a moment."""
        index = bisect.bisect_left(self._points, time_ns, key=lambda point: point.time_ns)
        if index >= len(self._points):
            return self._points[-1].variances_j2
        point = self._points[index]
        if index == 0:
            return point.variances_j2
        before = self._points[index - 1]
        rest = (point.time_ns - time_ns) / (point.time_ns - before.time_ns)
        return point.variances_j2 - rest * point.variance_j2

    def method_in(self, from_ns: int, to_ns: int) -> str | None:
        """Return the worst method that was used in a stretch."""
        used = {
            point.method
            for before, point in zip(self._points, list(self._points)[1:], strict=False)
            if point.method and point.time_ns > from_ns and before.time_ns < to_ns
        }
        return max(used, key=METHODS.index) if used else None

    def _alias_j2(self, span_s: float) -> float:
        """Return the variance that comes from measuring only part of each tick."""
        if not self._measures_part:
            return 0.0
        ticks = span_s / self._sensor.tick_s
        # Less than that of independent ticks it is only where each iteration draws power as the one before: not known.
        inflation = 1.0 if self._rhythm is None else max(beat(*self._rhythm, self._sensor.tick_s, span_s), 1.0)
        return ticks * inflation * self._powers.alias_w2(self._sensor.duty) * self._sensor.tick_s**2

    @property
    def _measures_part(self) -> bool:
        return self._sensor.duty < 1.0 and self._method == COUNTER and self._sensor.tick_s > 0

    def aliasing_error(self, iterations: int, energy: EnergyAmount, durations_s: Sequence[float]) -> float | None:
        """Return the error of the run to date if iterations keep step with the sensor; ``None`` if they do not.

        It is a half-width of 95 % as a share of the energy, at most 1. Call it once for each window, in order.
        How much power changes within an iteration may be what the sensor does not see: it is taken to be as much as
        was ever seen.

        Args:
            iterations: of the window.
            energy: of the window.
            durations_s: of the last iterations, this window's among them.
        """
        self._run_iterations += iterations
        self._run_j += energy.joules or 0.0
        count = self._run_iterations
        if not self._measures_part or self._run_j <= 0 or count < MIN_RHYTHM or not durations_s:
            return None
        tick_s = self.clock.tick_ns * NS if self.clock is not None else self._sensor.tick_s
        inflation = beat_of(durations_s, tick_s, count)
        swing_w = self._powers.most_w - self._powers.least_w
        deviation_j = swing_w * tick_s * math.sqrt(count * inflation * STEPS_J2)
        error = min(NORMAL_95 * deviation_j / self._run_j, 1.0)
        return error if inflation >= LOCKED * count and error > LOCKED_ERROR else None

    def _cross_check(self) -> None:
        point = self._points[-1]
        before = self._points[-2] if len(self._points) > 1 else point
        is_near = point.time_ns - before.time_ns <= self._longest_gap_ns
        is_counted = point is before or (point.method == COUNTER and not point.estimated)
        if self._method != COUNTER or point.power_w is None or not (is_near and is_counted):
            self._check.forget()
        elif told := self._check.add(point.time_ns, point.total_j, point.power_w, self._powers):
            self._events.append(("energy_disagreement", told))


def runs_between(times_ns: Sequence[int], edges_ns: Collection[int], until_ns: int, margin_ns: int) -> Iterator[range]:
    """Yield the runs of at least three moments that lie further than a margin from every edge, as their indices.

    The last run comes first, so that what is taken out of one does not move those that follow.

    Args:
        times_ns: moments, in order.
        edges_ns: moments to stay away from.
        until_ns: where the runs end, less the margin.
        margin_ns: how far to stay away.
    """
    bounds = sorted({min(edge_ns, until_ns) for edge_ns in edges_ns} | {until_ns})
    for before_ns, after_ns in reversed(list(pairwise([-margin_ns, *bounds]))):
        start = bisect.bisect_right(times_ns, before_ns + margin_ns)
        stop = bisect.bisect_left(times_ns, after_ns - margin_ns)
        if stop - start >= 3:
            yield range(start, stop)


class _Times(Sequence[int]):
    """The times of points, shifted, as a sequence to bisect."""

    def __init__(self, points: deque[_Point], shift_ns: int) -> None:
        self._points, self._shift_ns = points, shift_ns

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return self._points[index].time_ns - self._shift_ns


def _clock_of(sensor: Sensor) -> TickClock | None:
    if sensor.tick_s < LEAST_TICK_S or sensor.tick_error_s > MOST_OPEN * sensor.tick_s:
        return None
    return TickClock(sensor.tick_s, max(sensor.tick_error_s, 1e-5 * sensor.tick_s))


def _usable(reading: float | None) -> float | None:
    return reading if reading is not None and math.isfinite(reading) and reading >= 0 else None


def _mean_w(anchors: dict[int, float], first: int, second: int, tick_s: float) -> float | None:
    if first in anchors and second in anchors:
        return (anchors[second] - anchors[first]) / ((second - first) * tick_s)
    return None


def _what_happened(step_j: float) -> str:
    return f"it went back by {-step_j:.0f} J" if step_j < 0 else f"it jumped ahead by {step_j:.0f} J"


def _nearer(one: float, other: float, target: float | None) -> bool:
    return target is not None and abs(one - target) < abs(other - target)
