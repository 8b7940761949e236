"""The command effllm simulate, which sends the messages of a job's agents."""

import json
import re
import resource
import signal
import time
from types import SimpleNamespace

import jobs
import pytest
from cli_process import read_until

from effllm.commands.simulate_ranks import TOKENS, SimulatedRank
from effllm.network import listening


def test_simulated_rank_reports_its_counts():
    rank = SimulatedRank(3, 8, "job", "agent", log_interval=10)

    rows = [rank.next_report(100.0 + window, 101.0 + window, 0.0) for window in range(5)]

    assert rank.tokens == sum(row.tokens for row in rows) == 5 * 10 * (TOKENS + 3)
    assert rank.energy_j == pytest.approx(sum(row.devices[0].wall.energy.joules for row in rows))
    assert [(row.sequence, row.window, row.iteration_last) for row in rows][-1] == (5, 5, 50)
    assert all(row.wall_s == pytest.approx(row.busy_s + row.wait_s) for row in rows)


def test_simulated_host_has_up_to_eight_ranks_with_separate_gpus():
    ranks = [SimulatedRank(number, 20, "job", "agent", 10).hello() for number in range(20)]

    assert [ranks[number].host for number in (0, 7, 8, 19)] == ["node00000", "node00000", "node00001", "node00002"]
    assert len({hello.devices[0].key for hello in ranks}) == 20


def test_existing_run_folder_is_not_written_to(cli):
    folder = cli.folder / "mine"
    folder.mkdir()
    (folder / "run.json").write_text("{}")

    done = cli.run("simulate", "--ranks", "4", "--run-dir", str(folder))

    assert done.returncode == 2
    assert done.stderr.startswith(f"effllm simulate: --run-dir {folder} already contains a run")


def check_counts(found, num_ranks):
    """Fail if a simulation of six windows has not counted everything once."""
    tokens = sum(6 * 10 * (TOKENS + rank) for rank in range(num_ranks))
    assert (found["status"], found["reports"], found["windows"]) == ("completed", num_ranks * 6, 6)
    assert found["tokens"] == found["tokens_true"] == tokens
    assert found["energy_j"] == pytest.approx(found["energy_true_j"], rel=1e-9)
    assert (found["lost"], found["unconfirmed"], found["duplicates"]) == (0, 0, 0)
    assert found["descriptors"] > num_ranks


@pytest.mark.faults
@pytest.mark.parametrize(("security", "arrival"), [("curve", "burst"), ("none", "even")])
def test_every_token_of_ranks_in_two_processes_is_counted(cli, security, arrival):
    options = ["--minutes", "0.1", "--processes", "2", "--security", security, "--arrival", arrival, "--json"]
    done = cli.run("simulate", "--ranks", "201", *options)  # the processes have 100 and 101

    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    check_counts(found, 201)
    assert len(found["delays_s"]) >= 5  # the last message to rank 0 can be lost when both sockets close


def serve(cli, port=0):
    """Start an aggregator with a run folder; return its process and port."""
    process = cli.start("serve", "--bind", f"127.0.0.1:{port}", "--run-dir", "runs", "--run-name", "one", **SECURED)
    line = read_until(process, "EFFICIENTLLM_ENDPOINT=")[-1]
    return process, int(line.rpartition(":")[2])


SECURED = {"EFFICIENTLLM_SECRET_FILE": "secret", "EFFICIENTLLM_SINKS": "none"}


def has_window(cli):
    return any(path.stat().st_size for path in (cli.folder / "runs" / "one").glob("windows-*.jsonl"))


@pytest.mark.faults
@pytest.mark.fault("aggregator-by-hand")
def test_ranks_are_counted_by_a_restarted_aggregator(cli):
    aggregator, port = serve(cli)
    to_it = ("--endpoint", f"127.0.0.1:{port}", "--interval", "0.2", "--json")
    simulation = cli.start("simulate", "--ranks", "20", "--minutes", "0.2", *to_it, **SECURED)
    jobs.until(lambda: has_window(cli))

    for _ in range(2):
        aggregator.kill()
        aggregator.wait()
        aggregator, _ = serve(cli, port)
        time.sleep(1.0)

    found = json.loads(simulation.communicate(timeout=100)[0])
    aggregator.communicate(timeout=60)
    assert simulation.returncode == 0, found
    assert found["tokens"] == found["tokens_true"] == cli.summary("runs")["tokens"]
    assert (found["lost"], found["unconfirmed"]) == (0, 0)


MAX_BYTES_PER_RANK = 90_000  # memory of the aggregator; measured: 62,000 bytes per rank, including 42,000 in ZeroMQ


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.fault("ten-thousand")
@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < listening.num_open_files_needed(10_000),
    reason="the hard limit of open files is too low",
)
def test_ten_thousand_ranks_with_keys_lose_no_token(cli):
    simulation = cli.start("simulate", "--ranks", "10000", "--minutes", "0.1", "--arrival", "burst", "--json")
    found = json.loads(simulation.communicate(timeout=220)[0])

    assert (simulation.returncode, found["security"]) == (0, "curve")
    check_counts(found, 10_000)
    assert found["rss_bytes"] < 10_000 * MAX_BYTES_PER_RANK


# --- descriptors --------------------------------------------------------------------------------


@pytest.fixture
def limits(monkeypatch):
    """Replace the limits of this process by fake limits; the hard limit can be raised only up to ``most``."""
    state = SimpleNamespace(values=(1024, 4096), most=0)

    def set_limit(_, wanted):
        if wanted[1] > max(state.values[1], state.most):
            raise ValueError("not allowed to raise maximum limit")
        state.values = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: state.values)
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    return state


def test_soft_descriptor_limit_is_raised_to_the_hard_limit(limits):
    assert listening.raise_open_files_limit(4000) == ""
    assert limits.values == (4096, 4096)


def test_too_low_descriptor_limit_is_reported_with_the_needed_limit(limits):
    line = listening.raise_open_files_limit(listening.num_open_files_needed(10_000))

    assert line.startswith("12256 open files are needed and 4096 are allowed: ")
    assert "ulimit -Hn 12256" in line and "LimitNOFILE=12256" in line
    assert "\n" not in line


def test_needed_descriptors_depend_on_the_world_size():
    # For n ranks, 1.2 n + min(256, 96 + n) descriptors are needed, rounded up.
    peers = {2: 101, 8: 114, 100: 316, 160: 448, 200: 496, 10_000: 12_256}
    assert {number: listening.num_open_files_needed(number) for number in peers} == peers


def test_descriptor_shortage_is_computed_without_changing_a_limit(limits):
    assert listening.open_files_remedy(3000) == ""  # 3,856
    assert listening.open_files_remedy(10_000).startswith("12256 open files are needed and 4096 are allowed: ")
    limits.most = 12_256
    assert listening.open_files_remedy(10_000) == ""
    assert limits.values == (1024, 4096)


def test_ctrl_c_prints_the_results_so_far(cli):
    process = cli.start("simulate", "--ranks", "2", "--minutes", "5", "--interval", "0.2", "--run-dir", "here")
    jobs.until(lambda: any(path.stat().st_size for path in (cli.folder / "here").glob("windows-*.jsonl")))
    time.sleep(1.0)  # ranks report their counts twice a second

    process.send_signal(signal.SIGINT)

    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "of a core" in shown
    assert re.search(r"stopped by Ctrl-C after [1-9]\d* of 3,000 reports", shown)
    assert "lost:" not in shown
