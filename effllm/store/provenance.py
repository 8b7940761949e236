"""The origin of the numbers in a run folder: host, versions, commit, settings."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from effllm.config.switches import process_environ

_GIT_TIMEOUT_S = 2.0
_GIT_TERM_TIMEOUT_S = 1.0
#: Git must not lock, rewrite the index, download objects of a partial clone, or prompt.
_GIT_ENVIRONMENT = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
_GIT_STATUS = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all", "--no-renames")
#: Names of folders of installed packages, whose programs run the user's code.
_INSTALLED = frozenset(("site-packages", "dist-packages"))
_PACKAGES = ("torch", "megatron-core", "transformers", "trl", "lightning", "nvidia-ml-py", "pyzmq", "msgspec")


def host_facts() -> dict[str, Any]:
    return {
        "aggregator_host": platform.node(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "packages": _package_versions(),
    }


class Git:
    """Runs git on a folder; git locks nothing, writes no file and starts no program of the repository.

    Such programs are filters, the file system monitor and hooks.  Untracked files and submodules are not read.

    Args:
        folder: the current folder of the training.
        script: its first argument, relative to this folder.  The repository is that of the script; without a script,
            and for an installed program, it is that of the folder.
    """

    def __init__(self, folder: Path, script: str = "") -> None:
        self._folder, self._script = folder, script
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def facts(self) -> dict[str, Any]:
        """Return the commit, and whether tracked files differ from it; empty outside a repository.

        The calls of git may take seconds.  ``git_dirty`` is ``"unknown"`` if git is slow, or if a file with a filter
        differs.
        """
        self._folder = self._code_folder()
        try:
            commit = self._run("rev-parse", "HEAD")
            return {"git_commit": commit, "git_dirty": self._dirty_state()} if commit else {}
        except subprocess.TimeoutExpired:
            return {"git_dirty": "unknown"}

    def stop(self) -> None:
        """Terminate a running git process, and start no further one; called from another thread."""
        self._is_stopped = True
        if (process := self._process) is not None:
            process.terminate()

    def _code_folder(self) -> Path:
        script = self._folder / self._script
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # no folder, a zero byte, a loop of links
            script = script.resolve()
            is_program = script.parent.name == "bin" and script.suffix != ".py"
            if script.is_file() and not is_program and not _INSTALLED & {*script.parts}:
                return script.parent
        return self._folder

    def _dirty_state(self) -> bool | str:
        try:
            # Git starts no filter whose command is empty.  A "required" filter with an empty command would be an error.
            names = (self._run("config", "--name-only", "--get-regexp", r"^filter\.") or "").split("\n")
            without_filters = [f"{name}={'false' if name.endswith('.required') else ''}" for name in names if name]
            changed = self._run(*_GIT_STATUS, settings=without_filters)
            if changed and without_filters:  # with its filter, a changed file may equal the committed file
                changed = self._run(*_GIT_STATUS, "--", ":(top,attr:!filter)", settings=without_filters) or None
        except subprocess.TimeoutExpired:
            changed = None
        return "unknown" if changed is None else bool(changed)

    def _run(self, *arguments: str, settings: Sequence[str] = ()) -> str | None:
        """Return the output of a command, or ``None`` if it fails or after `stop`; a timeout is an error."""
        options = [word for setting in ("core.fsmonitor=", *settings) for word in ("-c", setting)]
        if self._is_stopped:
            return None
        try:
            self._process = process = subprocess.Popen(
                ["git", "--no-optional-locks", "-C", self._folder, *options, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**process_environ(), **_GIT_ENVIRONMENT},
            )
        except OSError:
            return None
        assert process.stdout is not None
        with process.stdout:
            try:
                output, _ = process.communicate(timeout=_GIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.terminate()  # git removes its locks at SIGTERM, not at SIGKILL
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GIT_TERM_TIMEOUT_S)
                process.kill()
                raise
        return output.decode(errors="replace").strip() if process.returncode == 0 else None


def boot_id() -> str:
    """Return the id of this machine's boot, which identifies its monotonic clock; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _package_versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
