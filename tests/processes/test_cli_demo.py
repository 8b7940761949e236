"""The command effllm demo, which runs a complete simulated job."""

import json
import signal
from collections import Counter

import pytest
from cli_process import read_until

from effllm.commands.demo_rank import SAMPLES, TOKENS, loss
from effllm.views.text.summary import status_text

SHORT = ["--ranks", "2", "--iterations", "20", "--step-seconds", "0.02", "--log-interval", "10"]


def test_summary_of_the_demo_counts_all_tokens_as_simulated(cli):
    done = cli.run("demo", *SHORT, EFFICIENTLLM_LOG_INTERVALL="5")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("[EfficientLLM Metrics] Iteration") == 2
    assert "SIMULATED" in done.stdout
    assert done.stdout.count("LOG_INTERVALL is not read by this version; did you mean EFFICIENTLLM_LOG_INTERVAL?") == 1
    assert "  Open     tensorboard --logdir" in done.stdout
    summary = cli.summary()
    assert (summary["status"], summary["simulated"]) == ("completed", True)
    assert (summary["tokens"], summary["samples"]) == (2 * 20 * TOKENS, 2 * 20 * SAMPLES)
    assert (summary["iterations"], summary["coverage"]["ranks_reporting"]) == (20, 2)
    assert summary["loss"] == pytest.approx(loss(20))
    mfu, rate = (summary["metrics"][f"run_throughput/{name}"]["value"] for name in ("mfu_ratio", "tokens_per_second"))
    assert mfu == pytest.approx(rate * 6 * 124e6 / (2 * 312e12), rel=1e-6)
    assert 6 * 0.02 <= summary["time_by_class"]["evaluation"] < summary["time_by_class"]["iterations"]


def rank_rows(cli):
    [path] = cli.folder.glob("efficientllm_runs/*/ranks-0001.jsonl")
    return [row for row in map(json.loads, path.read_text().splitlines()) if row.get("rank") is not None]


def test_windows_of_the_demo_last_a_second_by_default(cli):
    done = cli.run("demo", "--ranks", "2", "--iterations", "600", "--step-seconds", "0.005")

    assert done.returncode == 0
    assert cli.summary()["tokens"] == 2 * 600 * TOKENS
    rows = [row for row in rank_rows(cli) if row["rank"] == 0]
    span_s = rows[-1]["end_time_s"] - rows[0]["start_time_s"]
    assert len(rows) <= span_s + 2, "the last window has the remaining iterations"


def test_demo_names_the_slow_rank_and_all_ranks_wait_for_it(cli):
    shown = cli.run("demo", "--ranks", "3", "--iterations", "150", "--step-seconds", "0.05").stdout

    assert "[EfficientLLM] straggler: rank 2 " in shown
    verdict = [line for line in shown.splitlines() if line.startswith(("  Why ", "  Slow "))]
    assert ["rank 2" in line for line in verdict][:1] == [True], verdict
    busy_s = Counter()
    for row in rank_rows(cli):
        busy_s[row["rank"]] += row["busy_s"]
    assert min(busy_s.values()) > 0.95 * max(busy_s.values()), "the last rank alone would be 12 % slower"


def test_demo_ignores_settings_of_another_job_and_honours_those_of_a_user(cli):
    other = {"METRICS_ENABLED": "false", "RUN_NAME": "precious", "LOG_INTERVAL": "7"}
    own = {"TAGS": "project=a", "LEDGER": str(cli.folder / "ledger"), "PRICE_PER_KWH": "0.3", "RUN_DIR": "elsewhere"}
    variables = {f"EFFICIENTLLM_{name}": value for name, value in {**other, **own, "SINKS": "consol"}.items()}

    done = cli.run("demo", *SHORT, MASTER_PORT="none", SLURM_PROCID="9", **variables)

    assert done.returncode == 0
    assert [path.name[:5] for path in (cli.folder / "elsewhere").iterdir()] == ["demo-"]
    [line] = [json.loads(one) for path in (cli.folder / "ledger").iterdir() for one in path.read_text().splitlines()]
    assert (line["tags"], line["electricity_cost"] > 0) == (["project=a"], True)
    assert done.stderr.startswith("[EfficientLLM] there is no sink 'consol'; available sinks: console, ")
    assert "iteration" not in done.stdout.split("simulated.", 1)[1], "no console"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "killed")])
def test_demo_ended_by_a_signal_writes_the_reports_of_every_rank(cli, number, status):
    process = cli.start("demo", "--ranks", "2", "--iterations", "2000", "--log-interval", "10")
    read_until(process, "Iteration 10:")
    process.send_signal(number)

    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"[EfficientLLM] Run {status_text(status)}" in shown
    assert cli.summary()["status"] == status
    assert {row["rank"] for row in rank_rows(cli) if row["iteration_last"] >= 10} == {0, 1}
    assert cli.summary()["coverage"]["reports_lost"] == 0


def test_signal_before_the_first_iteration_ends_the_demo(cli):
    process = cli.start("demo", "--iterations", "2000")
    read_until(process, "No hardware is measured")

    process.send_signal(signal.SIGINT)

    process.communicate(timeout=25)  # the demo does not wait 30 s for missing ranks
    assert process.returncode == 130


def test_demo_runs_for_a_given_time(cli):
    assert cli.run("demo", "--ranks", "1", "--keep-alive", "4s").returncode == 0
    assert cli.summary()["iterations"] == 80
