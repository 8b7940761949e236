"""effllm/network/discovery.py and interface.py: the published address, its source, and the validity of records."""

import json
import os
import socket
import stat
import threading
from pathlib import Path

import jobs
import pytest
from cases import cases

from effllm.config.place import Place
from effllm.config.settings import Config, secret_path
from effllm.network import discovery, interface, secret
from effllm.network.discovery import Search, SharedFile, config_with_secret, is_secured
from effllm.network.listening import DiscoveryError, listen, listen_within, own_address

OVER_HOSTS = Place(world_size=2, local_world_size=1, master_addr="127.0.0.1", launcher="slurm", launch_id="4711.0")
ONE_HOST = Place(world_size=2, local_world_size=2, master_addr="10.0.0.1")


class Source:
    """A source of records; the test sets the record."""

    key = "run/1"

    def __init__(self, record=None):
        self.record = record

    def connect(self):
        return True

    def publish(self, record):
        self.record = record
        return True

    def read_record(self):
        return self.record


class Found:
    """A rank that searches for the aggregator."""

    def __init__(self, source, is_secured=False, config=None):
        self.written, self.welcome = [], ""
        self.search = Search(
            source,
            config or Config(security="none"),
            is_secured,
            self.written.append,
            lambda endpoint: endpoint == self.welcome,
        )

    @property
    def lines(self):
        return [address.failed for address in self.written if address.failed]

    @property
    def records(self):
        found = [address for address in self.written if not address.failed]
        return [{name: text for name, text in vars(address).items() if text} for address in found]


FIRST = {"endpoint": "tcp://10.0.0.1:1000", "job": "first"}
SECOND = {"endpoint": "tcp://10.0.0.2:2000", "job": "second"}


def threads():
    return [one for one in threading.enumerate() if one.name == "effllm-discovery"]


@cases("endpoint", ["", "tcp://127.0.0.1:1", "tcp://10.0.0.1:1"])
def test_keys_are_used_unless_the_setting_security_is_none(endpoint):
    assert is_secured(Config(endpoint=endpoint)) and is_secured(Config(endpoint=endpoint, security="curve"))
    assert not is_secured(Config(endpoint=endpoint, security="none"))


def test_secret_is_created_in_a_writable_home_folder(tmp_path):
    config = Config(secret_file=str(tmp_path / "home" / "secret"))

    assert config_with_secret(config) == config
    assert secret.read(tmp_path / "home" / "secret")


@pytest.mark.parametrize("state", ["no folder", "others can read it", "a link"])
def test_all_ranks_find_one_secret_without_a_usable_home_folder(tmp_path, monkeypatch, state):
    monkeypatch.setattr(discovery, "TEMPORARY_FOLDERS", (str(tmp_path / "none"), str(tmp_path / "tmp")))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    (tmp_path / "none").write_text("a file")
    file = tmp_path / "home" / "secret"
    if state == "no folder":
        file.parent.write_text("a file")
    else:
        secret.read_or_create(file)
        if state == "a link":
            file.rename(tmp_path / "elsewhere")
            file.symlink_to(tmp_path / "elsewhere")
        else:
            file.chmod(0o644)

    first, second = (config_with_secret(Config(secret_file=str(file))) for _ in range(2))

    assert first == second
    assert first.secret_file == str(tmp_path / "tmp" / f"effllm-{os.geteuid()}" / "secret")
    assert secret.read(secret_path(first))
    assert stat.S_IMODE(secret_path(first).parent.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a folder")
def test_folder_of_another_user_is_not_used_for_the_secret(tmp_path, monkeypatch):
    theirs, ours = tmp_path / "one" / f"effllm-{os.geteuid()}", tmp_path / "two"
    theirs.mkdir(parents=True)
    os.chown(theirs, 12345, 12345)
    monkeypatch.setattr(discovery, "TEMPORARY_FOLDERS", (str(theirs.parent), str(ours)))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)

    assert Path(config_with_secret(Config(secret_file="/dev/null/secret")).secret_file).is_relative_to(ours)

    monkeypatch.setattr(discovery, "TEMPORARY_FOLDERS", (str(theirs.parent),))
    with pytest.raises(secret.SecretError, match="/dev/null/secret"):
        config_with_secret(Config(secret_file="/dev/null/secret"))


