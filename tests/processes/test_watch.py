"""The command effllm watch: values from two metrics pages of a server, and wrong answers, which cause no traceback."""

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import jobs
import pytest
from cases import cases
from cli_process import read_until
from prometheus_server import PageServer

from effllm.agent import gpu_energy
from effllm.commands.metrics_page import Unreachable, address_of
from effllm.commands.watch import NotVllm, difference, fetch_page, parse_page
from effllm.devices import DeviceUnavailable
from effllm.records.rank import COUNTER, Device, Sample

STAND_IN = Path(__file__).parents[2] / "integration" / "vllm" / "stand_in.py"


def page(generated, prompt=0, *, engines=1, started=1000.0, waited=(0.0, 0), name="_total", running=1):
    lines = ["# TYPE vllm:generation_tokens counter", f"process_start_time_seconds {started}"]
    for engine in range(engines):
        labels = f'{{engine="{engine}",model_name="a }} b{{c"}}'
        lines += [
            f"vllm:generation_tokens{name}{labels} {generated} 1700000000000",
            f"vllm:prompt_tokens{name}{labels} {prompt}",
            f"vllm:num_requests_running{labels} {running}.0",
        ]
    first = "vllm:time_to_first_token_seconds"
    lines += [f"{first}_sum {waited[0]}", f"{first}_count {waited[1]}"]
    return "\n".join(lines) + "\n"


def seen(first, second, seconds=5.0):
    return difference(parse_page(first, 100.0), parse_page(second, 100.0 + seconds))


def test_tokens_and_time_to_first_token_are_computed_from_two_pages():
    found = seen(page(1000, 40, engines=2, waited=(1.0, 10)), page(1500, 90, engines=2, waited=(1.6, 14), running=3))

    assert (found.interval_s, found.generation_tokens, found.prompt_tokens) == (5.0, 1000.0, 100.0)  # 2 * 500, 2 * 50
    assert found.requests_running == 6.0
    assert found.time_to_first_token_s == pytest.approx(0.15)  # 0.6 s over 4 requests
    assert not found.restarted
    assert seen(page(10), page(10)).time_to_first_token_s is None, "no requests"


NAME = "vllm:generation_tokens_total"
STRANGE = f"{NAME}{{a=\n{NAME} NaN\n}}\n}}{{\nvllm:prompt_tokens_total x\n\x00\n"
TWO_PAGES = {
    "the old name of a counter": (page(10, name=""), page(25, name=""), 15.0),
    "a model that is loaded later": (page(10), page(30) + f'{NAME}{{engine="9",model_name="new"}} 7\n', 27.0),
    "no counter before the first token": ('vllm:num_requests_running{model_name="m"} 0\n', page(12), 12.0),
    "lines that are no samples": (page(5) + STRANGE, page(6) + STRANGE, 1.0),
    "a lower counter": (page(1000), page(900), None),
    "a later start": (page(1000), page(2000, started=2000.0), None),
    "a lower counter of prompts": (page(1000), page(1200, prompt=-1), None),
}


@pytest.mark.parametrize(("first", "second", "tokens"), TWO_PAGES.values(), ids=TWO_PAGES)
def test_tokens_are_unknown_in_an_interval_with_a_restart(first, second, tokens):
    found = seen(first, second)

    assert (found.restarted, found.generation_tokens) == (tokens is None, tokens)
    assert tokens is not None or found.prompt_tokens is None


@pytest.mark.parametrize("text", ["", "<html>hello</html>", 'go_goroutines 8\nhttp_requests_total{code="200"} 3\n'])
def test_rejection_of_another_page_lists_the_missing_metrics(text):
    with pytest.raises(NotVllm, match="vllm:generation_tokens_total"):
        parse_page(text, 0.0)


@cases(
    "url", ["", "localhost:8000", "ftp://h/metrics", "file:///etc/passwd", "http://", "http://u:p@h/", "http://h:x/"]
)
def test_watch_rejects_an_invalid_server_address(url):
    with pytest.raises(ValueError, match=r"http|port|Port"):
        address_of(url)


def test_default_path_of_the_watched_page_is_metrics():
    assert address_of("http://127.0.0.1:8000") == ("http", "127.0.0.1", 8000, "/metrics")
    assert address_of("https://h/a/metrics") == ("https", "h", 443, "/a/metrics")


# --- over the network of this machine --------------------------------------------------------------


@pytest.fixture
def serve():
    """Return a function that serves pages, and returns their address."""
    with ExitStack() as servers:
        yield lambda *answers: servers.enter_context(closing(PageServer(*answers))).url


@pytest.mark.parametrize(
    ("answer", "reason"), [(500, "500"), (302, "302 Found to http://elsewhere/"), (None, "no answer")]
)
def test_error_redirect_and_missing_server_are_unreachable(serve, answer, reason):
    with pytest.raises(Unreachable, match=reason):
        fetch_page(serve(answer) if answer else "http://127.0.0.1:1/metrics")


