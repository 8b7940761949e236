"""On a host without a secret: an address record written by another user instead of rank 0."""

import pytest
from cases import cases

from effllm.config.settings import Config
from effllm.network.discovery import Search


class Place:
    """A source of records to which every user can write."""

    key = "efficientllm/run/0/1/endpoint"

    def __init__(self, record):
        self.record = record

    def connect(self):
        return True

    def read(self):
        return self.record


def looked(record, security="auto"):
    written = []
    search = Search(Place(record), Config(security=security), False, written.append, lambda _: False)
    search._read_record()
    search._read_record()
    found = [{"endpoint": one.endpoint, "job": one.job} for one in written if one.endpoint]
    return found, [one.failed for one in written if one.failed]


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "tcp://[::1]:5555"])
def test_address_of_this_host_is_used(endpoint):
    assert looked({"endpoint": endpoint, "job": "a"}) == ([{"endpoint": endpoint, "job": "a"}], [])


@cases("endpoint", ["tcp://192.0.2.1:5555", "tcp://evil.example:80", "tcp://[2001:db8::1]:5555", "ipc:///x", ""])
def test_address_of_another_host_is_rejected_once(endpoint):
    found, lines = looked({"endpoint": endpoint, "job": "a"})

    assert found == []
    assert lines == [
        f"no metrics of this rank: rank 0's address, {endpoint}, is not on this host: "
        "another user or job wrote this address"
    ]


def test_security_none_accepts_any_address():
    assert looked({"endpoint": "tcp://192.0.2.1:5555", "job": "a"}, "none")[1] == []
