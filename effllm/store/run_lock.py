"""The lock of a run folder: only one aggregator writes at a time, also after a restart of the job.

The lock file has the holder's job and address.  An aggregator of the next attempt requests the lock over the network.
The holder releases the lock only if its own trainer has ended, so that a running job never ends another running job,
even with equal names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from effllm.config.place import Place
from effllm.records.job import SCHEMA_VERSION, version_error
from effllm.store import own_files
from effllm.store.reader import read_own_json
from effllm.store.regular_file import is_still_at

LOCK = "lock"
LOCK_WAIT_S = 6.0  # an aggregator ends within five seconds
REQUEST_EVERY_S = 0.25
MAX_NAMES = 1000


class Holder(Struct, frozen=True):
    """The holder of a lock, as stored in the lock file; without secrets."""

    restart_id: str = ""  # shared by all attempts of the job, see `restart_id_of`; empty if unknown
    job: str = ""
    endpoint: str = ""
    host: str = ""
    pid: int = 0
    secured: bool = False  # whether its connections use keys from the user's secret
    salt: str = ""  # salt of the keys


class _VersionAndStatus(Struct):
    schema_version: int = SCHEMA_VERSION
    status: str = ""


class Lock:
    """A locked run folder, with the open file that holds the lock.

    ``why_other`` is why this is not the configured folder; empty if it is, or if the run in that folder is completed.
    """

    def __init__(self, folder: Path, descriptor: int, why_other: str) -> None:
        self.folder = folder
        self.why_other = why_other
        self._descriptor = descriptor

    def release(self, is_over: bool = True) -> None:
        """Release the lock; at the end of the run remove the file, so that no request is sent to an ended process."""
        if self._descriptor >= 0:
            if is_over:
                with contextlib.suppress(OSError):
                    own_files.remove_file(self.folder / LOCK)
            os.close(self._descriptor)
            self._descriptor = -1


def restart_id_of(place: Place, host: str) -> str:
    """Return an id that all attempts of a job share and no other running job has; empty if the job has no such id.

    This is the restart id of the place, from torchrun or the scheduler.  Without a restart id, it is the address of
    torchrun's store, because two stores cannot listen on one address at a time.
    """
    if place.restart_id:
        return place.restart_id
    if place.launcher == "torchrun" and place.master_port:
        return f"{place.master_addr}:{place.master_port} on {host}"
    return ""


def take_lock(
    wanted: Path, holder: Holder, request_end: Callable[[Holder], None] = lambda _: None, wait_s: float = LOCK_WAIT_S
) -> Lock:
    """Lock and return the run folder NAME, or NAME-2 and following if NAME cannot be continued.

    A folder of a completed run or of another version of effllm is not continued, nor one that another job has locked.
    ``request_end`` is called repeatedly with the holder of the lock, if the holder is an earlier attempt of this job.
    """
    why_other = ""
    for number in range(1, MAX_NAMES):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        if status_of(folder) == "completed":
            continue
        run = read_own_json(folder / "run.json", _VersionAndStatus)
        if run is not None and (problem := version_error(run.schema_version)):
            why_other = why_other or f"{folder} is not continued: {problem}"
            continue
        own_files.make_folder(folder)
        descriptor = _locked_file(folder / LOCK, holder, request_end, 0.0 if why_other else wait_s)
        if descriptor is None:
            why_other = why_other or f"another run is writing to {folder}"
        elif status_of(folder) == "completed":  # while this process waited for the lock
            Lock(folder, descriptor, "").release()
        else:
            with contextlib.suppress(OSError):  # on a full disk the lock is held, too
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, msgspec.json.encode(holder) + b"\n", 0)
            return Lock(folder, descriptor, why_other)
    raise FileExistsError(f"{MAX_NAMES} runs are named {wanted.name}")


def status_of(folder: Path) -> str:
    """Return the status of the run in a folder, from its summary; empty without a summary."""
    summary = read_own_json(folder / "summary.json", _VersionAndStatus)
    return summary.status if summary is not None else ""


def _locked_file(path: Path, own: Holder, request_end: Callable[[Holder], None], wait_s: float) -> int | None:
    """Return a descriptor that holds the lock, or ``None`` if another process still holds it after ``wait_s``."""
    deadline_s, next_request_s = time.monotonic() + wait_s, 0.0
    while True:
        descriptor = own_files.open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder removes the file before it releases the lock, so the locked file may have no name.
            if is_still_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            pass
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
        now_s = time.monotonic()
        if now_s > deadline_s:
            return None
        if now_s >= next_request_s:
            next_request_s = now_s + REQUEST_EVERY_S
            other = read_own_json(path, Holder)
            if other is not None and own.restart_id and other.restart_id == own.restart_id and other.job != own.job:
                request_end(other)
        time.sleep(0.05)
