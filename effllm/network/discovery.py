"""Discovery of a job's aggregator by its ranks.

This module imports only the standard library; it uses torch if the trainer has imported torch.

The address comes from ``EFFICIENTLLM_ENDPOINT``, else from torchrun's store, else (srun, mpirun) from a file beside
the run folders; a job of one process uses loopback.  A record in the store or file may be from an earlier attempt,
so a rank continues its search until the aggregator has sent a welcome to its agent.  A record is valid only if it is
signed with the user's secret.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

from effllm.config.place import Place
from effllm.config.settings import Config, secret_path
from effllm.config.switches import process_environ
from effllm.network import interface, secret
from effllm.network.listening import DiscoveryError
from effllm.records.facts import FoundAddress
from effllm.store import own_files

PROBE_S = 0.5  # timeout of a connection to torchrun's store
STORE_S = 5.0  # timeout of a request to this store
GIVE_UP_S = 300.0  # then a rank stops its search, or its attempts to publish
MIN_RECHECK_S, MAX_RECHECK_S = 0.5, 10.0  # time between two checks for a newer record of rank 0
MAX_RECORD_BYTES = 4096
TEMPORARY_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - a folder in these is used after a check


def is_secured(config: Config) -> bool:
    """Whether reports are encrypted and peers without the key are rejected, also on loopback (shared by all users)."""
    return config.security != "none"


def config_with_secret(config: Config) -> Config:
    """Create the user's secret if it is missing, for a job on one host; return settings with the secret's path.

    If the secret cannot be written into the home folder (read-only, missing, without hard links), it is written into
    a private temporary folder with a fixed name, which all ranks on the host read.

    Raises:
        SecretError: the secret cannot be written into any folder; the message names the first folder.
    """
    try:
        secret.read_or_create(secret_path(config))
    except secret.SecretError as error:
        runtime = process_environ().get("XDG_RUNTIME_DIR", "")
        for base in filter(os.path.isabs, (runtime, *TEMPORARY_FOLDERS)):
            folder = Path(base, f"effllm-{os.geteuid()}")
            with contextlib.suppress(OSError):
                own_files.make_folder(folder)
                secret.read_or_create(folder / "secret")
                return replace(config, secret_file=str(folder / "secret"))
        raise error from None
    return config


def _is_on_loopback(endpoint: str) -> bool:
    return interface.is_loopback(endpoint.removeprefix("tcp://").rpartition(":")[0])


def openness_warning(endpoint: str) -> str:
    """Return the warning about an endpoint without keys; empty for loopback."""
    if _is_on_loopback(endpoint):
        return ""
    return (
        f"EFFICIENTLLM_SECURITY=none: reports are neither encrypted nor checked, so "
        f"every process that reaches {endpoint} can read and forge them"
    )


class Store:
    """A client of torchrun's key-value store.

    Raises:
        DiscoveryError: the trainer has not imported torch, which has the client.
    """

    def __init__(self, place: Place, generation: int) -> None:
        # torchrun's restart count is per node, so it identifies an attempt only in a job of one node.
        attempt = place.restart_count if place.one_host else 0
        #: A part of the signed text, so that a record is valid only in this place.
        self.key = f"efficientllm/{place.restart_id}/{attempt}/{generation}/endpoint"
        self._place = place
        self._store: Any = None
        self._distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
        if not self._distributed:
            raise DiscoveryError("torchrun's store needs torch: import torch first, or set EFFICIENTLLM_ENDPOINT")

    def connect(self) -> bool:
        """Connect without a long wait; ``False`` if a connection is not possible now."""
        address, port = self._place.master_addr, self._place.master_port
        try:
            socket.create_connection((address, port), PROBE_S).close()  # TCPStore would wait for minutes
            self._store = self._distributed.TCPStore(
                address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=STORE_S)
            )
        except (OSError, RuntimeError, ValueError):
            return False
        return True

    def publish(self, record: dict[str, str]) -> bool:
        """Publish the record; ``False`` if this is not possible now."""
        try:
            self._store.set(self.key, json.dumps(record))
        except RuntimeError:
            return False
        return True

    def read_record(self) -> dict[str, str] | None:
        try:
            if not self._store.check([self.key]):
                return None
            return _decode_record(self._store.get(self.key))
        except (RuntimeError, ValueError):
            return None


class SharedFile:
    """A file beside the run folders, for launchers without a store: srun and mpirun.

    Raises:
        DiscoveryError: this launch has no id, which is a part of the file's name.
    """

    def __init__(self, place: Place, config: Config, generation: int) -> None:
        launch = config.run_name or place.launch_id or place.restart_id
        if not launch:
            raise DiscoveryError(
                f"{place.launcher} gives this launch no id: set EFFICIENTLLM_RUN_NAME, or set EFFICIENTLLM_ENDPOINT to "
                "the address of effllm serve"
            )
        self.key = f"{launch}/{generation}"
        name = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in launch)[:100]
        self.path = Path(config.run_dir).absolute() / f".address-{name}-{generation}"

    def connect(self) -> bool:
        return True

    def publish(self, record: dict[str, str]) -> bool:
        """Write the record atomically; ``False`` if the folder is not writable."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            own_files.replace_file(self.path, json.dumps(record).encode(), durable=False)
        except OSError:
            return False
        return True

    def read_record(self) -> dict[str, str] | None:
        """Return the record if rank 0 has written it; files of other users are ignored."""
        return _read_record_file(self.path)


#: A place where rank 0 publishes its record and other ranks read the record.
RecordSource: TypeAlias = Store | SharedFile


