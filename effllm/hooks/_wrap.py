"""Wraps functions of frameworks for hooks; an exception in a hook never reaches the training."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

_MARK = "__effllm_wraps__"  # attribute of a wrapper
_printed: set[str] = set()  # lines


def print_once(line: str) -> None:
    """Print a line to stderr, once in this process, and only on rank 0."""
    if line in _printed:
        return
    _printed.add(line)
    if _is_first_rank():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(f"[EfficientLLM] {line}", file=sys.stderr, flush=True)  # noqa: T201 - once, and not in the loop


def explain_at_exit(reason: str) -> None:
    """At the end of rank 0, print this reason and the calls that measure a loop, unless the job was measured."""
    with contextlib.suppress(Exception):
        from effllm.trainer.without_metrics import suggest_at_exit

        if _is_first_rank():
            call = "`with effllm.monitor(parameters=n) as m:`, and `m.iteration(tokens=t, samples=s)` after each step"
            suggest_at_exit(f"{reason}; if this process trains, measure its loop with {call}")


def _is_first_rank() -> bool:
    try:
        from effllm.config.place import read_place
        from effllm.config.switches import process_environ

        return read_place(process_environ()).rank == 0
    except Exception:  # noqa: BLE001 - the environment may be invalid, and the line must still be printed
        return True


class Guard:
    """Calls the functions of a hook; after the first failure it prints a line and makes no more calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_broken = False

    def __call__(self, function: Callable[..., Any] | None, *arguments: Any, **named: Any) -> Any:
        """Return the function's result, or ``None`` if it fails."""
        if function is None or self.is_broken:
            return None
        try:
            return function(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - no exception may end a training step
            self.is_broken = True
            print_once(f"{self.name} is not measured any more, training goes on: {type(error).__name__}: {error}")
            return None


def around(
    holder: Any,
    name: str,
    guard: Guard,
    *,
    before: Callable[..., Any] | None = None,
    after: Callable[..., None] | None = None,
    failed: Callable[[Any], None] | None = None,
) -> bool:
    """Wrap a function of a module, or a method of a class; ``False`` if it does not exist.

    Args:
        holder: the module or class; repeated calls wrap the same function once.
        name: the function's name.
        guard: the `Guard` that calls ``before``, ``after`` and ``failed``.
        before: called with the `Call`; its result is passed to ``after`` and ``failed``.
        after: called with the result of ``before``, the `Call`, and the function's result.
        failed: called with the result of ``before`` if the function raises; the exception is raised again.
    """
    static = inspect.getattr_static(holder, name, None)  # without binding: a staticmethod or classmethod is visible
    original = getattr(holder, name, None)
    if not callable(original):
        return False
    if getattr(original, _MARK, False):
        return True
    plain = static.__func__ if isinstance(static, (staticmethod, classmethod)) else original

    @functools.wraps(plain)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = Call(plain, args, kwargs)
        before_result = guard(before, call)
        try:
            result = plain(*args, **kwargs)
        except BaseException:
            guard(failed, before_result)
            raise
        guard(after, before_result, call, result)
        return result

    setattr(wrapper, _MARK, True)
    setattr(holder, name, type(static)(wrapper) if isinstance(static, (staticmethod, classmethod)) else wrapper)
    return True


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which torch's compiler neither inlines nor compiles: it runs where a graph breaks anyway.

    ``torch.compiler.disable`` would do the same, but it would import the compiler.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    with contextlib.suppress(AttributeError):  # before torch 2.8, its frame is compiled
        eval_frame = sys.modules["torch"]._C._dynamo.eval_frame
        skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
        eval_frame.set_code_exec_strategy(function.__code__, skip)
    return function


class Call:
    """The arguments of a call of a wrapped function; `get` finds them by name, as positions differ between versions."""

    __slots__ = ("_bound", "_function", "args", "kwargs")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._function, self.args, self.kwargs = function, args, kwargs
        self._bound: dict[str, Any] | None = None  # all arguments by name, after the first `get` that needs them

    def get(self, name: str, default: Any = None) -> Any:
        """Return the argument of this name, else the parameter's default; ``default`` for an unknown parameter."""
        if name in self.kwargs:
            return self.kwargs[name]
        if self._bound is None:
            bound = _signature(self._function).bind(*self.args, **self.kwargs)
            bound.apply_defaults()
            self._bound = dict(bound.arguments)
        return self._bound.get(name, default)


@functools.lru_cache(maxsize=64)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)
