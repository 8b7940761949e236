"""A callback of the Hugging Face Trainer: the energy of each step and of intervals of steps, on this rank's devices."""

from __future__ import annotations

import atexit
import contextlib
import math
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

from transformers.trainer_callback import TrainerCallback

from effllm.hooks import _energy_keys
from effllm.hooks import transformers as trainer_hook
from effllm.hooks._wrap import Guard, print_once
from effllm.instruments import energy_report
from effllm.instruments._energy import SpanReadings, checked, energy_amounts
from effllm.instruments.energy import ANSWER_S, RobustGPUMonitor
from effllm.records.plain_text import one_line

MAX_HISTORY = 20_000  # maximal number of entries in each history; the oldest entries are dropped and counted

_TRAINING_LOGS = ("loss", "train_runtime")  # "loss" is in the logs of steps, "train_runtime" in a training's last log
_ATTACH_GUARD = Guard("the run of a Trainer")
_active: EnergyTrackingCallback | None = None  # the callback that measures the running training


def _attach_hooks() -> None:
    trainer_hook.attach(import_module("transformers.trainer"))
    with contextlib.suppress(ImportError):  # in a version without this module, trackers have the keys with train/
        _energy_keys.wrap_rewrite_logs(import_module("transformers.integrations.integration_utils"))