class LateReader:
    """A GPU of 300 W; the first read of the last GPU returns after all GPUs are open, as with a busy driver."""

    def __init__(self, index, last):
        self.device = Device(key=f"GPU-{index}", kind="nvml", energy_method=COUNTER)
        self._is_first = index == last

    def read(self):
        if self._is_first:
            time.sleep(0.3)
            self._is_first = False
        now_ns = time.monotonic_ns()
        return Sample(time_ns=now_ns, energy_j=300e-9 * now_ns, power_w=300.0), {}

    def close(self):
        pass


def test_gpu_with_a_late_first_read_is_counted(monkeypatch):
    def open_device(_name, site):
        if site.local_rank >= 4:
            raise DeviceUnavailable("there are four")
        return LateReader(site.local_rank, last=3)

    monkeypatch.setattr(gpu_energy, "open_named_or_any_gpu", open_device)
    gpus = gpu_energy.GpuEnergy("nvml", {}, 0.05)
    gpus.start_samplers()

    def joules_of_a_while():
        start_s = time.monotonic()
        time.sleep(0.3)
        return gpus.take_joules(start_s, start_s + 0.2)

    joules = jobs.until(joules_of_a_while)  # no value is returned while a reading is late
    count = gpus.num_gpus
    gpus.close()

    assert count == 4
    assert joules == pytest.approx(4 * 300 * 0.2, rel=0.05)


def watch(cli, url, *arguments, device="simulated"):
    return cli.run("watch", "--vllm", url, "--interval", "0.5", *arguments, EFFICIENTLLM_DEVICE=device)


def rows_of(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_json_output_has_one_line_per_interval_with_joules_per_token(cli, serve):
    done = watch(cli, serve(page(1000, 10), page(1500, 20), page(1700, 20)), "--count", "2", "--json")

    assert (done.returncode, done.stderr) == (0, "")
    assert [row["generation_tokens"] for row in rows_of(done)] == [500.0, 200.0]
    for row in rows_of(done):
        assert row["simulated"]
        assert row["tokens_per_second"] == pytest.approx(row["generation_tokens"] / row["interval_s"], rel=1e-4)
        assert 100 < row["watts"] < 700  # the simulated power is 400 W plus or minus up to 250 W
        assert row["joules_per_token"] == pytest.approx(row["joules"] / row["generation_tokens"])
        assert row["joules_per_10k_tokens"] == pytest.approx(1e4 * row["joules_per_token"])


def test_table_fits_80_columns_and_ends_with_the_sum(cli, serve):
    lines = watch(cli, serve(page(1000), page(1500), page(2500)), "--count", "2").stdout.splitlines()

    assert max(map(len, lines)) <= 80
    assert any("SIMULATED" in line for line in lines)
    assert lines[-1].startswith("1,500 tokens in ") and "J/token" in lines[-1]


def test_power_is_reported_as_not_measured_without_a_gpu(cli, serve):
    table, done = (
        watch(cli, serve(page(1), page(2)), "--count", "1", *form, device="host") for form in ([], ["--json"])
    )

    assert "power is not measured" in table.stdout
    (row,) = rows_of(done)
    assert (row["gpus"], row["watts"], row["joules_per_token"], row["generation_tokens"]) == (0, None, None, 1.0)


def test_watch_continues_after_a_restart_and_an_outage(cli, serve):
    url = serve(page(1000), page(10, started=2000.0), 503, page(40, started=2000.0), page(50, started=2000.0))

    done = watch(cli, url, "--count", "4", "--json")
    assert [(row["restarted"], row["generation_tokens"]) for row in rows_of(done)] == [(True, None), (False, 10.0)]
    assert (done.returncode, "503" in done.stderr) == (0, True)


@pytest.mark.parametrize(
    ("url", "status", "line"),
    [
        ("http://127.0.0.1:1/metrics", 1, "no answer"),
        (None, 1, "not a page of a vLLM server: expected metrics such as vllm:generation_tokens_total"),
    ],
)
def test_watch_fails_if_no_vllm_server_answers(cli, serve, url, status, line):
    done = watch(cli, url or serve("up 1\n"), "--count", "1")

    assert (done.returncode, line in done.stderr, "Traceback" in done.stderr) == (status, True, False)


def test_watch_reads_the_fake_server_of_the_integration(cli):
    server = subprocess.Popen(
        [sys.executable, str(STAND_IN), "--port", "0", "--tokens-per-second", "1000"], stdout=subprocess.PIPE, text=True
    )
    try:
        url = server.stdout.readline().strip()
        process = cli.start("watch", "--vllm", url, "--interval", "2", "--json", EFFICIENTLLM_DEVICE="simulated")
        rows = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
        server.stdout.close()

    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(1000, rel=0.2)
        assert row["time_to_first_token_s"] == pytest.approx(0.05, abs=0.001)
        assert row["requests_running"] == 8


def test_watch_reports_an_end_before_its_first_interval(cli, serve):
    process = cli.start("watch", "--vllm", serve(page(1)), "--interval", "600", EFFICIENTLLM_DEVICE="simulated")
    read_until(process, "SIMULATED")
    process.send_signal(signal.SIGINT)

    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopped before anything was measured" in shown
