"""How the ranks of a job find their aggregator.  Standard library, and torch where it already is.

``EFFICIENTLLM_ENDPOINT``, else the store that torchrun runs, else a single process on loopback.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from effllm.config import Place

PROBE_S = 0.5
STORE_S = 5.0
GIVE_UP_S = 300.0
BACKLOG = 4096  # 4000 agents come back at once when an aggregator is replaced


class DiscoveryError(RuntimeError):
    """There is no way to the aggregator; the message is one line that says what to do."""


def is_loopback(address: str) -> bool:
    """Whether an address cannot be reached from another host."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def own_address(place: Place) -> str:
    """Return the address of the interface that the other ranks can reach.

    Raises:
        DiscoveryError: it is not loopback, and this version has no keys to go further with.
    """
    if place.one_host:
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((place.master_addr or "127.0.0.1", place.master_port or 9))  # sends nothing
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise DiscoveryError(f"MASTER_ADDR={place.master_addr} cannot be reached: {error}") from error
    if not is_loopback(address):
        raise DiscoveryError(
            f"the job spans hosts ({address}), and this version reports over loopback alone: no metrics"
        )
    return address


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on a port; 0 is one that nobody uses.

    Raises:
        OSError: the address is not this host's, or the port is in use.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if port:  # one who served on it a minute ago must not keep it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class Store:
    """The key-value store that torchrun already runs, as one more client of it.

    Raises:
        DiscoveryError: torch is not in this process, so there is no client.
    """

    def __init__(self, place: Place, generation: int) -> None:
        # torchrun's restart count is per node, so it only names an attempt where there is one node.
        attempt = place.restart_count if place.one_host else 0
        self._key = f"efficientllm/{place.run_id}/{attempt}/{generation}/endpoint"
        self._place = place
        self._store: Any = None
        self._distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
        if not self._distributed:
            raise DiscoveryError("the store of torchrun needs torch imported first, or EFFICIENTLLM_ENDPOINT set")

    def connect(self) -> bool:
        """Connect if somebody listens there now; never waits long."""
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
        """Set the record; ``False`` where the store does not take it."""
        try:
            self._store.set(self._key, json.dumps(record))
        except RuntimeError:
            return False
        return True

    def look(self) -> dict[str, str] | None:
        """Return the record if rank 0 has published it."""
        try:
            if not self._store.check([self._key]):
                return None
            record: dict[str, str] = json.loads(self._store.get(self._key))
        except (RuntimeError, ValueError):
            return None
        return record


def publish(store: Store, record: dict[str, str], failed: Callable[[str], None]) -> None:
    """Publish rank 0's address, at once or as soon as the store is there."""
    if store.connect() and store.publish(record):
        return
    _until(lambda: store.connect() and store.publish(record), failed)


def find(store: Store, found: Callable[[dict[str, str]], None], failed: Callable[[str], None]) -> None:
    """Call ``found`` with rank 0's record, at once or from a daemon thread as soon as there is one."""
    connected = store.connect()
    record = store.look() if connected else None
    if record is not None:
        found(record)
        return

    def attempt() -> bool:
        nonlocal connected
        connected = connected or store.connect()
        record = store.look() if connected else None
        if record is not None:
            found(record)
        return record is not None

    _until(attempt, failed)


def _until(attempt: Callable[[], bool], failed: Callable[[str], None]) -> None:
    """Try again and again in a daemon thread: the one thread, at start-up only, that a trainer ever has of us."""

    def run() -> None:
        deadline_s = time.monotonic() + GIVE_UP_S
        pause_s = 0.02
        while time.monotonic() < deadline_s:
            if attempt():
                return
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 1.0)
        failed(f"rank 0's address was not found within {GIVE_UP_S:.0f} s: this rank has no metrics")

    threading.Thread(target=run, name="effllm-discovery", daemon=True).start()
