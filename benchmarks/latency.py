"""Time from the last rank's report to the line on the console."""

from __future__ import annotations

import os
import select
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from benchmarks.figure import Figure, median
from effllm.config.settings import Config
from effllm.network.transport import Link, make_context
from effllm.records.orders import Orders
from effllm.records.wire import Bye, Hello, Reports, Welcome
from effllm.server.process import Server
from tests.builders import hello, row

RANKS, WINDOWS = 64, 50
WARM_UP_WINDOWS = 5
DEADLINE_S = 10.0  # timeout of each wait; without a timeout, a hanging benchmark would look like a slow one


def measure(ranks: int = RANKS, windows: int = WINDOWS) -> list[Figure]:
    """Send the reports of a job over TCP, each rank by its own connection, and read the console through a pipe."""
    read, write = os.pipe()
    with tempfile.TemporaryDirectory() as folder, os.fdopen(write, "w") as stdout:
        orders = Orders(replace(Config(), run_dir=folder), "bench", "tcp://127.0.0.1:*", f"{folder}/run")
        server = Server(orders, stdout)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        _wait_until(lambda: bool(server.address), "the aggregator has no address")
        context = make_context()
        links = [Link(context, server.address) for _ in range(ranks)]
        for rank, link in enumerate(links):
            link.connect()
            _send(link, hello(rank, ranks, job="bench", devices=()))
        for link in links:
            _wait_until(lambda link=link: any(isinstance(one, Welcome) for one in link.receive()), "a rank is rejected")  # type: ignore[misc]
        spent_s = [_window(links, read, window) for window in range(1, windows + 1)]
        for rank, link in enumerate(links):
            _send(link, Bye(f"agent-{rank}", rank, "completed", windows * 10))
        thread.join()
        for link in links:
            link.close()
        context.destroy(linger=0)
    os.close(read)
    spent_ms = sorted(seconds * 1000 for seconds in spent_s[WARM_UP_WINDOWS:])
    return [
        Figure(
            f"last of {ranks} ranks' reports to the console line",
            median(spent_ms),
            "ms",
            goal=50.0,
            detail={"p95_ms": spent_ms[int(len(spent_ms) * 0.95)]},
        )
    ]


def _window(links: list[Link], console: int, window: int) -> float:
    for rank, link in enumerate(links[:-1]):
        _send(link, Reports((row(rank, window),)))
    time.sleep(0.05)  # these reports must arrive before the last report is sent
    for link in links:
        link.receive()
    began_s = time.monotonic()
    _send(links[-1], Reports((row(len(links) - 1, window),)))
    mark = f"Iteration {window * 10}:".encode()
    seen = b""
    while mark not in seen:
        if not select.select([console], [], [], DEADLINE_S)[0]:
            raise TimeoutError(f"no line of iteration {window * 10} on the console: {seen.decode()}")
        seen += os.read(console, 65536)
    return time.monotonic() - began_s


def _send(link: Link, message: Hello | Reports | Bye) -> None:
    _wait_until(lambda: link.send(message), "a message cannot be sent")


def _wait_until(is_done: Callable[[], bool], problem: str) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not is_done():
        if time.monotonic() > until_s:
            raise TimeoutError(f"{problem} after {DEADLINE_S:g} s")
        time.sleep(0.001)
