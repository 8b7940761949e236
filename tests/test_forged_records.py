"""An address that another user wrote where rank 0's is looked for, on a host where there can be no secret."""

import pytest

from effllm.config import Config
from effllm.network.discovery import Search


class Place:
    """Where a record lies, and anybody may write."""

    key = "efficientllm/run/0/1/endpoint"

    def __init__(self, record):
        self.record = record

    def connect(self):
        return True

    def look(self):
        return self.record


def looked(record, security="auto"):
    found, told = [], []
    search = Search(Place(record), Config(security=security), False, found.append, told.append, lambda _: False)
    search._look()
    search._look()
    return found, told


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "tcp://[::1]:5555"])
def test_an_address_of_this_host_is_believed(endpoint):
    assert looked({"endpoint": endpoint, "job": "a"}) == ([{"endpoint": endpoint, "job": "a"}], [])


@pytest.mark.parametrize(
    "endpoint", ["tcp://192.0.2.1:5555", "tcp://evil.example:80", "tcp://[2001:db8::1]:5555", "ipc:///x", ""]
)
def test_an_address_off_this_host_is_refused_once_and_named(endpoint):
    found, told = looked({"endpoint": endpoint, "job": "a"})

    assert found == []
    assert told == [
        f"no metrics of this rank: rank 0's address, {endpoint}, is not on this host: another user or job wrote it"
    ]


def test_whoever_asked_for_no_security_gets_none():
    assert looked({"endpoint": "tcp://192.0.2.1:5555", "job": "a"}, "none")[1] == []
