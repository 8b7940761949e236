"""The measurement of a rank: reports of windows, from records of the ring and samples of the devices."""

from __future__ import annotations

import math
import time
from itertools import islice

from msgspec.structs import replace

from effllm.agent.rank_devices import RankDevices
from effllm.agent.rank_memory import RankMemory
from effllm.agent.spans import Spans
from effllm.agent.track import PAY_AFTER_S
from effllm.agent.trainer import Trainer
from effllm.agent.values import InstrumentValues
from effllm.agent.window import WindowCutter
from effllm.network.transport import Outbox
from effllm.records.clock import unix_minus_monotonic_ns
from effllm.records.rank import MAX_NAMES, RankReport
from effllm.records.ring import END as END_RECORD
from effllm.records.ring import ITERATION, MEMORY, SPAN, STATUSES, STEP, VALUES, Slot

LOSS_WAIT_S = 0.5  # maximum wait for the loss of a window, which is recorded after the window's end
AGAIN_S = 0.05  # seconds between two checks of a sensor that is being calibrated
#: Samples are folded if a device has more than FOLD_FROM samples or energy readings; checked every FOLD_EVERY_S.
FOLD_FROM, FOLD_EVERY_S = 600, 30.0


class Measuring:
    """Cuts the windows of a rank; the first window includes the existing records of the ring.

    Args:
        trainer: the rank's trainer.
        devices: the rank's devices, already started.
    """

    def __init__(self, trainer: Trainer, devices: RankDevices) -> None:
        self._trainer, self.devices = trainer, devices
        self.outbox = Outbox(trainer.config.history_size)
        self.status: str | None = None  # final status of the trainer
        self.end_ns = 0
        self._next_fold_s = 0.0
        self._spans, self._has_spans = Spans(trainer.board), False
        self.values = InstrumentValues(trainer.board.values.write)
        self.memory = RankMemory(trainer.pid, trainer.config.log_interval, trainer.facts.first_iteration)
        slots, origin_ns = self._origin()
        self.cutter = WindowCutter(
            agent=trainer.agent,
            rank=trainer.rank,
            log_interval=trainer.config.log_interval,
            offset=trainer.facts.first_iteration,
            origin_ns=origin_ns,
            unix_minus_monotonic_s=unix_minus_monotonic_ns() * 1e-9,
        )
        self._add(slots)

    @property
    def end_time_s(self) -> float:
        """End of the trainer, by the clock of reports."""
        return self.cutter.unix_s(self.end_ns)

    def time_s(self) -> float:
        """Return the current time of the clock of reports."""
        return self.cutter.unix_s(time.monotonic_ns())

    def take(self, *, is_trainer_gone: bool) -> None:
        self.devices.take()
        self._add(self._trainer.ring.read())
        if is_trainer_gone and self.status is None:
            self._add(self._trainer.ring.read())
            self.status, self.end_ns = self._trainer.exit_status.word(), time.monotonic_ns()
        self.devices.calibrate(has_begun=self.cutter.last_ordinal > 0 or self._has_spans)
        self.memory.look(self.cutter.last_ordinal, self.devices.series, self._trainer.facts.max_positions)

    def cut(self, now_s: float) -> None:
        """Make reports of the windows that have ended and whose edges are settled, and answer requests for spans."""
        # An edge needs samples of the two ticks after the edge. The next window may end before these ticks, so the
        # samples for all open edges are requested.
        for edge_ns in sorted({*self.cutter.edges_ns, *self._spans.edges_ns}):
            self.devices.ask(edge_ns)
        self._spans.answer(self.devices, now_s)
        while (ended := self.cutter.ended) is not None:
            is_settled = self.devices.is_settled(ended.end_ns)
            _, ordinal, _, _ = self._trainer.ring.state()
            moved_on = ordinal > ended.ordinal or self.cutter.last_ordinal > ended.ordinal or self.status is not None
            waited_s = now_s - ended.end_ns * 1e-9
            if not is_settled and waited_s > PAY_AFTER_S:
                self.devices.ask(ended.end_ns, is_last=True)
            if (not is_settled and waited_s < self.devices.patience_s) or (not moved_on and waited_s < LOSS_WAIT_S):
                return
            report = self.cutter.cut(self.devices.series)
            if report is not None:
                self._send(report)

    def due_s(self, now_s: float) -> float:
        """Return the time of the next check of an ended window or span; infinite without an ended window or span."""
        ends_ns = [*self.cutter.edges_ns[:1], *self._spans.edges_ns[:1]]
        if not ends_ns:
            return math.inf
        for wait_s in sorted((LOSS_WAIT_S, PAY_AFTER_S, self.devices.patience_s)):
            if min(ends_ns) * 1e-9 + wait_s > now_s:
                return min(ends_ns) * 1e-9 + wait_s
        return now_s + (AGAIN_S if self.devices.is_calibrating else 0.0)

    def fold(self, now_s: float) -> None:
        """Sum up samples while no window ends.

        During a long stall, samples of 0.9 kB would otherwise need 75 MB of memory per day, and each requested span
        adds two readings and a level of the energy.
        """
        if now_s < self._next_fold_s:
            return
        self._next_fold_s = now_s + FOLD_EVERY_S
        series = self.devices.series
        if not any(max(one.num_kept, len(one.energy.readings)) > FOLD_FROM for one in series):
            return
        until_ns = time.monotonic_ns()
        self._add(self._trainer.ring.read())
        edges_ns = [*self.cutter.moments_ns, *self._spans.moments_ns, self._trainer.ring.state()[2]]
        if not self.devices.has_baseline:
            edges_ns += self._trainer.facts.baseline_ns
        for one in series:
            one.fold(edges_ns, until_ns)

    def is_end_settled(self) -> bool:
        """Request the samples at the trainer's end; return whether all samples have been read."""
        self.devices.ask(self.end_ns, is_last=True)
        self.devices.take()
        return self.devices.is_settled(self.end_ns)

    def finish(self) -> None:
        self._trainer.ring.skip_torn()
        self._add(self._trainer.ring.read())
        self._spans.answer(self.devices, time.monotonic(), is_end=True)
        while (report := self.cutter.cut(self.devices.series)) is not None:
            self._send(report)
        self._send(self.cutter.cut_rest(self.devices.series, self.end_ns))

    def _send(self, report: RankReport) -> None:
        values = self.values.take(
            report.window, self._trainer.facts.value_names, time.monotonic(), is_last=report.final
        )
        allocator, of_memory = self.memory.take(report.window, is_last=report.final)
        values = dict(islice({**values, **of_memory}.items(), MAX_NAMES))
        if values or allocator is not None:
            report = replace(report, values=values or None, allocator=allocator)
        self.outbox.add(report)

    def _origin(self) -> tuple[list[Slot], int]:
        """Return the existing records, and the start of the first window."""
        origin_ns = time.monotonic_ns()
        self.devices.take()
        series = self.devices.series
        if series and series[0].newest_ns:
            origin_ns = max(one.oldest_ns for one in series)  # the first time at which all devices have samples
        slots = self._trainer.ring.read()
        begun = [slot.start_ns for slot in slots if slot.kind == ITERATION and slot.ordinal == 1]
        state, ordinal, since_ns, _ = self._trainer.ring.state()
        if state == STEP and ordinal == 1:
            begun.append(since_ns)
        return slots, min([origin_ns, *begun])

    def _add(self, slots: list[Slot]) -> None:
        for slot in slots:
            if slot.kind == END_RECORD and self.status is None:
                self.status, self.end_ns = STATUSES[slot.what], slot.end_ns
            if slot.kind == MEMORY:
                self.memory.add(slot)
            elif slot.kind == SPAN:
                self._has_spans = True
                self._spans.add(slot)
            elif slot.kind == VALUES:
                self.values.add(slot, self.cutter.window_of(slot.ordinal))
            else:
                self.cutter.add(slot)
