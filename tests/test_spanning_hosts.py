"""Jobs that span hosts: found, encrypted, and closed to strangers; with real hosts, launchers and sockets."""

import json
import os
import re
import stat
import sys
from pathlib import Path

import jobs
import pytest

from effllm import secret
from effllm.config import Config, secret_path
from effllm.curve import AgentKeys, KeyPair

pytestmark = [pytest.mark.faults, *jobs.needs_torch]

RANKS = Path(__file__).parent / "scripts" / "store_loop.py"
ITERATIONS, TOKENS = 40, 100
PORT = 29555


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """A home that all hosts share, as they share the run folders."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def torchrun(launch, host, node, master, *options, environ=None, iterations=ITERATIONS, nodes=2, **settings):
    rendezvous = options or ("--node_rank", str(node), "--master_addr", master, "--master_port", str(PORT))
    own = launch.on(host)
    return own.torchrun(
        ["--nnodes", str(nodes), "--nproc_per_node", "2", *rendezvous],
        "store_loop.py",
        "--iterations",
        iterations,
        environ=environ,
        **settings,
    )


def is_one_job_of_four(first, second, iterations=ITERATIONS):
    summary = first.ledger.summary
    assert (summary.tokens, summary.iterations, summary.status) == (4 * iterations * TOKENS, iterations, "completed")
    assert {row.rank for row in first.ledger.ranks} == {0, 1, 2, 3}
    assert {row.host for row in first.ledger.ranks} == {"host1", "host2"}
    assert len(first.runs()) == 1
    assert (first.our_errors, second.our_errors) == ([], [])


def endpoint_of(job):
    return json.loads((job.ledger.folder / "run.json").read_bytes())


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_two_hosts_are_one_job_with_keys(hosts, launch, family):
    one, two = hosts(2)
    master = one.address if family == "IPv4" else one.address6

    first, second = (torchrun(launch, host, node, master) for node, host in enumerate((one, two)))
    first.done(60), second.done(60)

    is_one_job_of_four(first, second)
    assert "strangers" not in first.ledger.summary.events
    file = secret_path(Config())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_rendezvous_of_c10d_does_as_well(hosts, launch):
    one, two = hosts(2)
    options = ("--rdzv_backend", "c10d", "--rdzv_endpoint", f"{one.address}:{PORT}", "--rdzv_id", "job-1")

    first, second = (torchrun(launch, host, 0, "", *options) for host in (one, two))
    first.done(60), second.done(60)

    assert len(first.runs()) == 1
    summary = first.ledger.summary
    assert (summary.tokens, summary.status) == (4 * ITERATIONS * TOKENS, "completed")
