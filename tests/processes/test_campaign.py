"""`effllm campaign`: every configuration in turns, resumed after an interruption, failures recorded."""

import json
import signal
import sys

import jobs
import pytest
from cli_process import LOOP, QUIET

from effllm.commands.campaign import Campaign, ConfigurationPlan, Plan


def plan(cli, scripts, **keys):
    """Write a plan with a script for each configuration: the loop and a text; return its path."""
    named = {}
    for name, text in scripts.items():
        script = cli.script(LOOP + text, f"{name}.py")
        named[name] = {"command": [sys.executable, "-m", "effllm", "run", script]}
    document = {"name": "c", "configurations": named, "env": QUIET, "run_dir": str(cli.folder / "runs"), **keys}
    path = cli.folder / "plan.yaml"
    path.write_text(json.dumps(document))  # JSON is YAML
    return str(path)


def failures(cli):
    return {path.stem: path.read_text() for path in (cli.folder / "runs/c").glob("*.failed")}


def summaries(cli):
    found = {path.parent.name: json.loads(path.read_text()) for path in (cli.folder / "runs/c").glob("*/summary.json")}
    return {name: found[name] for name in sorted(found)}


def test_every_configuration_is_run_in_every_block_with_tags(cli):
    done = cli.run("campaign", plan(cli, {"base": "", "new": ""}, repeats=2, warmup_runs=1))

    assert (done.returncode, done.stderr) == (0, "")
    found = summaries(cli)
    ended = sorted(found, key=lambda name: found[name]["started_time_s"])
    blocks = [set(ended[:1]), set(ended[1:3]), set(ended[3:])]
    assert blocks == [{"warmup-1-base"}, {"base-1", "new-1"}, {"base-2", "new-2"}]
    assert found["new-2"]["tags"] == ["campaign=c", "config=new", "repeat=2/2"]
    assert "[5/5] " in done.stdout
    compared = json.loads(cli.call("compare", "runs/c", "--by", "config", "--json").stdout)
    assert compared["a"]["name"] in ("config=base", "config=new")
    assert any("warmup-1-base" in line for line in compared["left_out"])


def test_a_failed_run_is_recorded_and_the_campaign_continues(cli):
    path = plan(cli, {"bad": "sys.exit(3)", "silent": "", "good": ""}, repeats=1)
    (cli.folder / "silent.py").write_text("")

    done = cli.run("campaign", path)
    again = cli.run("campaign", path)

    assert (done.returncode, again.returncode) == (1, 1)
    found = failures(cli)
    assert sorted(found) == ["bad-1", "silent-1"]
    assert found["bad-1"].startswith("exit status 3; see ")
    assert found["silent-1"].startswith("no run folder silent-1 was written: it did not measure")
    assert summaries(cli)["good-1"]["status"] == "completed"
    assert "3 of 3 runs have ended before" in again.stdout
    assert "2 of 3 runs failed" in again.stdout


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
    finished = {name for name, summary in summaries(cli).items() if summary["status"] == "completed"}
    if number == signal.SIGKILL:
        assert "or one of its runs continues" in cli.run("campaign", path).stderr
        release.touch()  # SIGKILL leaves the run to its end
    done = jobs.until(lambda: (one := cli.run("campaign", path)).returncode != 2 and one)

    assert done.returncode == 0, done.stdout
    assert process.returncode == (130 if number != signal.SIGKILL else -signal.SIGKILL)
    runs = summaries(cli)
    completed = sorted(name for name, summary in runs.items() if summary["status"] == "completed")
    assert [name.partition("-again")[0] for name in completed] == ["one-1", "one-2", "two-1", "two-2"]
    assert finished <= set(completed)
    # The run that continued after SIGKILL has completed, and is not repeated.
    assert len(runs) == (4 if number == signal.SIGKILL else 5)


def test_a_run_beyond_its_timeout_is_ended(cli):
    path = plan(cli, {"slow": "print('ready', flush=True)\ntime.sleep(100)"}, repeats=1, timeout_s=5)

    done = cli.run("campaign", path)

    assert done.returncode == 1
    assert failures(cli) == {"slow-1": "longer than timeout_s (5 s)\n"}


def write_summary(folder, status="completed"):
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"status": status}))


@pytest.fixture
def campaign(tmp_path):
    """Return a function that runs a campaign of failing runs, and returns its exit status and what was started."""
    lock = (tmp_path / "lock").open("w")

    def run(repeats=1, **options):
        command = [sys.executable, "-c", "exit(3)"]
        plan = Plan("c", {"a": ConfigurationPlan()}, command, repeats=repeats)
        status = Campaign(plan, tmp_path, lock.fileno(), **{"retry_failed": False, **options}).run()
        return status, sorted(path.stem for path in tmp_path.glob("logs/*.log"))

    yield run
    lock.close()


def test_a_complete_run_folder_is_not_repeated(tmp_path, campaign):
    write_summary(tmp_path / "a-1", "killed")
    write_summary(tmp_path / "a-1-again-1")

    assert campaign() == (0, [])


@pytest.mark.parametrize("status", ["running", "killed", "interrupted", "failed"])
def test_a_run_that_did_not_complete_is_started_in_a_new_folder(tmp_path, campaign, status):
    write_summary(tmp_path / "a-1", status)

    assert campaign() == (1, ["a-1-again-1"])
    assert (tmp_path / "a-1.failed").read_text().startswith("exit status 3; see ")


def test_a_failed_run_is_repeated_only_on_request(tmp_path, campaign, capsys):
    write_summary(tmp_path / "a-1")
    (tmp_path / "a-1.failed").write_text("longer than timeout_s (5 s)\n")

    assert campaign() == (1, [])
    assert "1 of 1 runs failed: a-1; --retry-failed repeats them" in capsys.readouterr().out
    assert campaign(retry_failed=True) == (1, ["a-1-again-1"])


def test_a_plan_can_get_more_repeats(tmp_path, campaign):
    write_summary(tmp_path / "a-1")

    assert campaign(repeats=2) == (1, ["a-2"])
