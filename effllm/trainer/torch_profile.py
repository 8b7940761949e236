"""Profiles every Nth iteration with torch.profiler, to measure its exposed communication.

This module is only used if EFFICIENTLLM_PROFILE_EVERY is set.  The code runs in the training process and uses
the torch that the training has imported.  Another profiler always has priority: a second profiler takes the session
of the first profiler, and then both profilers have no records.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from effllm.config import switches
from effllm.records.timeline import Interval, Split, device_kind, group_kind, host_kind, split_iteration
from effllm.trainer.cuda_graphs import GRAPHS

#: If one of these variables is set, Nsight or another tool uses CUPTI, and CUPTI allows only one user.
CUPTI_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH")

#: Maximal number of records of one iteration; reading this many records takes about 2 s.
MAX_RECORDS = 1_000_000
#: Profiling ends after this many consecutive profiles without records.
MAX_FAILURES = 2

#: Before this version of CUDA, CUPTI crashes beside CUDA graphs (pytorch#112507, #150957).
FIXED_CUPTI = "12.6"

#: A variable and its value, set before the first profile: otherwise Kineto, torch's profiler, logs lines at each start
#: and stop from PyTorch 2.13 on.
QUIET_KINETO = ("KINETO_LOG_LEVEL", "6")


_profiling: weakref.WeakSet[TorchProfile] = weakref.WeakSet()  # the profilers to stop before a fork


class Profiled(NamedTuple):
    """The profile of one iteration, and its cost."""

    split: Split
    is_of_device: bool  # whether the times are those of a device, not of the host
    cost_ns: int  # time to start, stop and read the profiler, outside of the iteration


class TorchProfile:
    """Profiles every Nth iteration, unless another profiler runs.

    ``warn`` is called with a line for the user, once, when profiling ends because of an error.
    """

    def __init__(self, every: int, warn: Callable[[str], None], torch: Any = None) -> None:
        self._every, self._warn = every, warn
        self._torch = torch
        self._others: OtherProfilers | None = None  # from the first iteration on
        self._profiler: Any = None  # while it runs
        self._is_of_device = False  # whether the last started profiler records the device, not the host
        self.thread_id = 0  # of the training loop
        self._start_ns = 0  # start of the profile on the wall clock, which the profiler uses
        self._cost_ns = 0  # time to start the profiler
        self._num_failures = 0  # number of consecutive profiles without records
        self._is_off = every <= 0
        if not self._is_off:
            switches.set_default(*QUIET_KINETO)
            GRAPHS.watch_class(getattr(getattr(torch, "cuda", None), "CUDAGraph", None))

    def start_if_due(self, number: int) -> None:
        """Start profiling if this iteration is to be profiled; called before the iteration's start is stamped."""
        if self._is_off:
            return
        began_ns = time.monotonic_ns()
        try:
            if self._profiler is not None:  # the previous iteration did not end
                self.abandon()
            if self._others is None and not self._watch_other_profilers():
                return
            if number % self._every == 0 and not self._has_other_profiler():
                self._start_profiler()
                self._cost_ns = time.monotonic_ns() - began_ns
        except Exception as error:  # noqa: BLE001 - no exception from torch may end a training step
            self._give_up(f"{type(error).__name__}: {error}")

    def end(self, ended_ns: int) -> Profiled | None:
        """Stop profiling after the end stamp, and return the profile; ``None`` if there is no profile.

        ``ended_ns`` is on the monotonic clock, and may be earlier than the call.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        began_ns = time.monotonic_ns()
        end_ns = time.time_ns() - max(began_ns - ended_ns, 0)  # on the wall clock, as the profiler's records
        try:
            with self._ignoring_own_calls():
                profiler.__exit__(None, None, None)
            split = self._read_split(profiler, end_ns)
            # Free the records now (10 MB for 8,000 records); a reference cycle would keep them in memory for longer.
            profiler.kineto_results = None
            if split is not None:
                self._num_failures = 0
                return Profiled(split, self._is_of_device, self._cost_ns + time.monotonic_ns() - began_ns)
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                what = "no kernel" if self._is_of_device else "no operator"
                self._give_up(f"the profile had {what}; another profiler may use CUPTI")
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(f"{type(error).__name__}: {error}")
        return None

    def abandon(self) -> None:
        """Stop profiling without a result, because the iteration will not end or another profiler begins."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            try:
                self._stop_without_reading()
            except Exception as error:  # noqa: BLE001 - as above
                self._give_up(f"{type(error).__name__}: {error}")

    def close(self, failed: bool = False) -> None:
        """Stop profiling permanently, and restore torch's functions.

        After a failure, a communication may never end, and stopping a profile of the device may hang.
        """
        if failed and self._is_of_device:
            self._profiler = None
        self.abandon()
        self._is_off = True
        if self._others is not None:
            self._others.restore_functions()

    def _watch_other_profilers(self) -> bool:
        """Detect other profilers from now on; ``False`` without torch, or if another tool uses CUPTI."""
        torch = self._torch = self._torch or sys.modules.get("torch")
        if torch is None:
            return False
        variable = next((name for name in CUPTI_VARIABLES if switches.process_environ().get(name)), None)
        if variable is not None:
            self._give_up(f"{variable} is set, so another profiler uses CUPTI")
            return False
        self._others = OtherProfilers(torch.autograd.profiler, self.abandon)
        return True

    def _has_other_profiler(self) -> bool:
        """Whether another profiler runs or is prepared to run."""
        autograd = self._torch.autograd
        return (
            (self._others is not None and self._others.are_profiling)
            or bool(getattr(autograd, "_profiler_enabled", bool)())
            or bool(getattr(autograd.profiler, "_is_profiler_enabled", False))
        )

    def _start_profiler(self) -> None:
        cuda = getattr(self._torch, "cuda", None)
        self._is_of_device = bool(cuda is not None and cuda.is_initialized())
        if self._is_of_device and GRAPHS.num_captured and _is_before(self._torch.version.cuda, FIXED_CUPTI):
            raise RuntimeError(f"CUDA graphs are used, and CUPTI crashes with CUDA graphs before CUDA {FIXED_CUPTI}")
        # torch.profiler.profile uses this class, too, but its start also imports the compiler.
        profile = self._torch.autograd.profiler.profile
        named: dict[str, Any] = {"use_kineto": True, "use_cpu": not self._is_of_device}
        if self._is_of_device:
            has_use_device = "use_device" in inspect.signature(profile).parameters  # from PyTorch 2.1 on
            named |= {"use_device": "cuda"} if has_use_device else {"use_cuda": True}
        profiler = profile(**named)
        self._profiler, self.thread_id = profiler, threading.get_ident()
        _profiling.add(self)
        with self._ignoring_own_calls():
            profiler.__enter__()
        self._start_ns = time.time_ns()

    def _ignoring_own_calls(self) -> contextlib.AbstractContextManager[None]:
        assert self._others is not None
        return self._others.ignored()

    def _stop_without_reading(self) -> None:
        # The profiler's __exit__ would wait for the device, which is not necessary here.
        module = self._torch.autograd.profiler
        with self._ignoring_own_calls():
            module._disable_profiler()
            getattr(module, "_run_on_profiler_stop", lambda: None)()

    def _read_split(self, profiler: Any, end_ns: int) -> Split | None:
        results = getattr(profiler, "kineto_results", None)
        if results is None:
            raise RuntimeError("this version of torch has no kineto_results")
        events = results.events()
        if len(events) > MAX_RECORDS:
            raise RuntimeError(f"an iteration has {len(events):,} records; to read them would take too long")
        if self._is_of_device:
            return device_split(events)
        return _split(events, self._start_ns, end_ns, host_kind)

    def _give_up(self, why: str) -> None:
        self._is_off = True
        profiler, self._profiler = self._profiler, None
        if profiler is not None:  # the profiler failed during its start
            with contextlib.suppress(Exception):
                self._stop_without_reading()
        self._warn(f"computation and communication are not separated; torch.profiler cannot be used: {why}")


