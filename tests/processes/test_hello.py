"""Changes before the aggregator's answer to the first HELLO are sent in a second HELLO."""

import os
import subprocess
import sys
import time

import jobs

from effllm.network.transport import ServerSocket, decode_from_agent, make_context
from effllm.records.wire import Ack, Bye, ByeSeen, Hello, Reports, Welcome

LOOP = """
import pathlib, time
import effllm
collector = effllm.initialize_efficientllm_metrics(1000)
while not pathlib.Path("hello").exists():
    time.sleep(0.01)
collector.set_model_parameters(2000)
pathlib.Path("set").touch()
while not pathlib.Path("welcome").exists():
    collector.record_iteration_start()
    time.sleep(0.01)
    collector.record_iteration_end(tokens_processed=7, samples_processed=1)
effllm.finalize_efficientllm_metrics()
"""


def test_parameters_set_before_the_answer_to_hello_are_received(tmp_path):
    context = make_context()
    socket = ServerSocket(context)
    port = socket.listen("tcp://127.0.0.1:*").rpartition(":")[2]
    settings = {"ENDPOINT": f"tcp://127.0.0.1:{port}", "SECURITY": "none", "DEVICE": "simulated", "RUN_DIR": tmp_path}
    environ = {**os.environ, **{f"EFFICIENTLLM_{name}": str(value) for name, value in settings.items()}}
    trainer = subprocess.Popen([sys.executable, "-c", LOOP], env=environ, cwd=tmp_path)
    parameters, is_over, until_s = [], False, time.monotonic() + 150

    while not is_over and time.monotonic() < until_s:
        if not socket.socket.poll(100):
            continue
        peer, frame = socket.receive()
        message = decode_from_agent(frame)
        if isinstance(message, Hello):
            parameters.append(message.parameters.total)
            (tmp_path / "hello").touch()
            jobs.until((tmp_path / "set").exists)
            time.sleep(0.2)  # time for the agent to read the new parameters before the answer
            socket.send(peer, Welcome(1))
            (tmp_path / "welcome").touch()
        elif isinstance(message, Reports):
            socket.send(peer, Ack(message.rows[-1].sequence))
        elif isinstance(message, Bye):
            is_over = True
            socket.send(peer, ByeSeen(message.rank))

    assert trainer.wait(60) == 0
    assert (parameters[0], parameters[-1]) == (1000, 2000)
    socket.close()
    context.destroy(linger=0)
