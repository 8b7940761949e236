"""Disks that tests fill, freeze and damage: an ext4 file system in a file, mounted through a loop device.

Tests with disks need root and loop devices; otherwise they are skipped with the reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 2**20


class Disk:
    """A small file system at ``path``."""

    def __init__(self, folder: Path, mebibytes: int = 8) -> None:
        self.path = folder / "disk"
        self._image, self._count = folder / "disk0.img", 0
        self._size = mebibytes * MIB
        self._device = ""

    def open(self) -> None:
        """Make the file system and mount it."""
        if os.geteuid() != 0:
            pytest.skip("mounting a disk for the test needs root")
        for tool in ("mkfs.ext4", "losetup", "fsfreeze"):
            if not shutil.which(tool):
                pytest.skip(f"{tool} is not installed: no disk can be made")
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(self._size)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image))
        try:
            self._mount()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no disk can be mounted here: {error.stderr.decode(errors='replace').strip()}")

    def fill(self) -> None:
        with (self.path / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            for size in (64 * 1024, 4096, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size):
                        pass
        self._synchronise()

    def empty(self) -> None:
        (self.path / "filler").unlink()
        self._synchronise()

    def freeze(self) -> None:
        """Block every write to the disk."""
        _run("fsfreeze", "-f", str(self.path))

    def thaw(self) -> None:
        _run("fsfreeze", "-u", str(self.path))

    def trigger_error(self) -> None:
        """Make the kernel report an error of the file system, which becomes read-only; earlier writes remain."""
        trigger = Path("/sys/fs/ext4") / Path(self._device).name / "trigger_fs_error"
        if not trigger.exists():
            pytest.skip("this kernel cannot trigger an error in a file system")
        self.freeze()  # no write happens between the synchronisation and the error
        trigger.write_text("effllm")
        self.thaw()

    def repair(self) -> None:
        """Mount a repaired copy at the same path; open files remain on the damaged disk."""
        broken = self._image
        self.unmount()
        self._count += 1
        self._image = broken.with_name(f"disk{self._count}.img")
        shutil.copyfile(broken, self._image)
        subprocess.run(["e2fsck", "-fp", str(self._image)], check=False, capture_output=True)
        self._mount()

    def unmount(self) -> None:
        """Unmount the disk while files on it are open."""
        _run("umount", "-l", str(self.path))

    def remount(self) -> None:
        """Mount the disk again; its content is intact, because files on it were still open."""
        _run("mount", self._device, str(self.path))

    def close(self) -> None:
        """Unmount the disk; this deletes its loop devices."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self.thaw()
        while subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True).returncode == 0:
            pass  # the last unmount deletes a loop device

    def _synchronise(self) -> None:
        _run("sync", "-f", str(self.path))  # not all disks: other disks may have much data to write

    def _mount(self) -> None:
        self._device = _run("losetup", "-f", "--show", str(self._image)).strip()
        try:
            _run("mount", "-o", "errors=remount-ro", self._device, str(self.path))
        finally:
            _run("losetup", "-d", self._device)  # the last unmount deletes the loop device


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout.decode()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Return a disk of 8 MiB, mounted at ``disk.path``."""
    made = Disk(tmp_path)
    try:
        made.open()
        yield made
    finally:
        made.close()