def _is_before(version: str | None, other: str) -> bool:
    """Whether a version of CUDA is older than another; ``None``: torch is built for other devices."""
    numbers, other_numbers = ([int(part) for part in text.split(".")[:2]] for text in (version or other, other))
    return numbers < other_numbers


class OtherProfilers:
    """Detects other profilers in this process: it wraps three functions that every profiler of torch calls.

    ``make_room`` is called before another profiler is prepared or started.
    """

    def __init__(self, module: Any, make_room: Callable[[], None]) -> None:
        self._module, self._make_room = module, make_room
        self.are_profiling = False  #: whether another profiler is prepared or runs
        self._is_ignoring = False  # whether the running call is effllm's own
        self._replaced: dict[str, tuple[Any, Any]] = {}  # name of a function -> the original, and its replacement
        for name, begins in (("_prepare_profiler", True), ("_enable_profiler", True), ("_disable_profiler", False)):
            original = getattr(module, name)  # raises in a version of torch without this function
            self._replaced[name] = original, self._watched(original, begins)
        for name, (_, watched) in self._replaced.items():
            setattr(module, name, watched)

    def _watched(self, original: Any, begins: bool) -> Any:
        def watched(*arguments: Any, **named: Any) -> Any:
            if not self._is_ignoring:
                if begins:
                    self._make_room()
                self.are_profiling = begins
            return original(*arguments, **named)

        return watched

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Ignore all calls in this ``with`` block, because they are effllm's own."""
        self._is_ignoring = True
        try:
            yield
        finally:
            self._is_ignoring = False

    def restore_functions(self) -> None:
        """Restore torch's functions, except functions that other code has replaced in the meantime."""
        for name, (original, watched) in self._replaced.items():
            if getattr(self._module, name, None) is watched:
                setattr(self._module, name, original)


