"""Another user of a job's host finds the aggregator's port on loopback and connects before a rank does."""

import os
import socket

import jobs
import pytest
from after_fault import assert_whole
from builders import hello, reports, row

from effllm.config.settings import Config, secret_path
from effllm.network.curve import AgentKeys
from effllm.network.transport import Link, make_context

MISSING, WRONG = "no key", "another secret"
#: Of ZMTP 3.0 (rfc.zeromq.org/spec/23), without keys.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def rank_of_job(launch, rank):
    return launch.python("loop.py", "--until", "enough", environ=jobs.openmpi_environ(rank, 2), run_name="one")


@pytest.fixture
def intruder():
    """Return a function that connects repeatedly as rank 1 of a job and returns the answers."""
    context, links, plain = make_context(), [], []

    def intrude(job, keys):
        # A child that the aggregator has just forked has the aggregator's command line until its exec.
        (server,) = jobs.until(lambda: len(found := job.find("effllm.server.process")) == 1 and found)
        (port,) = jobs.until(lambda: jobs.listening_ports(server))
        link = Link(context, f"tcp://127.0.0.1:{port}", keys)
        links.append(link)
        link.connect()
        answers = []
        if keys is None:
            # A ZeroMQ peer often disconnects before it is rejected, as a killed agent does. This plain connection waits
            # for its rejection.
            plain.append(socket.create_connection(("127.0.0.1", port)))
            plain[-1].sendall(GREETING)

        def intrude_again():
            if link.has_new_connection():
                link.send(hello(1, job=job.ledger.facts["job"]))
                link.send(reports(row(1, tokens=1_000_000)))
            answers.extend(link.receive())
            return answers

        return intrude_again

    yield intrude
    for one in (*links, *plain):
        one.close()
    context.destroy(linger=0)


@pytest.mark.parametrize("reason", [MISSING, WRONG])
def test_other_local_user_does_not_take_the_place_of_a_rank(launch, intruder, reason):
    first = rank_of_job(launch, 0)
    jobs.until(lambda: first.runs() and (first.runs()[0] / "run.json").exists())
    intrude_again = intruder(
        first, AgentKeys.from_secret(os.urandom(32), first.ledger.facts["job"]) if reason == WRONG else None
    )

    def rejected():
        intrude_again()
        return [text for text in first.ledger.event_texts("rejected") if "was rejected" in text]

    jobs.until(rejected)
    second = rank_of_job(launch, 1)
    jobs.until(lambda: intrude_again() or any(one.rank == 1 for one in first.ledger.ranks))
    answers = intrude_again()
    for job in (first, second):
        (job.folder / "enough").touch()
    iterations = {rank: job.finish() for rank, job in enumerate((first, second))}

    assert answers == []
    summary = assert_whole(first.ledger, iterations)
    assert summary.events["unauthenticated"] >= 1
    assert "wrong_rank" not in summary.events
    assert (first.our_errors, second.our_errors) == ([], [])


def test_ranks_without_a_usable_home_folder_connect_with_keys(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null")
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    ranks = [rank_of_job(launch, rank) for rank in range(2)]
    jobs.until(lambda: ranks[0].runs() and {one.rank for one in ranks[0].ledger.ranks} == {0, 1})
    for job in ranks:
        (job.folder / "enough").touch()

    assert_whole(ranks[0].ledger, {rank: job.finish() for rank, job in enumerate(ranks)})
    assert [job.our_errors for job in ranks] == [[], []]
    assert ranks[0].ledger.facts["config"]["secret_file"] == str(runtime / f"effllm-{os.geteuid()}" / "secret")
    assert not secret_path(Config()).exists()