class EnergyTrackingCallback(TrainerCallback):  # type: ignore[misc] # transformers is not installed where types are checked
    """Logs the energy of steps and intervals, and writes a report and four JSON files after the training.

    The values are of the devices of this rank; only the first rank logs them and writes the files. Here a step lasts
    from the end of the previous step to its own end, so it includes the data wait. An interval ends with the first step
    that ends at least ``sync_interval_s`` after the interval's start, because the callback runs only at the ends of
    steps. Values reach the logs as soon as the agent has answered, one or more steps later: ``energy_step/step`` and
    ``energy_interval/step`` are the last steps that the values include. Step values are sums over the steps since the
    last log.

    If a Trainer has several of these callbacks, only the first one measures.

    Args:
        gpu_monitor: the monitor; by default a new one.
        sync_interval_s: minimum duration of an interval.
        output_dir: folder of the JSON files; ``None`` for no files.
        carbon_intensity_kg_per_kwh: carbon intensity of the electricity; without it, no emissions are estimated.
        carbon_intensity: ``document`` sets an intensity of 0.5 kg/kWh.
        language: language of the final report, ``en`` or ``pt``.
        log: function that gets the values as a dictionary, in place of the Trainer's logs, such as ``run.log`` of a run
            to which the Trainer does not report. If the function raises an error, the values are in the Trainer's logs
            from then on.

    Raises:
        ValueError: an argument is not valid.
    """

    adds_to_logs = True  #: the hook of transformers moves this callback before the callbacks that send logs

    def __init__(
        self,
        gpu_monitor: RobustGPUMonitor | None = None,
        sync_interval_s: float = 10.0,
        *,
        output_dir: str | None = "results",
        carbon_intensity_kg_per_kwh: float | None = None,
        carbon_intensity: str | None = None,
        language: str = "en",
        log: Callable[[dict[str, float]], Any] | None = None,
    ) -> None:
        self._min_interval_s = checked(sync_interval_s, "sync_interval_s", lambda s: s > 0, "a number above 0")
        self._carbon = energy_report.checked_intensity(carbon_intensity_kg_per_kwh, carbon_intensity)  # in kg/kWh
        if language not in energy_report.LANGUAGES:
            raise ValueError(f"language={language!r} must be one of {', '.join(energy_report.LANGUAGES)}")
        if gpu_monitor is not None and not isinstance(gpu_monitor, RobustGPUMonitor):
            raise ValueError(f"gpu_monitor is {type(gpu_monitor).__name__}, not a RobustGPUMonitor")
        if log is not None and not callable(log):
            raise ValueError(f"log={log!r} is not a function")
        self._log_function = log
        self.monitor = gpu_monitor or RobustGPUMonitor()
        self._folder, self._language = output_dir, language
        self._guard, self._end_guard = Guard("the energy of steps"), Guard("the report of the energy")
        _ATTACH_GUARD(_attach_hooks)
        self._reset()

    def _reset(self) -> None:
        self._state: Any = None  # state of the Trainer; None outside of a training
        self._step_of_span: dict[int, tuple[int, float]] = {}  # number of a span -> step and epoch
        self._last_step = -1  # the last step whose end was processed
        self._first_epoch = self._last_epoch = 0.0  # before the first measured step, and after the last
        self._has_started = False  # whether the first step has begun
        self._owns_monitoring = False  # whether this callback has started the monitor, and so stops it
        # Sums of readings: of the training, of the steps since the last log, and of the open interval.
        self.total = self._since_log = self._interval = SpanReadings()
        self._new_logs: dict[str, float] = {}  # values that are not yet in the logs
        self.step_history: deque[dict[str, Any]] = deque(maxlen=MAX_HISTORY)  #: entries of the answered steps
        self.interval_history: deque[dict[str, Any]] = deque(maxlen=MAX_HISTORY)
        self._num_steps = self._num_intervals = 0

    # --- the Trainer's events ---

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin a training."""
        self._guard(self._begin, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the first step."""
        if self._state is not None and not self._has_started:
            self._has_started = True
            self._guard(self._start_first_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Request the readings of the step, and take the answers to earlier requests."""
        if self._state is not None and state.global_step != self._last_step:
            self._guard(self._end_step, state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add new values to the logs; the last log of a training also gets the final values."""
        if self._state is not None and isinstance(logs, dict) and not logs.keys().isdisjoint(_TRAINING_LOGS):
            self._guard(self._add_to_logs, state, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the files, and print the final report."""
        if self._state is not None:
            self._end_guard(self._finish, state.is_world_process_zero)

    # --- inside ---

    def _begin(self, state: Any) -> None:
        global _active
        if _active is not None and _active._state is state:
            if _active is not self:
                print_once("a Trainer has two EnergyTrackingCallbacks; only the first one measures")
            return
        if _active is not None:  # the training of the active callback has failed
            _active._end_guard(_active._finish, _active._state.is_world_process_zero)
        self._reset()
        self._state, _active = state, self
        self._first_epoch = self._last_epoch = float(state.epoch or 0.0)  # above 0 in a training that is resumed
        atexit.register(self._at_exit)
        self._owns_monitoring = not self.monitor.is_monitoring
        self.monitor.start_monitoring()

    def _start_first_step(self) -> None:
        self.monitor.measure_baseline()
        self.monitor.cut_span()  # the time before the first step is not a part of a step

    def _at_exit(self) -> None:
        if self._state is not None:  # the training has failed
            self._end_guard(self._finish, self._state.is_world_process_zero)

    def _end_step(self, state: Any) -> None:
        self._last_step = state.global_step
        if number := self.monitor.cut_span():
            self._step_of_span[number] = (state.global_step, float(state.epoch or 0.0))
            if len(self._step_of_span) > 2 * MAX_HISTORY:  # some answers were lost
                self._step_of_span.pop(next(iter(self._step_of_span)))
        self._take_answers()

    def _take_answers(self) -> None:
        for span in self.monitor.take_spans():
            step_and_epoch = self._step_of_span.pop(span.number, None)
            if step_and_epoch is None:
                continue  # a span of another user of the monitor
            step, epoch = step_and_epoch
            self._last_epoch = epoch
            self.total, self._since_log = self.total.then(span), self._since_log.then(span)
            self._interval = self._interval.then(span)
            metrics = self.monitor.metrics(span, step, epoch)
            self._num_steps += 1
            self.step_history.append(energy_report.history_entry(metrics, span, self.monitor.baseline))
            self._new_logs |= energy_report.step_logs(self._since_log, step)
            if self._interval.duration_s >= self._min_interval_s:
                self._end_interval(step, epoch)

    def _end_interval(self, step: int, epoch: float) -> None:
        interval, self._interval = self._interval, SpanReadings()
        metrics = self.monitor.metrics(interval, step, epoch)
        self._num_intervals += 1
        self.interval_history.append(energy_report.history_entry(metrics, interval, self.monitor.baseline))
        self._new_logs |= energy_report.interval_logs(interval, step)

    def _add_to_logs(self, state: Any, logs: dict[str, Any]) -> None:
        if "train_runtime" in logs:  # the training has ended
            self._wait_and_take_answers()
            final = energy_report.final_values(self.total, self._epochs, self._carbon)
            self._new_logs |= {name: value for name, value in final.items() if not math.isnan(value)}
        if state.is_world_process_zero and not self._send_values(self._new_logs):
            logs.update(self._new_logs)
        self._new_logs, self._since_log = {}, SpanReadings()

    def _send_values(self, values: dict[str, float]) -> bool:  # whether ``log`` replaces the Trainer's logs
        if self._log_function is None:
            return False
        try:
            if values:
                self._log_function(values)
        except Exception as error:  # noqa: BLE001 - the function is the script's, and the training must go on
            self._log_function = None
            line = one_line(f"{type(error).__name__}: {error}")
            print_once(f"the function log= failed; the energy is in the logs of the Trainer from now on: {line}")
        return self._log_function is not None

    @property
    def _epochs(self) -> float:
        return max(self._last_epoch - self._first_epoch, 0.0)

    def _finish(self, is_first_rank: bool) -> None:
        global _active
        self._state = None
        _active = None if _active is self else _active
        atexit.unregister(self._at_exit)
        self._guard(self._wait_and_take_answers)  # after a fault, the report has the steps before the fault
        if self._owns_monitoring:
            self.monitor.stop_monitoring()
        self.monitor.warn_if_unmeasured()
        if self._interval.num_spans:
            last = self.step_history[-1]
            self._end_interval(last["step"], last["epoch"])
        if is_first_rank:
            self._write_files_and_print()

    def _wait_and_take_answers(self) -> None:
        self.monitor.wait(ANSWER_S)
        self._take_answers()

    def _write_files_and_print(self) -> None:
        epochs = self._epochs
        final = energy_report.final_values(self.total, epochs, self._carbon)
        summary = {
            **{name.removeprefix("final_energy/"): value for name, value in final.items()},
            "carbon_intensity_kg_per_kwh": self._carbon,
            "steps": self.total.num_spans,
            "epochs": epochs,
            "duration_s": self.total.duration_s,
            "power_avg_w": self.total.power_w,
            "temperature_avg_c": self.total.temperature_c,
            "utilization_avg_percent": self.total.utilization * 100.0,
            "baseline_power_w": self.monitor.baseline.power_w,
            **energy_amounts(self.total, self.monitor.baseline),
            "steps_in_history": len(self.step_history),
            "steps_left_out_of_history": self._num_steps - len(self.step_history),
            "intervals_left_out_of_history": self._num_intervals - len(self.interval_history),
            "steps_without_an_answer": len(self._step_of_span),
        }
        if self._folder is not None:
            bodies = (list(self.step_history), list(self.interval_history), summary, self.monitor.summary())
            try:
                energy_report.write_files(self._folder, bodies)
            except OSError as error:
                print_once(f"the energy files were not written: {error}")
        print(energy_report.report(self.total, epochs, self._carbon, self._language))  # noqa: T201 - after the training