def device_split(events: Any) -> Split | None:
    """Return the split of an iteration from the records of devices; ``None`` if there are no records.

    The device runs behind the host, so the iteration is measured on the device, from its first record to its last.
    The first record belongs to the first kernel that was launched in the iteration.
    """
    on_device = [event for event in events if not _is_no_device_work(event)]
    if not on_device:
        return None
    starts_ends = [_start_and_end_ns(event) for event in on_device]
    return _split(on_device, min(s for s, _ in starts_ends), max(e for _, e in starts_ends), device_kind)


def _split(events: Any, start_ns: int, end_ns: int, kind_of: Callable[[str], str | None]) -> Split | None:
    """Return the split of an iteration; ``kind_of`` is `device_kind` or `host_kind`, of `records.timeline`."""
    kinds: dict[str, str | None] = {}  # kinds by name: there are few names, but many records of each
    computing: list[Interval] = []
    communicating: list[tuple[str, int, int]] = []
    for event in events:
        name = event.name()
        kind = kinds[name] if name in kinds else kinds.setdefault(name, kind_of(name))
        if kind is None:
            continue
        interval = _start_and_end_ns(event)
        if kind:  # "" is computation
            communicating.append((_group_kind(event) or kind, *interval))
        else:
            computing.append(interval)
    if not computing and not communicating:
        return None
    return split_iteration(start_ns, end_ns, computing, communicating)


def _start_and_end_ns(event: Any) -> Interval:
    if hasattr(event, "start_ns"):
        start_ns = event.start_ns()
        return start_ns, start_ns + event.duration_ns()
    start_ns = event.start_us() * 1000  # PyTorch before 2.3
    return start_ns, start_ns + event.duration_us() * 1000


def _is_no_device_work(event: Any) -> bool:
    """Whether a record is of the host, or a range that the program has marked, and so no work of a device."""
    if str(event.device_type()).endswith("CPU"):
        return True
    activity = str(event.activity_type()) if hasattr(event, "activity_type") else ""
    return "annotation" in activity or "sync" in activity or "overhead" in activity


def _group_kind(event: Any) -> str | None:
    """Return the kind of a communication's process group; ``None`` if the record does not have the group."""
    text = event.metadata_json() if hasattr(event, "metadata_json") else ""
    if "Process Group" not in text:
        return None
    try:
        metadata = json.loads(text if text.startswith("{") else f"{{{text}}}")
    except ValueError:
        return None
    return group_kind(f"{metadata.get('Process Group Description', '')} {metadata.get('Process Group Name', '')}")


def _before_fork() -> None:
    """Stop profiling before a fork, because the child process would record until it ends."""
    for profile in list(_profiling):
        if threading.get_ident() == profile.thread_id:
            profile.abandon()


os.register_at_fork(before=_before_fork)
