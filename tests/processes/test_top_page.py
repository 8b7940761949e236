"""``effllm top --endpoint``: the metrics page of a job, with and without TLS and a token."""

import json
import re
from contextlib import closing

import jobs
import pytest
from prometheus_server import TOKEN, PageServer, pages, private_file, protected
from sink_examples import complete_totals, make_report
from terminal_screen import TerminalScreen

from effllm.analysis.run_folders import UnreadableRun
from effllm.commands.top_page import PageSource
from effllm.records.identity import Identity
from effllm.views.top.frame import document, exit_status

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")


@pytest.fixture
def serve(tmp_path):
    with pages(tmp_path) as open_page:
        yield open_page


def read(sink, *arguments, scheme="http"):
    source = PageSource(f"{scheme}://127.0.0.1:{sink.port}/metrics", *map(str, arguments))
    source.refresh()
    return source.frame(1000.0)


def test_values_of_the_page_are_the_values_of_the_report(serve):
    report = make_report(100)
    frame = read(serve(report, identity=Identity(run_id='m"i\\ne', user="alice")))

    assert (frame.head.name, frame.head.user, frame.head.iteration) == ('m"i\\ne', "alice", report.iteration)
    assert frame.coverage.ranks_reporting == report.coverage.ranks_reporting
    tags = {"throughput/tokens_per_second_per_gpu", "throughput/mfu_ratio", "memory/peak_gb", "aec_watts"}
    assert tags <= set(frame.values) <= set(report.values)
    for tag in tags:
        assert frame.values[tag] == pytest.approx(report.values[tag], rel=1e-9), tag


def test_named_stragglers_of_the_page_are_a_problem(serve):
    frame = read(serve(make_report(100, last=complete_totals(10))))
    assert [problem.text for problem in frame.problems] == ["1 named straggler"]
    json.dumps(document(frame), allow_nan=False)

    frame = read(serve(make_report(100, straggler=None)))
    assert (frame.problems, frame.ranks.lines_with_reason()) == ([], [])


def test_page_without_a_report_has_no_values(serve):
    frame = read(serve())

    assert (exit_status(frame), frame.problems) == (3, [])


def test_page_with_tls_and_token_is_read_with_both_files(serve, tmp_path):
    files = protected(tmp_path)
    sink, token, certificate = serve(make_report(100), **files), files["token_file"], files["tls_cert"]

    assert read(sink, token, certificate, scheme="https").head.user == "alice"
    with pytest.raises(OSError, match="401"):
        read(sink, "", certificate, scheme="https")
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        read(sink, token, scheme="https")


@pytest.mark.parametrize(
    ("address", "mode", "message"),
    [("10.1.0.7", 0o600, "only over https"), ("127.0.0.1", 0o644, "can be read by other users")],
)
def test_token_is_sent_to_no_other_host_without_tls_and_is_private(tmp_path, address, mode, message):
    token = private_file(tmp_path / "token", TOKEN, mode)

    with pytest.raises(UnreadableRun, match=message):
        PageSource(f"http://{address}:9788/metrics", str(token))


def test_page_of_another_program_is_an_error():
    with closing(PageServer("other_metric 1\n")) as page, pytest.raises(UnreadableRun, match="not a metrics page of"):
        PageSource(page.url).refresh()


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