def test_single_host_job_listens_on_loopback():
    assert own_address(ONE_HOST, Config()) == "127.0.0.1"
    assert own_address(Place(), Config()) == "127.0.0.1"
    assert own_address(ONE_HOST, Config(interface="10.0.0.5")) == "127.0.0.1", "no other address without keys"


def test_configured_interface_or_address_is_used():
    assert own_address(OVER_HOSTS, Config(interface="lo")) == "127.0.0.1"
    assert own_address(OVER_HOSTS, Config(interface="10.0.0.5")) == "10.0.0.5"
    assert own_address(OVER_HOSTS, Config(interface="[fd00::5]")) == "fd00::5"
    assert interface.endpoint("fd00::5", 1) == "tcp://[fd00::5]:1"
    with pytest.raises(DiscoveryError, match="EFFICIENTLLM_INTERFACE=ib7: this host has no such interface"):
        own_address(OVER_HOSTS, Config(interface="ib7"))
    for every in ("0.0.0.0", "::"):
        with pytest.raises(DiscoveryError, match="is every interface: name one"):
            own_address(OVER_HOSTS, Config(interface=every))


def test_address_of_the_default_route_is_used_for_a_loopback_master(monkeypatch):
    monkeypatch.setattr(interface, "address_on_default_route", lambda: "")
    with pytest.raises(
        DiscoveryError, match=r"MASTER_ADDR=127.0.0.1 leads to no address .* set EFFICIENTLLM_INTERFACE"
    ):
        own_address(OVER_HOSTS, Config())

    monkeypatch.setattr(interface, "address_on_default_route", lambda: "10.0.0.9")
    assert own_address(OVER_HOSTS, Config()) == "10.0.0.9"
    nameless = Place(world_size=2, local_world_size=1, master_addr="no.such.host.invalid")
    with pytest.raises(DiscoveryError, match="cannot be reached"):
        own_address(nameless, Config())


def test_first_free_port_of_the_range_is_used():
    with listen("127.0.0.1") as taken:
        low = taken.getsockname()[1]
        with pytest.raises(DiscoveryError, match=f"no port of EFFICIENTLLM_PORTS={low}-{low} is free on 127.0.0.1"):
            listen_within("127.0.0.1", f"{low}-{low}")
        if low < 65535:
            with listen_within("127.0.0.1", f"{low}-65535") as listener:
                assert low < listener.getsockname()[1] < 65536
    with listen_within("127.0.0.1", "") as listener:
        assert listener.getsockname()[1]
    with pytest.raises(OSError, match="assign"):
        listen_within("203.0.113.1", "29700-29799")


def test_search_continues_until_the_agent_is_admitted(monkeypatch):
    monkeypatch.setattr(discovery, "MIN_RECHECK_S", 0.01)
    source = Source(FIRST)
    rank = Found(source)
    rank.search.start()
    assert rank.records == [FIRST], "the first record is used immediately"

    rank.welcome = "tcp://10.9.9.9:1"  # at another endpoint
    source.record = SECOND
    jobs.until(lambda: len(rank.records) == 2)
    assert rank.records == [FIRST, SECOND]
    assert threads()

    rank.welcome = SECOND["endpoint"]
    jobs.until(lambda: not threads())
    source.record = FIRST
    assert (rank.records, rank.lines) == ([FIRST, SECOND], [])


def test_rejection_by_rank_0_is_returned_to_the_agent_once():
    source = Source({"refused": "no way", "job": ""})
    rank = Found(source)
    rank.search._check_record()
    rank.search._check_record()
    assert (rank.records, rank.lines) == ([{"refused": "no way"}], []), (
        "the rejection is returned once, and only to the agent"
    )

    source.record = FIRST
    rank.search._check_record()
    assert rank.records[1:] == [FIRST], "the record of the next start is used"


def test_only_address_records_signed_for_this_run_are_valid(tmp_path):
    config = Config(secret_file=str(tmp_path / "secret"))
    source = Source(FIRST)
    rank = Found(source, True, config)
    rank.search._check_record()
    rank.search._check_record()
    assert (rank.records, len(rank.lines)) == ([], 1)
    assert "there is no secret" in rank.lines[0]

    known = secret.read_or_create(secret_path(config))
    for forged in (FIRST, secret.sign(b"x" * 64, FIRST, source.key), secret.sign(known, FIRST, "run/2")):
        source.record = forged
        rank.search._check_record()
    assert (rank.records, len(rank.lines)) == ([], 2)
    assert "is not signed with the secret" in rank.lines[1]

    source.record = secret.sign(known, SECOND, source.key)
    rank.search._check_record()
    assert rank.records == [SECOND]


