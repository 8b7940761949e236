"""The sink otlp of a job on two hosts, in two network namespaces: each device once, with its host."""

import json
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
from hosts import slurm_ranks
from otlp_receiver import Point

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otlp is not installed")

RECEIVER = Path(__file__).parents[1] / "otlp_receiver.py"


def test_devices_of_both_hosts_are_sent_once(hosts, launch, tmp_path):
    pair, port, file = hosts(2), jobs.unused_port(), tmp_path / "points.json"
    receiver = subprocess.Popen([*pair[0].prefix, sys.executable, str(RECEIVER), str(port), str(file)])
    try:
        jobs.until(file.exists)
        sinks = f"console,otlp:endpoint=http://127.0.0.1:{port}/v1/metrics:every=0"
        second, first = reversed(slurm_ranks(launch, pair, "--iterations", 40, "--step-s", 0.05, sinks=sinks))
        first.done(120), second.done(120)
        summary = first.ledger.summary
        jobs.until(lambda: newest(file, "effllm.tokens").get("") == summary.tokens)
    finally:
        receiver.kill()
        receiver.wait(20)

    assert newest(file, "hw.energy") == pytest.approx(summary.energy.by_device)
    points = [Point(*one) for one in json.loads(file.read_text())]
    hosts_of = {one.attributes["hw.id"]: one.resource["host.name"] for one in points if one.name == "hw.energy"}
    assert sorted(hosts_of.values()) == ["host1", "host2"]
    assert {one.resource["effllm.run.id"] for one in points} == {first.ledger.folder.name}


def newest(file, name):
    """Return the last value of a metric by device; the key of a value of the job is empty."""
    points = [Point(*one) for one in json.loads(file.read_text())]
    return {one.attributes.get("hw.id", ""): one.value for one in points if one.name == name}
