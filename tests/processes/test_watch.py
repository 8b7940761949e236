"""The command effllm watch: values from two metrics pages of a server, and wrong answers, which cause no traceback."""

import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jobs
import pytest
from cases import cases
from cli_process import read_until

from effllm.agent import gpu_energy
from effllm.commands.metrics_page import Unreachable, address
from effllm.commands.watch import NotVllm, between, fetch, parse
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
    return between(parse(first, 100.0), parse(second, 100.0 + seconds))


def test_tokens_and_time_to_first_token_are_computed_from_two_pages():
    found = seen(page(1000, 40, engines=2, waited=(1.0, 10)), page(1500, 90, engines=2, waited=(1.6, 14), running=3))

    assert (found.interval_s, found.generation_tokens, found.prompt_tokens) == (5.0, 1000.0, 100.0)  # 2 * 500, 2 * 50
    assert found.requests_running == 6.0
    assert found.time_to_first_token_s == pytest.approx(0.15)  # 0.6 s over 4 requests
    assert not found.restarted


def test_counters_with_an_old_or_a_new_name_are_read():
    assert seen(page(10, name=""), page(25, name="")).generation_tokens == 15.0


def test_time_to_first_token_is_missing_without_requests():
    assert seen(page(10), page(10)).time_to_first_token_s is None


def test_counters_of_a_model_that_is_loaded_later_begin_at_zero():
    later = page(30) + 'vllm:generation_tokens_total{engine="9",model_name="new"} 7\n'

    assert seen(page(10), later).generation_tokens == 27.0


@pytest.mark.parametrize("after", [page(900), page(2000, started=2000.0), page(1200, prompt=-1)])
def test_tokens_are_unknown_in_an_interval_with_a_restart(after):
    found = seen(page(1000), after)

    assert (found.restarted, found.generation_tokens, found.prompt_tokens) == (True, None, None)


def test_missing_token_counter_before_the_first_token_counts_as_0():
    found = seen('vllm:num_requests_running{model_name="m"} 0\n', page(12))

    assert (found.generation_tokens, found.restarted) == (12.0, False)


@pytest.mark.parametrize("text", ["", "<html>hello</html>", 'go_goroutines 8\nhttp_requests_total{code="200"} 3\n'])
def test_rejection_of_another_page_lists_the_missing_metrics(text):
    with pytest.raises(NotVllm, match="vllm:generation_tokens_total"):
        parse(text, 0.0)


def test_lines_that_are_not_samples_are_skipped():
    name = "vllm:generation_tokens_total"
    strange = f"{name}{{a=\n{name} NaN\n}}\n}}{{\nvllm:prompt_tokens_total x\n\x00\n"

    assert seen(page(5) + strange, page(6) + strange).generation_tokens == 1.0


@cases(
    "url", ["", "localhost:8000", "ftp://h/metrics", "file:///etc/passwd", "http://", "http://u:p@h/", "http://h:x/"]
)
def test_watch_rejects_an_invalid_server_address(url):
    with pytest.raises(ValueError, match=r"http|port|Port"):
        address(url)


def test_default_path_of_the_watched_page_is_metrics():
    assert address("http://127.0.0.1:8000") == ("http", "127.0.0.1", 8000, "/metrics")
    assert address("https://h/a/metrics") == ("https", "h", 443, "/a/metrics")


# --- over the network of this machine --------------------------------------------------------------


class Server:
    """A server that sends a list of pages, one per request, and repeats the last page; a number is a status code."""

    def __init__(self, *answers):
        answers = list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                self.send_response(answer if isinstance(answer, int) else 200)
                if answer == 302:
                    self.send_header("Location", "http://elsewhere/")
                self.end_headers()
                if isinstance(answer, str):
                    self.wfile.write(answer.encode())

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def serve():
    servers = []

    def start(*answers):
        servers.append(Server(*answers))
        return servers[-1].url

    yield start
    for server in servers:
        server.close()


def test_watch_rejects_error_and_redirect_answers_of_a_server(serve):
    with pytest.raises(Unreachable, match="500"):
        fetch(serve(500))
    with pytest.raises(Unreachable, match="302 Found to http://elsewhere/"):
        fetch(serve(302))