# --- the file of srun and mpirun


def test_address_file_is_private_and_removed_with_its_job(tmp_path):
    config = Config(run_dir=str(tmp_path / "runs"))
    source = SharedFile(OVER_HOSTS, config, 1)

    assert source.read_record() is None
    assert source.publish(FIRST)
    assert source.path.name == ".address-4711.0-1"
    assert stat.S_IMODE(source.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(source.path.parent.stat().st_mode) == 0o700
    assert SharedFile(OVER_HOSTS, config, 1).read_record() == FIRST
    assert source.publish(SECOND)

    discovery.remove_record(source.path, "first")
    assert source.read_record() == SECOND, "the record of another job is not removed"
    discovery.remove_record(source.path, "second")
    assert list(source.path.parent.iterdir()) == []


def test_launch_without_an_id_raises_an_error_with_advice():
    with pytest.raises(DiscoveryError, match="set EFFICIENTLLM_RUN_NAME"):
        discovery.record_source(Place(world_size=2, launcher="openmpi"), Config(), 1)
    assert SharedFile(Place(world_size=2, launcher="openmpi"), Config(run_name="mine"), 1).key == "mine/1"
    assert discovery.record_source(Place(launcher="openmpi"), Config(), 1) is None


def test_launch_id_with_slashes_does_not_change_the_folder(tmp_path):
    place = Place(world_size=2, launcher="openmpi", launch_id="../../etc/x@1")
    assert SharedFile(place, Config(run_dir=str(tmp_path)), 1).path == tmp_path / ".address-..-..-etc-x-1-1"


BAD_RECORDS = [b"", b"{", b"[]", b"null", b'{"endpoint": 5}', b'{"endpoint": ["a"]}', b"[" * 3000, b"\xed\xa0\x80"]


@cases("content", [*BAD_RECORDS, json.dumps({"a": "x" * 5000}).encode()])
def test_invalid_address_record_is_ignored(tmp_path, content):
    source = SharedFile(OVER_HOSTS, Config(run_dir=str(tmp_path)), 1)
    source.path.write_bytes(content)

    assert source.read_record() is None


def test_symlink_and_pipe_are_not_read_as_address_records(tmp_path):
    source = SharedFile(OVER_HOSTS, Config(run_dir=str(tmp_path)), 1)
    (tmp_path / "real").write_text(json.dumps(FIRST))
    for make in (lambda path: path.symlink_to("real"), os.mkfifo):
        make(source.path)
        assert source.read_record() is None
        source.path.unlink()


@pytest.mark.faults
@pytest.mark.skipif(os.geteuid() != 0, reason="another user's file needs root")
def test_file_of_another_user_is_not_read_as_address_record(tmp_path):
    source = SharedFile(OVER_HOSTS, Config(run_dir=str(tmp_path)), 1)
    source.path.write_text(json.dumps(FIRST))
    assert source.read_record() is not None

    os.chown(source.path, 12345, 12345)
    assert source.read_record() is None


def test_loopback_and_wildcard_addresses_are_recognized_in_any_form():
    assert all(interface.is_loopback(one) for one in ("127.0.0.1", "127.0.1.1", "::1", "[::1]", "localhost"))
    assert not any(interface.is_loopback(one) for one in ("10.0.0.1", "fd00::1", "node7", "0.0.0.0", "::"))
    assert all(interface.is_wildcard(one) for one in ("0.0.0.0", "::", "[::]", "*", ""))
    assert not interface.is_wildcard("10.0.0.1")
    assert interface.address_towards("127.0.0.1") == ""
    if socket.has_ipv6:
        assert interface.address_of("::1") == "::1"


class PublicRecord:
    """A source of records to which every user can write."""

    key = "efficientllm/run/0/1/endpoint"

    def __init__(self, record):
        self.record = record

    def connect(self):
        return True

    def read_record(self):
        return self.record


def looked(record, security="auto"):
    written = []
    search = Search(PublicRecord(record), Config(security=security), False, written.append, lambda _: False)
    search._check_record()
    search._check_record()
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
