"""Private files and folders of the user, for any umask; paths that another user may control are rejected.

In a folder such as /tmp any user can create a link, a pipe or a folder with a name that effllm uses.  In a project's
folder any member of the group can do this.  Such links are not followed, and such pipes and folders are not used.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

_FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_MAX_LINKS = 40  # limit of links in one path, as in the kernel
_UNMAPPED_USER = 65534  # the owner that a user namespace shows for files of the host's root
_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NotPrivateError(OSError):
    """A file is not private; the message is one line with the file's name and the remedy."""


def user_name() -> str:
    """Return the login name of this user, or the user's number if the user has no name, as in some containers."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, private to the user; `OSError` if other users can write to it."""
    with _opened_folder(folder, make=True) as dir_fd:
        status = os.fstat(dir_fd)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        if not _is_ours(status, folder):
            raise PermissionError(errno.EPERM, "the folder belongs to another user", str(folder))
        if status.st_mode & _WRITTEN_BY_OTHERS and _keeps_modes(folder):
            writers, mode = ("everybody", "o-w") if status.st_mode & stat.S_IWOTH else ("its group", "g-w")
            raise PermissionError(errno.EPERM, f"{writers} can write to the folder: chmod {mode}", str(folder))


def open_folder(folder: Path, make: bool = False) -> int:
    """Return a descriptor (``O_PATH``) of a folder without following links of other users.

    Each part of the path is opened relative to its parent's descriptor, so no part can be replaced after its check. A
    path with a link, or with a world-writable folder of another user, is an `OSError`. New folders are private.
    """
    path = os.path.abspath(folder)  # noqa: PTH100 - links are not resolved
    Path(path, "_").exists()  # exists() triggers automatic mounts; O_PATH does not
    parts = list(reversed(path.split("/")))
    num_links = 0
    dir_fd = os.open("/", _FOLDER_FLAGS)
    try:
        while parts:
            part = parts.pop()
            if part in ("", "."):
                continue
            part_fd = _open_part(part, dir_fd, make)
            try:
                if part != "..":
                    _check_part(os.fstat(part_fd), dir_fd, part, folder)
                target = _link_target(part_fd, num_links)
            except OSError:
                os.close(part_fd)
                raise
            if target is None:
                os.close(dir_fd)
                dir_fd = part_fd
                continue
            os.close(part_fd)
            num_links += 1
            parts += reversed(target.split("/"))
            if target.startswith("/"):
                os.close(dir_fd)
                dir_fd = os.open("/", _FOLDER_FLAGS)
    except OSError as error:
        os.close(dir_fd)
        error.filename = str(folder)
        raise
    return dir_fd


@contextlib.contextmanager
def _opened_folder(folder: Path, *, make: bool = False) -> Iterator[int]:
    dir_fd = open_folder(folder, make)
    try:
        yield dir_fd
    finally:
        os.close(dir_fd)


def _link_target(descriptor: int, num_links: int) -> str | None:
    """Return the target of a link; ``None`` for any other file."""
    if not stat.S_ISLNK(os.fstat(descriptor).st_mode):
        return None
    if num_links >= _MAX_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return os.readlink("", dir_fd=descriptor)


