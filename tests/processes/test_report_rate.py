"""With very short iterations, an agent sends only a few frames per second and no token is lost."""

import os
import subprocess
import sys
import time

import pytest

from effllm.network.transport import ServerSocket, decode_from_agent, make_context
from effllm.records.wire import Ack, Bye, ByeSeen, Hello, Reports, Welcome

ITERATIONS = 3000
LOOP = f"""
import time
import effllm
collector = effllm.initialize_efficientllm_metrics(1000)
time.sleep(1.0)  # until its agent is there
for iteration in range({ITERATIONS}):
    collector.record_iteration_start()
    time.sleep(0.001)
    collector.record_iteration_end(tokens_processed=7, samples_processed=1)
effllm.finalize_efficientllm_metrics()
"""


@pytest.fixture
def listening():
    context = make_context()
    socket = ServerSocket(context)
    port = socket.listen("tcp://127.0.0.1:*").rpartition(":")[2]
    yield socket, f"tcp://127.0.0.1:{port}"
    socket.close()
    context.destroy(linger=0)


def serve(socket, trainer, every_s):
    """Answer one agent until its BYE; return the time of the WELCOME, [(arrival time, frame)], and the BYE."""
    frames, said_bye, welcomed_s, until_s = [], None, None, time.monotonic() + 150
    while not said_bye and time.monotonic() < until_s:
        if not socket.socket.poll(100):
            continue
        peer, frame = socket.receive()
        message = decode_from_agent(frame)
        if isinstance(message, Hello):
            welcomed_s = welcomed_s or time.monotonic()
            socket.send(peer, Welcome(1, report_every_s=every_s))
        elif isinstance(message, Reports):
            frames.append((time.monotonic(), message))
            socket.send(peer, Ack(message.rows[-1].sequence))
        elif isinstance(message, Bye):
            said_bye = message
            socket.send(peer, ByeSeen(message.rank))
    trainer.wait(60)
    return welcomed_s, frames, said_bye


@pytest.mark.faults
@pytest.mark.parametrize("every_s", [0.0, 1.0])
def test_windows_of_1_ms_are_sent_together_and_totals_are_exact(listening, tmp_path, every_s):
    socket, endpoint = listening
    settings = {"ENDPOINT": endpoint, "LOG_INTERVAL": "1", "DEVICE": "simulated", "RUN_DIR": str(tmp_path)}
    settings["SECURITY"] = "none"
    settings["HISTORY_SIZE"] = "5000"  # the ring has space for some seconds if the agent is delayed
    environ = {**os.environ, **{f"EFFICIENTLLM_{name}": value for name, value in settings.items()}}
    trainer = subprocess.Popen([sys.executable, "-c", LOOP], env=environ, cwd=tmp_path)

    welcomed_s, frames, bye = serve(socket, trainer, every_s)

    rows = [row for _, message in frames for row in message.rows]
    assert (bye.status, bye.lost) == ("completed", 0)
    assert sum(row.tokens for row in rows) == 7 * ITERATIONS
    assert sum(row.samples for row in rows) == ITERATIONS
    assert [row.sequence for row in rows] == list(range(1, len(rows) + 1))
    # At most four frames per second, plus the last frames, which are sent without delay.
    assert len(frames) <= 4 * (frames[-1][0] - welcomed_s) + 4
    assert len(rows) > 4 * len(frames), "windows were cut for single iterations"
