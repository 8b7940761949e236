"""A rank with a valid key that sends at full rate: ``hostile_rank.py KIND ENDPOINT SECRET WORLD_SIZE SECONDS
COUNT``.

KIND: ``rows`` sends ten reports per frame, of windows far ahead and with wide histograms; ``facts`` repeats HELLO with
new facts each time. The rank sends for at least SECONDS, and until it has sent COUNT frames, but for at most SECONDS +
MAX_S. The program prints the number of sent frames.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from builders import device_window, hello, reports, row

from effllm.config.settings import Config
from effllm.network import secret
from effllm.network.curve import AgentKeys
from effllm.network.transport import Link, make_context
from effllm.records.rank import NUM_POWER_BINS
from effllm.records.wire import FromAgent, Hello

MAX_S = 120.0
DEVICE = device_window("GPU-hostile", 10.0, power_histogram_s=dict.fromkeys(range(NUM_POWER_BINS), 0.01))


def last_ranks_hello(world_size: int, **changes: object) -> Hello:
    """Return the HELLO of the last rank."""
    return hello(world_size - 1, world_size, job="", log_interval=Config().log_interval, **changes)


def frame(kind: str, number: int, world_size: int) -> FromAgent:
    if kind == "rows":
        return reports(*(row(world_size - 1, 10 * number + i, devices=(DEVICE,)) for i in range(1, 11)))
    return last_ranks_hello(world_size, facts={f"fact-{number}-{i}": "x" * 400 for i in range(400)})


def main(kind: str, endpoint: str, path: str, world_size: int, seconds: float, count: int) -> None:
    """Send for at least `seconds`, and until `count` frames are sent, but for at most `seconds` + MAX_S."""
    link = Link(make_context(), endpoint, AgentKeys.from_secret(secret.read(Path(path)), ""))
    link.connect()
    num_sent, is_new, until_s = 0, False, time.monotonic() + seconds
    while time.monotonic() < (until_s if num_sent >= count else until_s + MAX_S):
        link.receive()
        is_new = link.has_new_connection() or is_new
        if is_new:
            is_new = not link.send(last_ranks_hello(world_size))
        elif link.connected and link.send(frame(kind, num_sent, world_size)):
            num_sent += 1
        else:
            time.sleep(0.001)
    print(num_sent)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6]))
