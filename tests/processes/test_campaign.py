"""`effllm campaign`: every configuration in turns, resumed after an interruption, failures recorded."""

import json
import signal
import sys
from pathlib import Path

import jobs
import pytest

LOOP = """
import os, sys, time
import effllm
collector = effllm.initialize_efficientllm_metrics(1000)
for _ in range(5):
    collector.record_iteration_start()
    collector.record_iteration_end(100, 1)
"""
SETTINGS = {
    "EFFICIENTLLM_SINKS": "none",
    "EFFICIENTLLM_DEVICE": "simulated",
    "EFFICIENTLLM_COLLECTION_INTERVAL": "0.1",
}


def plan(cli, scripts, **keys):
    """Write a plan with a script for each configuration: the loop and a text; return its path."""
    named = {}
    for name, text in scripts.items():
        script = cli.script(LOOP + text, f"{name}.py")
        named[name] = {"command": [sys.executable, "-m", "effllm", "run", script]}
    document = {"name": "c", "configurations": named, "env": SETTINGS, "run_dir": str(cli.folder / "runs"), **keys}
    path = cli.folder / "plan.yaml"
    path.write_text(json.dumps(document))  # JSON is YAML
    return str(path)


def lines(cli):
    return [json.loads(text) for text in (cli.folder / "runs/c/campaign.jsonl").read_text().splitlines()]


def summaries(cli):
    found = {path.parent.name: json.loads(path.read_text()) for path in (cli.folder / "runs/c").glob("*/summary.json")}
    return {name: found[name] for name in sorted(found)}


def test_every_configuration_is_run_in_every_block_with_tags(cli):
    path = plan(cli, {"base": "", "new": ""}, repeats=2, warmup_runs=1)

    done = cli.run("campaign", path)

    assert (done.returncode, done.stderr) == (0, "")
    ended = [line["key"] for line in lines(cli) if line["status"] == "completed"]
    assert ended[0] == "warmup-1-base"
    assert {*ended[1:3]} == {"base-1", "new-1"}
    assert {*ended[3:5]} == {"base-2", "new-2"}
    assert summaries(cli)["new-2"]["tags"] == ["campaign=c", "config=new", "repeat=2/2"]
    assert "remaining: about" in done.stdout
    compared = json.loads(cli.run("compare", "runs/c", "--by", "config", "--json").stdout)
    assert compared["a"]["name"] in ("config=base", "config=new")
    assert any("warmup-1-base" in line for line in compared["left_out"])


def test_a_failed_run_is_recorded_and_the_campaign_continues(cli):
    path = plan(cli, {"bad": "sys.exit(3)", "silent": "", "good": ""}, repeats=1)
    (cli.folder / "silent.py").write_text("")

    done = cli.run("campaign", path)
    again = cli.run("campaign", path)

    assert done.returncode == 1
    found = {line["key"]: line for line in lines(cli) if line["status"] != "started"}
    assert (found["bad-1"]["status"], found["bad-1"]["exit_status"]) == ("failed", 3)
    assert found["silent-1"]["reason"].startswith("no run folder silent-1 was written: the command did not measure")
    assert found["good-1"]["status"] == "completed"
    assert "3 of 3 runs are complete" in again.stdout
    assert len(lines(cli)) == 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_campaign_continues_where_it_stopped(cli, number):
    flag, release = cli.folder / "flag", cli.folder / "release"
    wait = (
        f"\nif not os.path.exists({str(flag)!r}):\n    open({str(flag)!r}, 'w').close()\n"
        f"    while not os.path.exists({str(release)!r}): time.sleep(0.05)\n"
    )
    path = plan(cli, {"one": "", "two": wait}, repeats=2)
    process = cli.start("campaign", path)
    jobs.until(flag.exists)

    process.send_signal(number)
    process.wait(60)
    finished = [line["key"] for line in lines(cli) if line["status"] == "completed"]
    if number == signal.SIGKILL:
        assert "or one of its runs continues" in cli.run("campaign", path).stderr
        release.touch()  # SIGKILL leaves the run to its end
    done = jobs.until(lambda: (one := cli.run("campaign", path)).returncode != 2 and one)

    assert done.returncode == 0, done.stdout
    assert process.returncode == (130 if number != signal.SIGKILL else -signal.SIGKILL)
    keys = [line["key"] for line in lines(cli) if line["status"] == "completed"]
    assert sorted(keys) == ["one-1", "one-2", "two-1", "two-2"]
    assert keys[: len(finished)] == finished
    if number == signal.SIGKILL:  # the run that continued has completed: it is not repeated
        assert sorted(summaries(cli)) == ["one-1", "one-2", "two-1", "two-2"]


def test_a_run_beyond_its_timeout_is_ended(cli):
    path = plan(cli, {"slow": "print('ready', flush=True)\ntime.sleep(100)"}, repeats=1, timeout_s=5)

    done = cli.run("campaign", path)

    assert done.returncode == 1
    assert "longer than timeout_s (5 s)" in lines(cli)[-1]["reason"]


def test_a_changed_configuration_needs_a_new_name(cli):
    cli.run("campaign", plan(cli, {"one": ""}, repeats=1))

    done = cli.run("campaign", plan(cli, {"one": ""}, repeats=1, env={**SETTINGS, "X": "1"}))

    assert done.returncode == 2
    assert "the configuration one has changed since its run one-1" in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repeat": 3}, "unknown field `repeat`; the known keys are name, configurations, command, repeats"),
        ({"configurations": {"a": {"arg": "x"}}}, "unknown field `arg`"),
        (
            {"configurations": {"a": {"command": "no-such-program --x"}}},
            "no-such-program of the configuration a does not",
        ),
        ({"configurations": {"a": {}}}, "the configuration a has no command"),
        ({"configurations": {"../a": {}}}, "matching regex"),
        ({"repeats": 0}, "`int` >= 1"),
        ({"tags": ["a b"]}, "EFFICIENTLLM_TAGS"),
    ],
)
def test_a_wrong_plan_is_one_line_and_runs_nothing(cli, change, message):
    path = plan(cli, {"a": ""}, **change)

    done = cli.run("campaign", path)

    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (cli.folder / "runs").exists()


@pytest.mark.parametrize("text", ["name: [", "name: a\nname: b\n", "\x00", "- 1", "&a [*a]"])
def test_a_file_that_is_no_plan_is_one_line(cli, text):
    path = Path(cli.folder / "plan.yaml")
    path.write_text(text)

    done = cli.run("campaign", str(path))

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
