"""Time from the last rank's report of a window to the line on the console."""

from __future__ import annotations

import os
import select
import tempfile
import threading
import time
from dataclasses import replace

from benchmarks.figure import Figure, median
from effllm.config.settings import Config
from effllm.network.transport import AgentLink, make_context
from effllm.records.orders import Orders
from effllm.records.rank import ParameterCount, RankReport
from effllm.records.wire import Bye, Hello, Reports
from effllm.server.process import Server

RANKS, WINDOWS = 64, 50


def measure() -> list[Figure]:
    """Send the reports of all ranks over TCP, and read the console through a pipe."""
    read, write = os.pipe()
    with tempfile.TemporaryDirectory() as folder, os.fdopen(write, "w") as stdout:
        orders = Orders(replace(Config(), run_dir=folder), "bench", "tcp://127.0.0.1:*", f"{folder}/run")
        server = Server(orders, stdout)
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.address:
            time.sleep(0.01)
        context = make_context()
        link = AgentLink(context, server.address)
        link.connect()
        for rank in range(RANKS):
            _send(link, _hello(rank))
        spent_s = [_window(link, read, window) for window in range(1, WINDOWS + 1)]
        for rank in range(RANKS):
            _send(link, Bye(f"agent-{rank}", rank, "completed", WINDOWS * 10))
        thread.join()
        link.close()
        context.destroy(linger=0)
    os.close(read)
    spent_ms = sorted(seconds * 1000 for seconds in spent_s[5:])
    return [
        Figure(
            f"last of {RANKS} ranks' reports to the console line",
            median(spent_ms),
            "ms",
            goal=50.0,
            detail={"p95_ms": spent_ms[int(len(spent_ms) * 0.95)]},
        )
    ]


def _window(link: AgentLink, console: int, window: int) -> float:
    for rank in range(RANKS - 1):
        _send(link, Reports((_row(rank, window),)))
    time.sleep(0.05)  # the other reports arrive before the clock starts
    link.receive()
    began_s = time.monotonic()
    _send(link, Reports((_row(RANKS - 1, window),)))
    mark = f"Iteration {window * 10}:".encode()
    seen = b""
    while mark not in seen:
        select.select([console], [], [], 10.0)
        seen += os.read(console, 65536)
    return time.monotonic() - began_s


def _hello(rank: int) -> Hello:
    return Hello("bench", f"agent-{rank}", rank, rank, RANKS, "node", "trainer", (), ParameterCount(total=1000), 10)


def _row(rank: int, window: int) -> RankReport:
    last = window * 10
    return RankReport(
        f"agent-{rank}",
        window,
        rank,
        window,
        last - 9,
        last,
        last,
        0.0,
        4.0 * window,
        4.0,
        3.9,
        0.1,
        {},
        100,
        100,
        0,
        2,
    )


def _send(link: AgentLink, message: Hello | Reports | Bye) -> None:
    while not link.send(message):
        time.sleep(0.001)