def _open_part(part: str, dir_fd: int, make: bool) -> int:
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(part, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(part, 0o700, dir_fd=dir_fd)
    return os.open(part, flags, dir_fd=dir_fd)


def _check_part(status: os.stat_result, dir_fd: int, part: str, folder: Path) -> None:
    """Reject a part of a path that another user may have created in a folder ``dir_fd`` to which other users can write.

    In a group's folder, folders of its members are accepted, but links of its members are not followed.
    """
    parent = os.fstat(dir_fd)
    is_shared = parent.st_mode & _WRITTEN_BY_OTHERS or parent.st_uid not in (0, os.geteuid(), _UNMAPPED_USER)
    if not is_shared or status.st_uid in (0, os.geteuid()):
        return
    is_unsafe = stat.S_ISLNK(status.st_mode) or (parent.st_mode | status.st_mode) & stat.S_IWOTH
    shared_folder = Path(f"/proc/self/fd/{dir_fd}")
    if is_unsafe and not _is_ours(status, shared_folder) and _keeps_modes(shared_folder):
        raise PermissionError(errno.EPERM, f"{shared_folder.resolve() / part} belongs to another user", str(folder))


def open_file(path: Path, flags: int) -> int:
    """Return the descriptor of the user's file: no link, no pipe, no second name; a new file is private."""
    with _opened_folder(path.parent) as dir_fd:
        try:
            descriptor = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
        except OSError as error:
            error.filename = str(path)
            raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1 and _is_ours(status, path.parent):
        return descriptor
    os.close(descriptor)
    raise PermissionError(
        errno.EPERM, "the path is not a regular file of this user, or the file has two names", str(path)
    )


def replace_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a file atomically; on an error the old file stays.

    A durable file is synced to disk before it replaces the old file, because the machine may crash.
    """
    scratch = f".{path.name}.new"  # one writer at a time; a file left by a killed writer is removed here
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _opened_folder(path.parent) as dir_fd:
        try:
            _remove_if_exists(scratch, dir_fd)
            with os.fdopen(os.open(scratch, flags, 0o600, dir_fd=dir_fd), "wb") as file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(scratch, path.name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except OSError:
            _remove_if_exists(scratch, dir_fd)
            raise


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give the path of a new private file; without an error it replaces ``path``, a regular file of the user."""
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "not a regular file", str(path))
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    draft.unlink(missing_ok=True)
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        yield draft
        draft.chmod(0o600)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def rename_file(path: Path, name: str) -> None:
    """Rename a file within its folder; an existing file of that name is replaced."""
    with _opened_folder(path.parent) as dir_fd:
        os.replace(path.name, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def append_text(path: Path, text: str, max_bytes: int) -> None:
    """Append text to a file of this user; a file that would exceed ``max_bytes`` is first renamed to ``<name>.1``.

    If the text itself is longer, only its last complete lines are written.
    """
    content = text.encode(errors="replace")
    if len(content) > max_bytes:
        content = content[-max_bytes:].partition(b"\n")[2]
    with contextlib.suppress(FileNotFoundError):
        if (size := path.lstat().st_size) > 0 and size + len(content) > max_bytes:
            rename_file(path, f"{path.name}.1")
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
        file.write(content)


def remove_file(path: Path) -> None:
    """Remove a file, if it exists."""
    with _opened_folder(path.parent) as dir_fd:
        _remove_if_exists(path.name, dir_fd)


def _remove_if_exists(name: str, dir_fd: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=dir_fd)


def read_file(path: Path) -> bytes:
    """Return the content of a file of this user."""
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        return file.read()


def read_private(path: Path, max_bytes: int, flags: int = 0) -> bytes:
    """Return the first bytes of a file that only its owner, the current user, can read.

    The path may be a link unless the further flags for `os.open` exclude links.
    """
    # Non-blocking, because opening a pipe would block until another process writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotPrivateError(f"{path} is no regular file")
        if status.st_uid != os.geteuid():
            raise NotPrivateError(f"{path} belongs to another user: it must belong to the user who runs the job")
        if status.st_mode & 0o077:
            raise NotPrivateError(
                f"{path} can be read by other users: replace the secret if another user may have read it, "
                f"and chmod 600 {path}"
            )
        return os.read(descriptor, max_bytes)
    finally:
        os.close(descriptor)


def _is_ours(status: os.stat_result, folder: Path) -> bool:
    if status.st_uid == os.geteuid():
        return True
    # A network file system may map owners: root to an anonymous user (NFS), or all users to one user (SMB).
    test_status = _status_of_test_file(folder)
    return test_status is not None and test_status.st_uid != os.geteuid() and status.st_uid == test_status.st_uid


def _keeps_modes(folder: Path) -> bool:
    """Whether the file system stores modes: on SMB and FAT all files may have the same mode."""
    test_status = _status_of_test_file(folder)
    return test_status is None or not test_status.st_mode & 0o077


def _status_of_test_file(folder: Path) -> os.stat_result | None:
    """Return the status of a new test file in a folder; ``None`` if the file cannot be made."""
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
