"""The start of effllm's processes, without the current folder on their module path."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# With `python -m`, the current folder would be first on sys.path, and a json.py or queue.py beside a training script
# would replace a module of the standard library. With `python -c`, the first path is "", except with safe paths.
# OpenBLAS starts a thread for each core when numpy is imported; each one needs memory and counts in pids.max.
_PROGRAM = """import os, sys
sys.path[:1] == [''] and sys.path.pop(0)
sys.path.append({parent!r})
os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')
from importlib import import_module
try:
    main = import_module({module!r}).main
except (ImportError, MemoryError) as error:
    if isinstance(error, MemoryError) or 'failed to map' in str(error) or 'cannot allocate' in str(error).lower():
        os._exit({no_resources})
    raise
main(sys.argv[1:])
"""
NO_RESOURCES = 75  # exit status of a process without memory or threads: EX_TEMPFAIL of sysexits.h
WHY_NO_RESOURCES = (
    "it has too little memory or too few threads: see ulimit -v, ulimit -u, and the limits of the container"
)
#: Executed before all imports, because these allocate memory.  Every process may raise its own value (proc(5)).
_ENDS_FIRST = "try:\n  with open('/proc/self/oom_score_adj', 'w') as file: file.write('1000')\nexcept OSError: pass\n"


def spawn(
    module: str,
    arguments: Sequence[str],
    descriptors: Sequence[int],
    environ: Mapping[str, str] | None = None,
    *,
    ends_first: bool = False,
) -> subprocess.Popen[bytes]:
    """Start ``module.main(arguments)`` as a process in its own session.

    The new process gets these descriptors, the stderr of this process, and by default its environment.  It also gets
    the interpreter options of this process that affect the module path.  The new process has its own session, because
    launchers kill process groups, and an agent must outlive its trainer to read the last window.

    With ``ends_first``, the kernel kills the new process and its children before other processes when memory runs out.

    Raises:
        OSError: the interpreter cannot be started.
    """
    return subprocess.Popen(
        [*module_command(module, _ENDS_FIRST if ends_first else ""), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Without stderr at the start of Python, a file of the script may have its number.
        stderr=subprocess.DEVNULL if sys.__stderr__ is None else None,
        pass_fds=[number for number in descriptors if number >= 0],
        start_new_session=True,
        env=environ,
    )


def module_command(module: str, before: str = "") -> list[str]:
    """Return the command of ``module.main``, without the current folder on the module path; ``before`` runs first."""
    parent = str(Path(__file__).resolve().parents[2])
    program = _PROGRAM.format(parent=parent, module=module, no_resources=NO_RESOURCES)
    return [sys.executable, *_interpreter_options(), "-c", before + program]


def is_out_of_resources(error: BaseException) -> bool:
    """Whether an error means that a process has no memory or cannot start a thread."""
    is_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    return is_thread or isinstance(error, MemoryError) or getattr(error, "errno", None) in (errno.EAGAIN, errno.ENOMEM)


def _interpreter_options() -> list[str]:
    """Return the options of this interpreter that affect its module path."""
    flags = sys.flags
    if flags.isolated:
        return ["-I"]
    given = {
        "-E": flags.ignore_environment,
        "-s": flags.no_user_site,
        "-P": getattr(flags, "safe_path", False),  # from Python 3.11 on
    }
    return [option for option, is_given in given.items() if is_given]


def pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable at the end of the process, or -1 if the kernel has no pidfd."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return -1