def remove_record(path: Path, job: str) -> None:
    """Delete a job's record, unless another job has replaced it."""
    record = _read_record_file(path)
    if record is not None and record.get("job") == job:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def record_source(place: Place, config: Config, generation: int) -> RecordSource | None:
    """Return the place of rank 0's record, or ``None`` for a job of one rank.

    Raises:
        DiscoveryError: a place for the record is missing.
    """
    if place.world_size == 1:
        return None
    # With the launcher "torch.distributed", a process group exists, so there is a store.
    has_store = place.launcher in ("torchrun", "torch.distributed")
    return Store(place, generation) if has_store else SharedFile(place, config, generation)


def publish_record(source: RecordSource, record: dict[str, str], write: Callable[[FoundAddress], None]) -> None:
    """Publish rank 0's record at once; if this fails, retry in a thread, which calls ``write`` only after a failure."""
    if source.connect() and source.publish(record):
        return

    def run() -> None:
        if not _retry_until_deadline(lambda: source.connect() and source.publish(record)):
            why = f"rank 0's address could not be published within {GIVE_UP_S:.0f} s: no other rank has metrics"
            write(FoundAddress(failed=why))

    _start_thread(run)


class Search:
    """A rank's search for rank 0's record, until the aggregator at its endpoint has sent a welcome to the rank's agent.

    ``write`` gets each new address or reason of a failure; ``is_welcome`` returns whether an endpoint sent the welcome.
    """

    def __init__(
        self,
        source: RecordSource,
        config: Config,
        is_secured: bool,
        write: Callable[[FoundAddress], None],
        is_welcome: Callable[[str], bool],
    ) -> None:
        self._source, self._config, self._is_secured = source, config, is_secured
        self._write, self._is_welcome = write, is_welcome
        self._is_connected = False  # to the source of the record
        self._has_rank0_failed = False  # whether rank 0 has published a reason in place of an endpoint
        self._record: dict[str, str] = {}  # the newest valid record
        self._next_check_s, self._pause_s = 0.0, MIN_RECHECK_S  # monotonic time, and its distance to the check after it
        self._reported_reasons: set[str] = set()

    def start(self) -> None:
        """Search at once, then in a daemon thread.

        The daemon thread is the only thread of effllm in a trainer, and ends after start-up.
        """
        self._check_record()
        _start_thread(self._run)

    def _run(self) -> None:
        if not _retry_until_deadline(self._is_welcome_else_check) and not self._record and not self._has_rank0_failed:
            why = f"rank 0's address was not found within {GIVE_UP_S:.0f} s: this rank has no metrics"
            self._write(FoundAddress(failed=why))

    def _is_welcome_else_check(self) -> bool:
        """Return whether the aggregator has sent its welcome; if not, check the record again when its pause is over."""
        if self._record and self._is_welcome(self._record["endpoint"]):
            return True
        if time.monotonic() >= self._next_check_s:
            self._check_record()
        return False

    def _check_record(self) -> None:
        """Connect if necessary, read the record, and call ``write`` for a new address or the reason of a failure."""
        self._is_connected = self._is_connected or self._source.connect()
        record = self._source.read_record() if self._is_connected else None
        if self._record:  # the record is read less often, because ten thousand ranks may wait for a welcome
            self._next_check_s = time.monotonic() + self._pause_s
            self._pause_s = min(self._pause_s * 1.5, MAX_RECHECK_S)
        if record is None or record == self._record:
            return
        if "endpoint" not in record:
            if not self._has_rank0_failed and "refused" in record:
                self._has_rank0_failed = True
                self._write(FoundAddress(refused=record["refused"]))  # once, because rank 0 has logged the reason
            return
        reason = self._why_invalid(record)
        if not reason:
            self._record = record
            self._pause_s = MIN_RECHECK_S
            self._write(FoundAddress(record["endpoint"], record.get("job", "")))
        elif reason not in self._reported_reasons:
            self._reported_reasons.add(reason)
            self._write(FoundAddress(failed=reason))

    def _why_invalid(self, record: Mapping[str, str]) -> str:  # empty for a valid record
        if not self._is_secured:
            endpoint = record["endpoint"]
            if self._config.security == "none" or _is_on_loopback(endpoint):
                return ""
            address = f"rank 0's address, {endpoint},"
            return f"no metrics of this rank: {address} is not on this host: another user or job wrote this address"
        try:
            user_secret = secret.read(secret_path(self._config))  # read each time: a new file may appear late
        except secret.SecretError as error:
            return f"no metrics of this rank: {error}"
        if secret.is_signed(user_secret, record, self._source.key):
            return ""
        return (
            f"no metrics of this rank: rank 0's address is not signed with the secret {secret_path(self._config)}: "
            "this host's secret differs from rank 0's secret, or another user or job wrote this address"
        )


def _decode_record(content: bytes | str) -> dict[str, str] | None:
    """Decode a record: a JSON object whose values are text; return ``None`` for other content."""
    if len(content) > MAX_RECORD_BYTES:
        return None
    try:
        record = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not all(isinstance(value, str) for value in record.values()):
        return None
    return record


def _read_record_file(path: Path) -> dict[str, str] | None:
    try:
        with os.fdopen(own_files.open_file(path, os.O_RDONLY), "rb") as file:
            return _decode_record(file.read(MAX_RECORD_BYTES + 1))
    except OSError:
        return None


def _retry_until_deadline(attempt: Callable[[], bool]) -> bool:
    """Retry with growing pauses; return whether an attempt succeeded before the deadline."""
    deadline_s = time.monotonic() + GIVE_UP_S
    pause_s = 0.02
    while time.monotonic() < deadline_s:
        if attempt():
            return True
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 1.0)
    return False


def _start_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="effllm-discovery", daemon=True).start()
