"""Where a training loop was, from a recording of py-spy: names of functions, files and lines, and nothing else.

py-spy reads the memory of the process from outside and does not stop it.  Its form ``chrometrace`` has the time of each
change of a stack, so the samples of a stack are its time, at the rate of the recording.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from effllm.records.host_lines import COMPUTE, MAX_LINES, MAX_STACKS, CodeLine
from effllm.records.iteration_times import which_are_long
from effllm.store.regular_file import read_regular

RATE_HZ = 50
MAX_SOURCE_BYTES = 2 * 2**20
MAX_FRAMES = 64  # the innermost ones of a stack
MAX_NAME = 160
MAX_STACK, MAX_STACKS_BYTES = 4000, 100_000  # of the text of a stack, and of all stacks of a recording
OTHER = "other"
#: Kinds to which everything belongs that they call; of several, the first one counts.
KINDS_WITH_CALLEES = ("data", "compilation", "checkpoint", "logging")

#: Where a loop waits for a DataLoader worker, and where a worker fetches a batch: file in torch/utils/data, function.
WAIT_FOR_WORKER, FETCH = ("dataloader.py", "_try_get_data"), ("_utils/fetch.py", "fetch")

#: Packages whose own functions in forward, backward and optimizer give the device its work, or are the work of a CPU.
COMPUTING = ("torch/", "transformer_engine/", "megatron/core/", "apex/", "flash_attn/", "deepspeed/")
PHASES = ("forward", "backward", "optimizer")
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")

_CELL = re.compile(r".*/ipykernel_\d+/\d+\.py")  # the name that ipykernel gives a cell
_CALL = re.compile(r"(\w+)\s*\(")
_LIBRARIES = re.compile(r".*/(?:site|dist)-packages/")
_EFFLLM = str(Path(__file__).parents[1])  # effllm's wrappers are in the stacks of the loop
_STANDARD = tuple(sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}))
#: Code that Python itself and torch's compiler make.
_GENERATED = ("<frozen ", "<eval_with_key>", "<built-in")


class _Place(Struct, frozen=True):
    filename: str = ""
    line: int = 0


class _StackChange(Struct):
    """A frame that begins (``B``) or ends (``E``)."""

    ph: str
    tid: int  # as ``threading.get_ident``
    ts: int  # us since the start of the recording
    name: str = ""
    args: _Place = _Place()


class Frame(NamedTuple):
    """A frame of Python; ``path`` is its file as Python names it."""

    function: str
    path: str
    line: int


class _Row(Struct, frozen=True):
    """A row of frames.toml, which describes its fields."""

    kind: str
    file: str
    source: str
    function: str = ".*"


class _FrameTable(Struct, frozen=True):
    frame: tuple[_Row, ...]


Stacks = dict[tuple[Frame, ...], int]  # stack, outermost frame first -> number of samples
SpansUs = Sequence[tuple[float, float]]  # start and end of each, in us since the start of the recording


def stacks_of(recording: bytes, thread: int, within_us: SpansUs = ((0.0, math.inf),)) -> Stacks:
    """Return the samples of a thread's stacks.

    Args:
        recording: the output of ``py-spy record --format chrometrace --rate RATE_HZ``.
        thread: the thread, as ``threading.get_ident``; 0: the thread that runs the script.
        within_us: spans of the recording; samples outside of them do not count.

    Raises:
        msgspec.MsgspecError: the recording has another form.
    """
    present_frames: dict[int, list[Frame]] = {}  # of each thread
    changed_us: dict[int, int] = {}  # time of the last change of a thread's frames
    spent_us: dict[tuple[int, tuple[Frame, ...]], float] = {}  # thread and stack -> time
    for change in msgspec.json.decode(recording, type=list[_StackChange]):
        frames = present_frames.setdefault(change.tid, [])
        if frames and change.ts > changed_us[change.tid]:
            inside_us = (min(change.ts, end) - max(changed_us[change.tid], start) for start, end in within_us)
            key = change.tid, tuple(frames)
            spent_us[key] = spent_us.get(key, 0.0) + sum(max(us, 0.0) for us in inside_us)
        changed_us[change.tid] = change.ts
        if change.ph == "B":
            frames.append(Frame(change.name, change.args.filename, change.args.line))
        elif frames:
            frames.pop()
    # The other threads begin in threading.py.
    main_threads = {tid for tid, stack in spent_us if not stack[0].function.endswith("_bootstrap")}
    wanted_threads = {thread} if thread in present_frames else main_threads
    sums_us: dict[tuple[Frame, ...], float] = {}
    for (tid, stack), us in spent_us.items():
        if tid in wanted_threads:
            sums_us[stack[-MAX_FRAMES:]] = sums_us.get(stack[-MAX_FRAMES:], 0.0) + us
    return {stack: samples for stack, us in sums_us.items() if (samples := round(us * 1e-6 * RATE_HZ))}


def has_frame(frames: Iterable[Frame], place: tuple[str, str]) -> bool:
    """Whether a stack has a frame at a place in torch/utils/data: a file, and a function or method."""
    file, function = f"torch/utils/data/{place[0]}", place[1]
    return any(frame.path.endswith(file) and frame.function.rpartition(".")[2] == function for frame in frames)


def stacks_with_frame(stacks: Stacks, place: tuple[str, str]) -> Stacks:
    """Return the stacks for which `has_frame` is true."""
    return {frames: samples for frames, samples in stacks.items() if has_frame(frames, place)}


def script_folder(stacks: Stacks) -> str:
    """Return the folder of the training script: of the outermost frame that is not a library's; "" if it is unknown."""
    scripts: Counter[str] = Counter()
    for frames, samples in stacks.items():
        users_paths = (frame.path for frame in frames if frame.path.startswith("/") and not is_library(frame.path))
        if path := next(users_paths, ""):
            scripts[os.path.normpath(path)] += samples
    return str(Path(max(scripts, key=scripts.__getitem__)).parent) if scripts else ""


