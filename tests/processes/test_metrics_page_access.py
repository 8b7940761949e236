"""Access to the page of the sink prometheus: interface, TLS, token, and what a client without the token learns."""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl

import jobs
import pytest
from cases import cases
from prometheus_server import TOKEN, PrometheusServer, needs_prometheus, pages, private_file, protected
from sink_examples import make_report

from effllm.network import interface
from effllm.sinks import SinkUnavailable

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

NETWORK = interface.address_on_default_route()
needs_network = pytest.mark.skipif(not NETWORK, reason="this machine has no address besides loopback")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def files(tmp_path):
    return protected(tmp_path)


@pytest.fixture
def serve(tmp_path):
    """Return a function that opens the sink with options, and returns it."""
    with pages(tmp_path) as open_page:
        yield lambda **options: open_page(make_report(100), **options)


def get(port, address="127.0.0.1", trusted=None, method="GET", path="/metrics", **headers):
    """Return the status, the headers and the body of an answer."""
    secured = {} if trusted is None else {"context": ssl.create_default_context(cafile=trusted)}
    kind = http.client.HTTPSConnection if secured else http.client.HTTPConnection
    connection = kind(address, port, timeout=60, **secured)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


@pytest.mark.parametrize("given", [[], ["tls_cert", "tls_key"], ["token_file"]], ids=str)
def test_page_on_the_network_needs_tls_and_a_token(serve, files, given):
    with pytest.raises(SinkUnavailable, match="the page needs TLS and a token") as raised:
        serve(interface=NETWORK or "192.0.2.1", **{name: files[name] for name in given})

    assert "\n" not in str(raised.value)


@cases("address", ["0.0.0.0", "::", "no-such-nic", "198.51.100.77"])
def test_page_listens_only_on_one_address_of_this_host(serve, files, address):
    with pytest.raises(SinkUnavailable, match="is neither an interface nor an address of this host"):
        serve(interface=address, **files)


@needs_network
def test_page_is_served_on_the_network_with_tls_and_token(serve, tmp_path):
    files = protected(tmp_path, NETWORK)
    sink = serve(interface=NETWORK, **files)

    status, _, body = get(sink.port, NETWORK, files["tls_cert"], Authorization=f"Bearer {TOKEN}")
    assert (status, b'user="alice"' in body) == (200, True)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", sink.port), timeout=10).close()


WRONG = [
    {},
    {"Authorization": "Bearer "},
    {"Authorization": f"Bearer {TOKEN[:-1]}"},
    {"Authorization": f"Bearer {TOKEN}x"},
    {"Authorization": f"Basic {TOKEN}"},
    {"Authorization": TOKEN},
    {"Authorization": "Bearer \xfc\xff"},
]


HEADERS = {"date", "server", "www-authenticate", "content-type", "content-length"}


@cases("headers", WRONG)
def test_client_without_the_token_gets_401_and_no_fact(serve, files, headers):
    sink = serve(**files)

    for method, path in (("GET", "/metrics"), ("POST", "/"), ("HEAD", "/favicon.ico"), ("OPTIONS", "/metrics")):
        status, sent, body = get(sink.port, trusted=files["tls_cert"], method=method, path=path, **headers)

        assert status == 401
        assert {name.lower() for name in sent} <= HEADERS
        assert (sent["Server"], sent["WWW-Authenticate"]) == ("effllm", "Bearer")
        assert body == (b"" if method == "HEAD" else b"401 Unauthorized\n")


