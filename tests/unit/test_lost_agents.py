"""effllm/server/job_end.py: an agent without a connection for two seconds is lost."""

import jobs
import pytest
from builders import Job

from effllm.config.settings import Config
from effllm.network.transport import Link, ServerSocket, make_context
from effllm.records.orders import Orders
from effllm.records.wire import Ack
from effllm.server.job_end import JobEnd


@pytest.fixture
def lost():
    """Return a function of the time and the connected ranks: the lost ranks at the end of a job, which rank 0 left."""
    job, reached = Job(3).join(), set()
    job.tick(5.0).bye(0)
    end = JobEnd(job.aggregator, Orders(Config(), "job", "", ""), lambda rank: rank in reached)

    def look(now_s, *ranks):
        reached.clear()
        reached.update(ranks)
        end.mark_disconnected_as_lost(now_s)
        return job.aggregator.presence.lost

    return look


def test_agent_is_lost_after_two_seconds_without_connection(lost):
    assert lost(10.0, 2) == set()
    assert lost(11.9, 2) == set()
    assert lost(12.0, 2) == {1}


def test_reconnected_agent_is_not_lost(lost):
    lost(10.0, 2)
    lost(11.0, 1, 2)

    assert lost(12.5, 2) == set()


@pytest.fixture
def context():
    context = make_context()
    yield context
    context.destroy(linger=0)


def test_send_fails_for_closed_peers_but_not_for_slow_peers(context):
    server = ServerSocket(context)
    address = server.listen("tcp://127.0.0.1:*")
    link = Link(context, address)
    link.connect()
    link.socket.send(b"x")
    peer, _ = jobs.until(server.receive)

    assert all(server.send(peer, Ack(0)) for _ in range(500)), "the agent reads nothing but is connected"
    link.close()
    jobs.until(lambda: not server.send(peer, Ack(0)))
    server.close()


def test_end_of_a_job_does_not_wait_for_lost_ranks():
    job = Job().join()
    presence = job.aggregator.presence
    assert presence.ranks_last_heard(before_s=1.0) == [0, 1]
    job.tick(5.0).bye(0)
    assert presence.ranks_last_heard(before_s=6.0) == [1]
    assert not job.aggregator.is_finished(8.0)
    assert not presence.is_deserted
    job.aggregator.mark_lost(1, 1008.0)

    assert job.aggregator.is_finished(8.0)
    assert presence.is_deserted
    assert job.summary(ended=True).status == "ended"
    assert [event.rank for event in job.events("rank_lost")] == [1]
