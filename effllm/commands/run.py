"""``effllm run``: runs a training script like ``python``, and completes its run folder, also after an error.

This process is the training process, so only the standard library is imported.
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from effllm.attach import autoload
from effllm.config.place import read_place
from effllm.config.settings import ConfigError
from effllm.config.switches import is_enabled, process_environ

_USAGE = "effllm run: give a script, or -m and a module: effllm run train.py --lr 1e-4 (see effllm run --help)"


def main(arguments: Sequence[str]) -> int:
    """Run the script or module in the arguments, and raise its exceptions; return 2 without a script or module."""
    if not arguments or arguments == ["-m"]:
        print(_USAGE, file=sys.stderr)
        return 2
    if arguments[0] == "-m":
        return _run_measured(arguments[1], arguments[2:], is_module=True)
    if arguments[0].startswith("-"):
        print(f"effllm run: there is no option {arguments[0]}; {_USAGE.partition(': ')[2]}", file=sys.stderr)
        return 2
    if not Path(arguments[0]).exists():
        print(f"effllm run: there is no file {arguments[0]}; a module needs -m before it", file=sys.stderr)
        return 2
    return _run_measured(arguments[0], arguments[1:], is_module=False)


def _run_measured(name: str, arguments: Sequence[str], *, is_module: bool) -> int:
    """Run a script or module as ``__main__``, with measurement, and raise its exceptions."""
    pid = os.getpid()
    sys.argv[:] = [name, *arguments]
    # Python sets the same path, except with safe paths (-P, -I, PYTHONSAFEPATH).
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
        sys.path[0] = str(Path.cwd()) if is_module else str(Path(name).resolve().parent)
    usual_hook = sys.excepthook
    sys.excepthook = lambda kind, error, trace: usual_hook(kind, error, _without_own_frames(error, trace))
    status = "failed"
    autoload(is_run_command=True)
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        elif Path(name).suffix in (".zip", ".pyz") or Path(name).is_dir():
            runpy.run_path(name, run_name="__main__")
        else:
            _execute_file(Path(name).absolute())
        status = "completed"
    except SystemExit as end:
        status = "failed" if end.code else "completed"
        raise
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        if os.getpid() == pid:  # this process is not a child that the script has forked
            _complete_run(name, status)
    return 0


def _execute_file(path: Path) -> None:
    """Execute a file as ``__main__``. Runpy would delete the module, which threads and exit handlers need."""
    main = ModuleType("__main__")
    vars(main).update(__file__=str(path), __builtins__=builtins, __loader__=SourceFileLoader("__main__", str(path)))
    with io.open_code(str(path)) as file:
        code = compile(file.read(), str(path), "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    exec(code, vars(main))  # noqa: S102 - the purpose of the command


def _complete_run(name: str, status: str) -> None:
    """End the measurement; print a line if nothing was measured."""
    collector = sys.modules.get("effllm.trainer.collector")
    if collector is not None:
        collector.get_metrics_collector().stop_collection(status)
    elif status == "completed" and is_enabled(process_environ()) and _is_first_rank():
        print(
            f"[EfficientLLM] nothing was measured: {name} did not call effllm and ran no known training loop; "
            "see effllm run --help",
            file=sys.stderr,
        )


def _is_first_rank() -> bool:
    try:
        return read_place(process_environ()).rank == 0
    except ConfigError:
        return True


def _without_own_frames(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Remove the frames of this module and of runpy from a traceback and its error; return the frames of the script."""
    entry = trace
    while entry is not None and entry.tb_frame.f_code is not _run_measured.__code__:
        entry = entry.tb_next
    if entry is None:
        return trace  # an exception in another thread, or in effllm
    while entry is not None and entry.tb_frame.f_globals.get("__name__") in ("runpy", __name__):
        entry = entry.tb_next
    error.__traceback__ = entry
    return entry
