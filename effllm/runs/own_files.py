"""Files and folders that are the user's alone, whatever the umask; what somebody else may hold is refused.

In a folder such as /tmp anybody can lay a link, a pipe or a folder in our way.  Such a thing is never followed, written
to or waited for.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path


class NotPrivateError(OSError):
    """A file that must be the user's alone is not; the message is one line that names it and says what to do."""


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for the user alone.

    Raises:
        OSError: it cannot be made, or it is there and not the user's alone to write to.
    """
    for missing in reversed([folder, *folder.parents]):
        if not missing.exists():
            missing.mkdir(mode=0o700, exist_ok=True)
    check_folder(folder)


def check_folder(folder: Path) -> None:
    """Look whether a folder is the user's own, and on a way that nobody else can turn.

    Raises:
        OSError: it is not.
    """
    about = folder.stat()
    if not stat.S_ISDIR(about.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if not _is_ours(about, folder):
        raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
    if about.st_mode & stat.S_IWOTH and _keeps_modes(folder):
        raise PermissionError(errno.EPERM, "everybody can write to it: chmod o-w", str(folder))
    absolute = Path(os.path.abspath(folder))  # noqa: PTH100 - the way as it is written, links and all
    for one in (absolute, *absolute.parents[:-1]):
        # What lies in a folder that everybody can write to, /tmp say, anybody may have laid there.
        if not one.parent.stat().st_mode & stat.S_IWOTH:
            continue
        laid = one.lstat()
        if laid.st_uid != 0 and not _is_ours(laid, one.parent) and _keeps_modes(one.parent):
            raise PermissionError(errno.EPERM, f"{one} belongs to another user", str(folder))


def mount_point(folder: Path) -> Path:
    """Return where the file system of a folder is mounted."""
    return next(one for one in (folder.resolve(), *folder.resolve().parents) if one.is_mount())


def open_file(path: Path, flags: int) -> int:
    """Return the descriptor of a file of our own; one that ``os.O_CREAT`` makes is the user's alone.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe, another user's, or known by another name as well.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    about = os.fstat(descriptor)
    if stat.S_ISREG(about.st_mode) and about.st_nlink <= 1 and _is_ours(about, path.parent):
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "it is no file of our own", str(path))


def read_file(path: Path) -> bytes:
    """Return what a file of our own holds.

    Raises:
        OSError: as `open_file`.
    """
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        return file.read()


def read_private(path: Path, most_bytes: int, flags: int = 0) -> bytes:
    """Return the beginning of a file that its owner, who we are, alone can read.

    Args:
        path: of the file, which may be a link unless the flags say otherwise.
        most_bytes: how much is read.
        flags: for `os.open`, beside those for reading.

    Raises:
        NotPrivateError: others can read it, it is another user's, or no regular file.
        OSError: it cannot be read.
    """
    # Without blocking, or a pipe of that name would hold us until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise NotPrivateError(f"{path} is no regular file")
        if about.st_uid != os.geteuid():
            raise NotPrivateError(f"{path} belongs to another user: it must be owned by who runs the job")
        if about.st_mode & 0o077:
            raise NotPrivateError(
                f"{path} can be read by others: renew what is in it if they may have, and chmod 600 {path}"
            )
        return os.read(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def _is_ours(about: os.stat_result, folder: Path) -> bool:
    if about.st_uid == os.geteuid():
        return True
    # Over a network what is ours may be shown as another's: root's as nobody's (NFS), everybody's as one user's (SMB).
    shown = _what_we_make(folder)
    return shown is not None and shown.st_uid != os.geteuid() and about.st_uid == shown.st_uid


def _keeps_modes(folder: Path) -> bool:
    """Whether modes mean something there: on SMB and FAT all files may have the same, whatever they are made with."""
    shown = _what_we_make(folder)
    return shown is None or not shown.st_mode & 0o077


def _what_we_make(folder: Path) -> os.stat_result | None:
    """Return how a file that we make in a folder is shown there; ``None`` where none can be made."""
    path = folder / f".own.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
