"""``effllm top --endpoint``: the metrics page of a job, with and without TLS and a token."""

import http.server
import json
import re
import threading

import jobs
import pytest
import redfish_service
from prometheus_server import TOKEN, private_file
from sink_examples import complete_totals, make_report, make_run
from terminal_screen import TerminalScreen

from effllm.analysis.run_folders import UnreadableRun
from effllm.commands.top_page import PageSource
from effllm.config.settings import Config
from effllm.records.identity import Identity
from effllm.sinks import open_sink
from effllm.views.top.frame import document, exit_status

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")


@pytest.fixture
def serve(tmp_path):
    """Return a function that opens the sink with options, writes a report, and returns the sink."""
    opened = []

    def serve(report=None, **options):
        text = ":".join(["prometheus", *(f"{name}={value}" for name, value in {"port": 0, **options}.items())])
        identity = Identity(run_id='m"i\\ne', user="alice")
        sink = open_sink("prometheus", make_run(tmp_path, config=Config(sinks=(text,)), identity=lambda: identity))
        opened.append(sink)
        if report is not None:
            sink.write(report)
        return sink

    yield serve
    for sink in opened:
        sink.close()


@pytest.fixture
def protected(tmp_path, serve):
    """Serve a page with TLS and a token; return its address, and the files of a client."""
    if redfish_service.certificate(tmp_path, "127.0.0.1") is None:
        pytest.skip("no openssl: no certificate can be made")
    token = private_file(tmp_path / "token", f"{TOKEN}\n")
    files = {"tls_cert": tmp_path / "certificate.pem", "tls_key": tmp_path / "key.pem", "token_file": token}
    sink = serve(make_report(100), **files)
    return f"https://127.0.0.1:{sink.port}/metrics", str(token), str(tmp_path / "certificate.pem")


def read(*arguments):
    source = PageSource(*arguments)
    source.refresh()
    return source.frame(1000.0)


def test_values_of_the_page_are_the_values_of_the_report(serve):
    report = make_report(100)
    frame = read(f"http://127.0.0.1:{serve(report).port}/metrics")

    assert (frame.head.name, frame.head.user, frame.head.iteration) == ('m"i\\ne', "alice", report.iteration)
    assert frame.coverage.ranks_reporting == report.coverage.ranks_reporting
    tags = ["throughput/tokens_per_second_per_gpu", "throughput/mfu_ratio", "memory/peak_gb", "aec_watts"]
    for tag in tags:
        assert frame.values[tag] == pytest.approx(report.values[tag], rel=1e-9), tag
    unknown = [tag for tag in frame.values if tag not in report.values]
    assert unknown == []


def test_named_stragglers_of_the_page_are_a_problem(serve):
    frame = read(f"http://127.0.0.1:{serve(make_report(100, last=complete_totals(10))).port}")

    assert [problem.text for problem in frame.problems] == ["1 named straggler"]
    json.dumps(document(frame), allow_nan=False)


def test_page_without_named_stragglers_has_no_problem(serve):
    frame = read(f"http://127.0.0.1:{serve(make_report(100, straggler=None)).port}")

    assert (frame.problems, frame.ranks.lines_with_reason()) == ([], [])


def test_page_without_a_report_has_no_values(serve):
    frame = read(f"http://127.0.0.1:{serve().port}")

    assert exit_status(frame) == 3
    assert frame.problems == []


def test_page_with_tls_and_token_is_read_with_both_files(protected):
    address, token, certificate = protected

    assert read(address, token, certificate).head.user == "alice"
    with pytest.raises(OSError, match="401"):
        read(address, "", certificate)
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        read(address, token)


def test_token_is_not_sent_to_another_host_without_tls(tmp_path):
    token = private_file(tmp_path / "token", TOKEN)

    with pytest.raises(UnreadableRun, match="only over https"):
        PageSource("http://10.1.0.7:9788/metrics", str(token))


def test_token_that_others_can_read_is_an_error(tmp_path):
    token = private_file(tmp_path / "token", TOKEN)
    token.chmod(0o644)

    with pytest.raises(UnreadableRun, match="can be read by other users"):
        PageSource("http://127.0.0.1:9788/metrics", str(token))


def test_page_of_another_program_is_an_error():
    page = http.server.HTTPServer(("127.0.0.1", 0), OtherPage)
    thread = threading.Thread(target=page.handle_request)
    thread.start()
    try:
        with pytest.raises(UnreadableRun, match="not a metrics page of effllm"):
            PageSource(f"http://127.0.0.1:{page.server_port}").refresh()
    finally:
        thread.join(10.0)
        page.server_close()


class OtherPage(http.server.BaseHTTPRequestHandler):
    """A page with a metric of another program."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"other_metric 1\n")

    def log_message(self, *_): ...


def test_real_job_is_shown_by_its_page_until_it_ends(launch, cli, tmp_path):
    port = jobs.unused_port()
    address = f"http://127.0.0.1:{port}/metrics"
    job = launch.python(
        "loop.py", "--until", "enough", "--step-s", 0.02, sinks=f"prometheus:port={port}", log_interval=5
    )
    jobs.until(lambda: job.num_windows > 2)
    screen = TerminalScreen("top", "--endpoint", address)
    try:
        screen.shows("running")
        screen.shows("tok/s/")
        iteration = re.compile(r"  it (\d+)")
        first = int(jobs.until(lambda: iteration.search(screen.text))[1])
        jobs.until(lambda: int(iteration.search(screen.text)[1]) > first)
        done = cli.run("top", "--endpoint", address, "--once", "--json")
        found = json.loads(done.stdout)
        assert (done.returncode, found["run"]["status"], found["problems"]) == (0, "running", [])
        assert found["coverage"]["ranks_reporting"] == 1
        (job.folder / "enough").touch()
        job.wait()
        screen.shows("older values are shown: no answer")
        screen.press("q")
        assert screen.ended() == 0
    finally:
        screen.close()
    assert cli.run("top", "--endpoint", address, "--once").returncode == 3