def test_malformed_request_gets_no_version_and_no_fact(serve, files):
    sink = serve(token_file=files["token_file"])
    with socket.create_connection(("127.0.0.1", sink.port), timeout=60) as client:
        client.sendall(b"NONSENSE / HTTP/9.9\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))

    assert re.search(rb"HTTP/1.[01] (5|4)|505", answer)
    assert b"Python" not in answer and b"efficientllm_" not in answer


def test_token_protects_a_loopback_page_without_tls(serve, files):
    sink = serve(token_file=files["token_file"])

    assert get(sink.port)[0] == 401
    assert get(sink.port, Authorization=f"bearer {TOKEN}")[0] == 200


def test_page_answers_while_clients_do_not_finish_the_handshake(serve, files):
    sink = serve(**files)
    silent = [socket.create_connection(("127.0.0.1", sink.port)) for _ in range(8)]
    try:
        assert get(sink.port, trusted=files["tls_cert"], Authorization=f"Bearer {TOKEN}")[0] == 200
        plain = socket.create_connection(("127.0.0.1", sink.port), timeout=60)
        plain.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b"efficientllm_" not in plain.recv(4096)
        plain.close()
    finally:
        for one in silent:
            one.close()


def test_wanted_port_in_use_is_replaced_by_a_free_port(serve):
    lines = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sink = serve(log=lines.append, port=port)

    assert lines == [f"port {port} is in use: metrics for Prometheus are at http://127.0.0.1:{sink.port}/metrics"]
    assert get(sink.port)[0] == 200


UNUSABLE = [
    ("token_file", lambda path: path.chmod(0o640), "can be read by other users"),
    ("tls_key", lambda path: path.chmod(0o644), "can be read by other users"),
    ("token_file", lambda path: path.unlink(), "token: No such file or directory"),
    ("token_file", lambda path: path.write_text("short\n"), "must have one line of 16 to 1000 ASCII characters"),
    ("token_file", lambda path: path.write_text(f"{TOKEN}\n{TOKEN}\n"), "must have one line of 16 to 1000 ASCII"),
    ("token_file", lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "is no regular file"),
    ("tls_cert", lambda path: path.write_text("nonsense"), "the certificate .* cannot be used"),
    ("tls_cert", lambda path: path.unlink(), "the certificate .* cannot be used"),
    pytest.param("token_file", lambda path: os.chown(path, 4711, 4711), "belongs to another user", marks=needs_root),
]


@pytest.mark.parametrize(("name", "change", "message"), UNUSABLE, ids=range(len(UNUSABLE)))
def test_unusable_file_disables_the_sink_with_one_line(serve, files, name, change, message):
    change(files[name])

    with pytest.raises(SinkUnavailable, match=message) as raised:
        serve(**files)
    assert "\n" not in str(raised.value)
    assert TOKEN not in str(raised.value)


def test_certificate_without_its_key_is_rejected(serve, files):
    with pytest.raises(SinkUnavailable, match="TLS needs two files"):
        serve(tls_cert=files["tls_cert"])


@needs_prometheus
@pytest.mark.faults
def test_real_prometheus_discovers_and_reads_a_protected_job(launch, tmp_path, files):
    targets = tmp_path / "targets"
    targets.mkdir()
    options = ":".join(f"{name}={value}" for name, value in {**files, "discovery_dir": targets, "port": 0}.items())

    def server(name, token):
        places = {"/srv/effllm-targets": targets, "/etc/prometheus/effllm-ca.pem": files["tls_cert"]}
        changes = {old: str(new) for old, new in {**places, "/etc/prometheus/effllm.token": token}.items()}
        return PrometheusServer(tmp_path / name, "prometheus_cluster.yml", **changes)

    wrong = private_file(tmp_path / "wrong", TOKEN[::-1])
    with server("right", files["token_file"]) as right, server("refused", wrong) as refused:
        settings = {"sinks": f"prometheus:{options}", "run_name": "mine", "environ": {"SLURM_JOB_ID": "7"}}
        job = launch.python("loop.py", "--until", "enough", **settings)
        (tokens,) = jobs.until(lambda: right.ask('efficientllm_tokens_total{run_id="mine"} > 0'))
        (refused_at,) = jobs.until(lambda: [name for name, health in refused.targets().items() if health == "down"])
        assert refused.ask('{__name__=~"efficientllm_.+"}') == [], "a wrong token reads nothing"
        job.finish()
        jobs.until(lambda: right.targets() == {})
        assert right.ask("efficientllm_tokens_total") == [], "values are stale after the end of the job"
        (last,) = right.ask("last_over_time(efficientllm_tokens_total[10m])")
        infos = right.ask("last_over_time(efficientllm_run_info[10m])")

    assert tokens["metric"]["instance"] == refused_at == last["metric"]["instance"]
    assert tokens["metric"]["job"] == "efficientllm"
    assert 0 < float(last["value"][1]) <= job.ledger.summary.tokens
    # A fact that is known after the first scrape makes another series.
    assert {(one["metric"]["job_id"], one["metric"]["instance"]) for one in infos} == {("7", refused_at)}
    assert list(targets.iterdir()) == []