def test_missing_server_is_reported_as_unreachable(serve):
    with pytest.raises(Unreachable, match="no answer"):
        fetch("http://127.0.0.1:1/metrics")


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

    monkeypatch.setattr(gpu_energy, "open_gpu", open_device)
    gpus = gpu_energy.GpuEnergy("nvml", {}, 0.05)
    gpus.start()

    def joules_of_a_while():
        start_s = time.monotonic()
        time.sleep(0.3)
        return gpus.joules(start_s, start_s + 0.2)

    joules = jobs.until(joules_of_a_while)  # no value is returned while a reading is late
    count = gpus.count
    gpus.close()

    assert count == 4
    assert joules == pytest.approx(4 * 300 * 0.2, rel=0.05)


def watch(cli, url, *arguments, **variables):
    return cli.run("watch", "--vllm", url, "--interval", "0.5", *arguments, **variables)


def test_json_output_has_one_line_per_interval_with_joules_per_token(cli, serve):
    url = serve(page(1000, 10), page(1500, 20), page(1700, 20))

    done = watch(cli, url, "--count", "2", "--json", EFFICIENTLLM_DEVICE="simulated")

    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "")
    assert [row["generation_tokens"] for row in rows] == [500.0, 200.0]
    for row in rows:
        assert row["simulated"]
        assert row["tokens_per_second"] == pytest.approx(row["generation_tokens"] / row["interval_s"], rel=1e-4)
        assert 100 < row["watts"] < 700  # the simulated power is 400 W plus or minus up to 250 W
        assert row["joules_per_token"] == pytest.approx(row["joules"] / row["generation_tokens"])
        assert row["joules_per_10k_tokens"] == pytest.approx(1e4 * row["joules_per_token"])


def test_table_fits_80_columns_and_ends_with_the_sum(cli, serve):
    done = watch(cli, serve(page(1000), page(1500), page(2500)), "--count", "2", EFFICIENTLLM_DEVICE="simulated")

    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "SIMULATED" in done.stdout
    assert lines[-1].startswith("1,500 tokens in ")
    assert "J/token" in lines[-1]


def test_power_is_reported_as_not_measured_without_a_gpu(cli, serve):
    done = watch(cli, serve(page(1), page(2)), "--count", "1", EFFICIENTLLM_DEVICE="host")
    rows = watch(cli, serve(page(1), page(2)), "--count", "1", "--json", EFFICIENTLLM_DEVICE="host")

    assert "power is not measured" in done.stdout
    row = json.loads(rows.stdout)
    assert (row["gpus"], row["watts"], row["joules_per_token"], row["generation_tokens"]) == (0, None, None, 1.0)


def test_watch_continues_after_a_restart_and_an_outage(cli, serve):
    url = serve(page(1000), page(10, started=2000.0), 503, page(40, started=2000.0), page(50, started=2000.0))

    done = watch(cli, url, "--count", "4", "--json", EFFICIENTLLM_DEVICE="simulated")

    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["restarted"], row["generation_tokens"]) for row in rows] == [(True, None), (False, 10.0)]
    assert "503" in done.stderr
    assert done.returncode == 0


def test_watch_exits_with_status_1_if_no_vllm_server_answers(cli, serve):
    away = watch(cli, "http://127.0.0.1:1/metrics", "--count", "1", EFFICIENTLLM_DEVICE="simulated")
    other = watch(cli, serve("up 1\n"), EFFICIENTLLM_DEVICE="simulated")

    assert (away.returncode, other.returncode) == (1, 1)
    assert "no answer" in away.stderr
    assert "not a page of a vLLM server: expected metrics such as vllm:generation_tokens_total" in other.stderr
    assert "Traceback" not in away.stderr + other.stderr


def test_watch_exits_with_status_2_after_a_usage_error(cli):
    assert watch(cli, "file:///etc/passwd").returncode == 2
    assert cli.run("watch", "--interval", "0").returncode == 2


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
