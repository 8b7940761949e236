"""A script that closes all descriptors after the start, as a daemon does, and opens its own with the same numbers."""

import pytest

#: Closes descriptors 3 to 255, opens ``what`` with the lowest free numbers, trains, and writes to each of them again.
CLOSES = """
import json, os, socket, time
from pathlib import Path
import effllm

effllm.initialize_efficientllm_metrics(1000)
os.closerange(3, 256)
what, end = "{what}", "{end}"
if what == "files":
    own = [open(f"own{{number}}.log", "wb", buffering=0) for number in range(12)]
elif what == "sockets":
    pairs = [socket.socketpair() for _ in range(6)]
collector = effllm.get_metrics_collector()
for number in range(1, 41):
    collector.record_iteration_start()
    time.sleep(0.005)
    collector.record_iteration_end(100, 2)
if end == "fin":
    effllm.finalize_efficientllm_metrics()
if what == "files":
    for one in own:
        one.write(b"user\\n")
    found = [Path(f"own{{number}}.log").read_bytes().decode() for number in range(12)]
elif what == "sockets":
    found = []
    for one, other in pairs:
        one.send(b"user\\n")
        other.setblocking(False)
        found.append(other.recv(100).decode())
else:
    found = []
Path("found.json").write_text(json.dumps(found))
"""


@pytest.mark.fault("descriptors-closed")
@pytest.mark.parametrize(("what", "end"), [("files", "fin"), ("sockets", "exit"), ("nothing", "exit")])
def test_no_descriptor_of_the_script_is_written_or_closed(launch, what, end):
    job = launch.code(CLOSES.format(what=what, end=end)).done()

    assert job.output("found.json") == ["user\n"] * {"files": 12, "sockets": 6, "nothing": 0}[what]
    assert job.stderr == ""
    summary = job.ledger.summary
    assert (summary.status, summary.iterations, summary.tokens) == ("completed", 40, 4000)


KILLS_ITS_AGENT = """
import os, signal, time, psutil
import effllm

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
effllm.initialize_efficientllm_metrics(10)
for child in psutil.Process().children():
    child.kill()
    child.wait()
collector = effllm.get_metrics_collector()
for number in range(40):
    collector.record_iteration_start()
    collector.record_iteration_end(100, 2)
open("reached", "w").close()
"""


@pytest.mark.fault("agent-killed")
def test_a_script_with_the_default_sigpipe_outlives_its_agent(launch):
    job = launch.code(KILLS_ITS_AGENT).wait()

    assert job.code == 0
    assert (job.folder / "reached").exists()
