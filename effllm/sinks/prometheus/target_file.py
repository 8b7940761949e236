"""The file of a job in a discovery folder, from which Prometheus learns the address of the page (`file_sd_configs`).

Many users write to the folder.  A job writes, replaces and removes only files of its own user, and follows no link.  It
does not use a folder in which other users can replace its file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from effllm.store import own_files

#: A running job sets the time of its file every BEAT_S. A file of the same user that is older than EXPIRES_S is of a
#: killed job, and is removed.
BEAT_S, EXPIRES_S = 60.0, 300.0
MODE = 0o640  # Prometheus reads the file as a member of the folder's group
PREFIX, SUFFIX = "effllm.", ".json"
#: The names of files of jobs, from `instance_name`, and of files that are being written. No other file is ever removed.
_NAMES = re.compile(r"effllm\.[\w-]+\.[\w-]*\.[0-9a-f]{8}\.json|\.effllm\..+\.json\.[0-9a-f]{8}", re.ASCII)
MAX_NAME_LETTERS = 80  # of the user's name and of the run's name


def instance_name(user: str, run_id: str, folder: Path | None) -> str:
    """Return the name of a run among the runs of all users, the same in all attempts."""
    where = str(folder.absolute()) if folder is not None else secrets.token_hex(8)
    words = (re.sub(r"[^A-Za-z0-9_-]", "_", word)[:MAX_NAME_LETTERS] for word in (user, run_id))
    return ".".join((*words, hashlib.sha256(where.encode()).hexdigest()[:8]))


class TargetFile:
    """The file of one job, from `__init__` to `close`; its thread keeps its time new, and removes expired files.

    ``instance`` is from `instance_name`, and ``target`` is address and port of the page.

    Raises:
        OSError: the folder is missing or not safe, or the file cannot be written.
    """

    def __init__(self, folder: Path, instance: str, target: str, labels: Mapping[str, str]) -> None:
        self._name = f"{PREFIX}{instance}{SUFFIX}"
        self._content = msgspec.json.encode([{"targets": [target], "labels": {"instance": instance, **labels}}])
        self._folder_fd = own_files.open_folder(folder)
        self._file_fd = -1  # descriptor of the file; -1: not written
        try:
            self._check_folder(folder)
            self._write()
        except OSError as error:
            os.close(self._folder_fd)
            error.filename = str(folder)
            raise
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_closed, name="sink-prometheus-target", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the file, if it is still the file of this job. May be called twice."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._thread.join(1.0)
        if self._thread.is_alive():  # the folder's file system does not answer
            return
        with contextlib.suppress(OSError):
            if self._is_this_file():
                os.unlink(self._name, dir_fd=self._folder_fd)
        os.close(self._file_fd)
        os.close(self._folder_fd)

    def _check_folder(self, folder: Path) -> None:
        status = os.fstat(self._folder_fd)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
            raise PermissionError(errno.EPERM, f"other users can replace files of this folder: chmod +t {folder}")

    def _write(self) -> None:
        """Write the file under a new name, and give it its name in one step."""
        new_name = f".{self._name}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        new_fd = os.open(new_name, flags, 0o600, dir_fd=self._folder_fd)
        try:
            os.write(new_fd, self._content)
            os.fchmod(new_fd, MODE)  # with any umask
            status = self._stat(self._name)
            if status is None:
                # Unlike a rename, a link cannot replace a file that another user has made in the meantime.
                os.link(new_name, self._name, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
            elif _is_of_this_user(status):  # of an earlier attempt; in a sticky folder no other user can exchange it
                os.replace(new_name, self._name, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
            else:
                raise PermissionError(errno.EPERM, f"{self._name} is not a file of this user")
        except OSError:
            os.close(new_fd)
            raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(new_name, dir_fd=self._folder_fd)
        self._file_fd, old_fd = new_fd, self._file_fd
        if old_fd >= 0:
            os.close(old_fd)

    def _stat(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self._folder_fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _is_this_file(self) -> bool:
        status, own = self._stat(self._name), os.fstat(self._file_fd)
        return status is not None and (status.st_dev, status.st_ino) == (own.st_dev, own.st_ino)

    def _renew_until_closed(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self._renew_and_clean()
            if self._is_closed.wait(BEAT_S):
                return

    def _renew_and_clean(self) -> None:
        """Set the time of the file, and remove expired files of this user's other jobs."""
        if self._stat(self._name) is None:  # removed while the job was suspended
            self._write()
        os.utime(self._file_fd)
        # The clock of the file system, which sets all these times, and not the clock of this host.
        now_s = os.fstat(self._file_fd).st_mtime
        listed_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._folder_fd)
        try:
            with os.scandir(listed_fd) as entries:
                names = [entry.name for entry in entries if entry.name != self._name and _NAMES.fullmatch(entry.name)]
        finally:
            os.close(listed_fd)
        for name in names:
            status = self._stat(name)
            if status is not None and _is_of_this_user(status) and now_s - status.st_mtime > EXPIRES_S:
                os.unlink(name, dir_fd=self._folder_fd)


def _is_of_this_user(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