class LongIterations(NamedTuple):
    """The long iterations during a recording."""

    within_us: SpansUs = ()
    per_other: float = 0.0  # number of long iterations per other iteration

    @classmethod
    def long_among(cls, iterations_ns: Iterable[tuple[int, int]], began_ns: int) -> LongIterations:
        """Return the long ones of iterations, given by start and end; the recording began at ``began_ns``."""
        spans = [(1e-3 * (start - began_ns), 1e-3 * (end - began_ns)) for start, end in iterations_ns]
        are_long = which_are_long([end - start for start, end in spans])
        during = [(span, is_long) for span, is_long in zip(spans, are_long, strict=True) if span[1] > 0]
        long = [span for span, is_long in during if is_long]
        return cls(long, len(long) / max(len(during) - len(long), 1))


class LineNames:
    """Gives stacks the lines of the user's code, relative to the folder of the training script.

    ``kind`` is the kind of all samples; empty: by frames.toml.
    """

    def __init__(self, folder: str, kind: str = "") -> None:
        self._folder, self._kind = folder, kind
        self._calls: dict[tuple[str, int], str] = {}  # file and line -> result of `_only_listed_call`

    def lines_of(self, stacks: Stacks, in_long: Stacks | None = None, per_other: float = 0.0) -> tuple[CodeLine, ...]:
        """Return the lines with the most samples; ``in_long``, ``per_other``: stacks and ratio of `LongIterations`."""
        counts, long = self._count_lines(stacks), self._count_lines(in_long or {})
        return tuple(
            # As many other iterations would have `per_other` times the samples outside of the long ones.
            CodeLine(*line, samples, long=max(round(long[line] - per_other * (samples - long[line])), 0))
            for line, samples in counts.most_common(MAX_LINES)
        )

    def _count_lines(self, stacks: Stacks) -> Counter[tuple[str, str, str]]:
        counts: Counter[tuple[str, str, str]] = Counter()
        for frames, samples in stacks.items():
            counts[self._code_line(frames)] += samples
        return counts

    def stack_texts(self, stacks: Stacks) -> dict[str, int]:
        """Return the stacks with the most samples as text: their kind, and their functions, separated by ``;``."""
        counts: Counter[str] = Counter()
        for frames, samples in stacks.items():
            names = (f"{_clean(frame.function)} ({self._short_path(frame.path)}:{frame.line})" for frame in frames)
            text = ";".join(names)
            if len(text) > MAX_STACK:
                text = text[-MAX_STACK:].partition(";")[2]  # the innermost whole frames
            counts[f"{self._code_line(frames)[0]};{text}"] += samples
        kept, unused_bytes = {}, MAX_STACKS_BYTES
        for text, samples in counts.most_common(MAX_STACKS):
            unused_bytes -= len(text.encode())
            if unused_bytes >= 0:
                kept[text] = samples
        return kept

    def _code_line(self, frames: Sequence[Frame]) -> tuple[str, str, str]:
        """Return the kind of a stack, the user's innermost line, and what it calls or waits for ("" for nothing)."""
        while len(frames) > 1 and _belongs_to_caller(frames[-1]):
            frames = frames[:-1]
        user_frames = [frame for frame in reversed(frames) if not is_library(frame.path)]
        user = next((frame for frame in user_frames if not frame.function.endswith(COMPREHENSIONS)), frames[-1])
        call = self._only_listed_call(frames[-1])
        names = [(self._short_path(frame.path), _clean(frame.function)) for frame in frames]
        kinds = [kind for file_and_function in (*names, (f"[{call}]", "")) if (kind := kind_of(*file_and_function))]
        kind = next((kind for kind in KINDS_WITH_CALLEES if kind in kinds), (kinds or [OTHER])[-1])
        if kind in PHASES and is_library(frames[-1].path) and names[-1][0].startswith(COMPUTING):
            kind = COMPUTE
        callee = f"{call} (probably)" if call else names[-1][1] if user is not frames[-1] else ""
        if has_frame(frames, WAIT_FOR_WORKER):
            callee = "a wait for DataLoader workers"
        # Some versions of Python show a generator without its callers.
        name = _clean(re.sub(r"(\.<locals>\.<\w+>)+$", "", user.function))
        return self._kind or kind, f"{name} ({self._short_path(user.path)}:{user.line})", callee

    def _only_listed_call(self, frame: Frame) -> str:
        """Return the only call on a frame's line, if it is a function in C with a row in frames.toml; else ""."""
        place = frame.path, frame.line
        if place not in self._calls:
            calls = _CALL.findall(_source_line(*place))
            self._calls[place] = calls[0] if len(calls) == 1 and kind_of(f"[{calls[0]}]") else ""
        return self._calls[place]

    def _short_path(self, path: str) -> str:
        if _CELL.fullmatch(path):
            return "notebook cell"
        path = os.path.normpath(path) if path.startswith("/") else path
        short = _path_in_library(path)
        if short is None:
            short = path[len(self._folder) + 1 :] if self._folder and path.startswith(f"{self._folder}/") else path
        return _clean(short)


