"""The run folder at the start: its lock, and the state of an earlier aggregator."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq

from effllm.job.ledger import Ledger, restore
from effllm.network import secret
from effllm.network.curve import AgentKeys
from effllm.network.interface import is_loopback
from effllm.network.transport import Link
from effllm.records.orders import Orders
from effllm.records.wire import Supersede
from effllm.store import own_files, run_lock

STATE = "state.json"


@contextlib.contextmanager
def lock_folder(
    orders: Orders,
    address: str,
    context: zmq.Context[zmq.Socket[bytes]],
    read_secret: Callable[[], bytes],
    warn: Callable[[str], None],
) -> Iterator[Path | None]:
    """Hold the lock of the run folder; yield ``None`` if there is no writable folder.

    The lock has the address of this aggregator, for the aggregator of the next attempt.
    """
    if not orders.folder:
        yield None
        return
    this_holder = run_lock.Holder(
        orders.restart_id, orders.job, address, platform.node(), os.getpid(), orders.secured, orders.salt
    )
    predecessor = _Predecessor(orders, context, read_secret)
    try:
        lock = run_lock.take_lock(Path(orders.folder), this_holder, predecessor.ask_to_end)
    except OSError as error:
        reason = error.strerror or str(error)
        warn(f"no run folder: {orders.folder} cannot be written ({reason}); set EFFICIENTLLM_RUN_DIR")
        yield None
        return
    finally:
        predecessor.close()
    if lock.why_other:
        warn(f"{lock.why_other}; this run is written to {lock.folder}; set EFFICIENTLLM_RUN_NAME to use another name")
    is_over = False
    try:
        yield lock.folder
        is_over = True
    finally:
        lock.release(is_over)  # after an exception the lock's file stays


class _Predecessor:
    """The aggregator of an earlier attempt, which still holds the lock while it waits for lost ranks."""

    def __init__(
        self, orders: Orders, context: zmq.Context[zmq.Socket[bytes]], read_secret: Callable[[], bytes]
    ) -> None:
        self._orders, self._context, self._read_secret = orders, context, read_secret
        self._link: Link | None = None

    def ask_to_end(self, holder: run_lock.Holder) -> None:
        """Send the holder of the lock a request to end, without waiting for an answer."""
        host_address = holder.endpoint.removeprefix("tcp://").rpartition(":")[0]
        if holder.host != platform.node() and is_loopback(host_address):
            return  # the loopback address of another host cannot be reached
        if self._link is None:
            keys = None
            if holder.secured:
                try:
                    keys = AgentKeys.from_secret(self._read_secret(), holder.salt)
                except secret.SecretError:
                    return
            self._link = Link(self._context, holder.endpoint, keys, is_monitored=False)
            self._link.connect()
        self._link.send(Supersede(self._orders.restart_id, self._orders.job))

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


def restore_state(folder: Path, job: str, warn: Callable[[str, str], None]) -> Ledger | None:
    """Return the state of an earlier aggregator, or ``None``; if its job id differs, begin the next attempt in it.

    An empty ``job`` means any job; ``warn`` reports an event with a text and a kind.
    """
    try:
        state = restore(own_files.read_file(folder / STATE))
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        warn(f"{folder / STATE} cannot be read, so all totals start at 0: {error}", "sink")
        return None
    if job and state.job != job:
        earlier_attempt = f"attempt {state.attempt}, which was {state.status()} at iteration {state.iteration_shown}"
        warn(f"attempt {state.attempt + 1} continues in {folder} after {earlier_attempt}", "restarted")
        state.begin_next_attempt(job)
    return state


def remove_state(folder: Path) -> None:
    """Remove the state of a completed run, which cannot be continued."""
    with contextlib.suppress(OSError):
        own_files.remove_file(folder / STATE)
