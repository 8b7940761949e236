"""Files and folders that are the user's alone, whatever the umask; what another user may hold is refused.

In a folder such as /tmp every user can put a link, a pipe or a folder in our way, in a project's folder every member of
its group.  Such a thing is never followed, written to or waited for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_MAX_LINKS = 40  # of a path, as in the kernel
_UNMAPPED_USER = 65534  # whom a user namespace shows as the owner of what the host's root owns
_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NotPrivateError(OSError):
    """A file that must be the user's alone is not; the message is one line with its name and what to do."""


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for the user alone.

    Raises:
        OSError: it cannot be made, or it is there and not the user's alone to write to.
    """
    _check_own(folder, open_folder(folder, make=True))


def _check_own(folder: Path, descriptor: int) -> None:
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISDIR(about.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        if not _is_ours(about, folder):
            raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
        if about.st_mode & _WRITTEN_BY_OTHERS and _keeps_modes(folder):
            writers, mode = ("everybody", "o-w") if about.st_mode & stat.S_IWOTH else ("its group", "g-w")
            raise PermissionError(errno.EPERM, f"{writers} can write to it: chmod {mode}", str(folder))
    finally:
        os.close(descriptor)


def open_folder(folder: Path, make: bool = False) -> int:
    """Return a descriptor (``O_PATH``) of a folder on whose way no link of another user is followed.

    Every part of the path is opened below the one before, so that none can be exchanged after it was checked.

    Args:
        folder: the folder.
        make: whether missing folders are made, for the user alone.

    Raises:
        OSError: it is not there, or another user has a link, or a folder that everybody can write to, on its way.
    """
    path = os.path.abspath(folder)  # noqa: PTH100 - as it is written, links and all
    Path(path, "_").exists()  # makes automatic mounts on the way, which opening with O_PATH does not
    parts = list(reversed(path.split("/")))
    num_links = 0
    at = os.open("/", _FOLDER)
    try:
        while parts:
            part = parts.pop()
            if part in ("", "."):
                continue
            below = _open_part(part, at, make)
            try:
                if part != "..":
                    _check_part(os.fstat(below), at, part, folder)
                target = _target(below, num_links)
            except OSError:
                os.close(below)
                raise
            if target is None:
                os.close(at)
                at = below
                continue
            os.close(below)
            num_links += 1
            parts += reversed(target.split("/"))
            if target.startswith("/"):
                os.close(at)
                at = os.open("/", _FOLDER)
    except OSError as error:
        os.close(at)
        error.filename = str(folder)
        raise
    return at


def _target(descriptor: int, num_links: int) -> str | None:
    """Return where a link leads; ``None`` of what is no link."""
    if not stat.S_ISLNK(os.fstat(descriptor).st_mode):
        return None
    if num_links >= _MAX_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return os.readlink("", dir_fd=descriptor)


def _open_part(part: str, at: int, make: bool) -> int:
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(part, flags, dir_fd=at)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(part, 0o700, dir_fd=at)
    return os.open(part, flags, dir_fd=at)


def _check_part(about: os.stat_result, at: int, part: str, folder: Path) -> None:
    """Refuse what another user may have laid in a folder ``at`` to which others can write.

    In a folder of a group the folders of colleagues are passed, their links are not followed.
    """
    around = os.fstat(at)
    is_open = around.st_mode & _WRITTEN_BY_OTHERS or around.st_uid not in (0, os.geteuid(), _UNMAPPED_USER)
    if not is_open or about.st_uid in (0, os.geteuid()):
        return
    is_laid = stat.S_ISLNK(about.st_mode) or (around.st_mode | about.st_mode) & stat.S_IWOTH
    shown = Path(f"/proc/self/fd/{at}")
    if is_laid and not _is_ours(about, shown) and _keeps_modes(shown):
        where = _path_of(at) / part
        raise PermissionError(errno.EPERM, f"{where} belongs to another user", str(folder))


def _path_of(descriptor: int) -> Path:
    try:
        return Path(f"/proc/self/fd/{descriptor}").readlink()
    except OSError:
        return Path()


def mount_point(folder: Path) -> Path:
    """Return where the file system of a folder is mounted."""
    return next(one for one in (folder.resolve(), *folder.resolve().parents) if one.is_mount())


def open_file(path: Path, flags: int) -> int:
    """Return the descriptor of a file of our own; one that ``os.O_CREAT`` makes is the user's alone.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe, another user's, or known by another name as well.
    """
    at = open_folder(path.parent)
    try:
        descriptor = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=at)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(at)
    about = os.fstat(descriptor)
    if stat.S_ISREG(about.st_mode) and about.st_nlink <= 1 and _is_ours(about, path.parent):
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "it is no file of our own", str(path))


def replace_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Put a whole new file in the place of the old one, or leave the old one.

    Args:
        path: of the file.
        content: of the new file.
        durable: whether it is to be on the disk before the old one goes, against a crash of the machine.

    Raises:
        OSError: it cannot be written, or as `open_folder`.
    """
    scratch = f".{path.name}.new"  # of one writer at a time; what a killed one left is removed here
    at = open_folder(path.parent)
    try:
        _remove(scratch, at)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(scratch, flags, 0o600, dir_fd=at), "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(scratch, path.name, src_dir_fd=at, dst_dir_fd=at)
    except OSError:
        _remove(scratch, at)
        raise
    finally:
        os.close(at)


def rename_file(path: Path, name: str) -> None:
    """Give a file another name in its folder; another file of that name goes.

    Raises:
        OSError: as `os.replace` and `open_folder`.
    """
    at = open_folder(path.parent)
    try:
        os.replace(path.name, name, src_dir_fd=at, dst_dir_fd=at)
    finally:
        os.close(at)


def remove_file(path: Path) -> None:
    """Remove a file, if it is there.

    Raises:
        OSError: as `os.unlink` and `open_folder`.
    """
    at = open_folder(path.parent)
    try:
        _remove(path.name, at)
    finally:
        os.close(at)


def _remove(name: str, at: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=at)


def read_file(path: Path) -> bytes:
    """Return what a file of our own holds.

    Raises:
        OSError: as `open_file`.
    """
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        return file.read()


def read_private(path: Path, max_bytes: int, flags: int = 0) -> bytes:
    """Return the beginning of a file that its owner, who we are, alone can read.

    Args:
        path: of the file, which may be a link unless the flags exclude it.
        max_bytes: how much is read.
        flags: for `os.open`, beside those for reading.

    Raises:
        NotPrivateError: others can read it, it is another user's, or no regular file.
        OSError: it cannot be read.
    """
    # Without blocking, or a pipe of that name would block until another process writes to it.
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
        return os.read(descriptor, max_bytes)
    finally:
        os.close(descriptor)


def _is_ours(about: os.stat_result, folder: Path) -> bool:
    if about.st_uid == os.geteuid():
        return True
    # A network file system may show our files as another user's: root's as `nobody`'s (NFS), all users' as one's (SMB).
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