def _belongs_to_caller(frame: Frame) -> bool:
    """Whether a frame is a comprehension, which belongs to the line that reads it, or effllm's own."""
    is_comprehension = frame.function.endswith(COMPREHENSIONS) and not is_library(frame.path)
    return is_comprehension or frame.path.startswith(f"{_EFFLLM}/")


@functools.lru_cache(maxsize=4096)
def kind_of(file: str, function: str = "") -> str:
    """Return the kind of a library's function, or of a call into C as ``[name]``, by frames.toml; "" without a row."""
    if file.startswith("["):
        rows = (row for row in _frame_rows() if row.file[:1] == "[" and file[1:-1] in row.file[1:-1].split("|"))
    else:
        rows = (row for row in _frame_rows() if file.startswith(row.file) and re.fullmatch(row.function, function))
    return next((row.kind for row in rows), "")


def is_library(path: str) -> bool:
    """Whether a file is not the user's: a library's, effllm's, Python's, or made by a compiler."""
    return path.startswith(_GENERATED) or _path_in_library(path) is not None


def _path_in_library(path: str) -> str | None:
    """Return the name of a library's file without the folder of libraries; ``None`` for the user's own file."""
    if (packages := _LIBRARIES.match(path)) is not None:
        return path[packages.end() :]
    folder = next((root for root in _STANDARD if path.startswith(f"{root}/")), None)
    if folder is None and path.startswith(f"{_EFFLLM}/"):
        folder = str(Path(_EFFLLM).parent)
    return path[len(folder) + 1 :] if folder is not None else None


def _source_line(path: str, line: int) -> str:
    """Return the source of a line; "" if it cannot be read. It is used at once, and not kept."""
    try:
        lines = read_regular(Path(path), MAX_SOURCE_BYTES).decode(errors="replace").splitlines()
    except (OSError, ValueError):  # ValueError: a null byte in the name
        return ""
    return lines[line - 1] if 0 < line <= len(lines) else ""


@functools.lru_cache(maxsize=1)
def _frame_rows() -> Iterable[_Row]:
    return msgspec.toml.decode(Path(__file__).with_name("frames.toml").read_bytes(), type=_FrameTable).frame


def _clean(text: str) -> str:
    """Return a name, at most MAX_NAME long, without what separates frames and lines."""
    return re.sub(r"[;\s\x00-\x1f\x7f-\x9f\ud800-\udfff]+", " ", text)[:MAX_NAME]
