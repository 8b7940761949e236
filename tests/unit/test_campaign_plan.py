"""Campaigns without processes: the plan, the journal and the estimate of the remaining time."""

import errno
import json
import os
import time

import pytest

from effllm.analysis.campaign_journal import COMPLETED, STARTED, CampaignJournal, JournalLine
from effllm.analysis.campaign_plan import ConfigurationPlan, Plan, WrongPlan, fingerprint, order_of, read_plan
from effllm.commands.campaign import Campaign


def write_plan(folder, **keys):
    path = folder / "plan.yaml"
    path.write_text(json.dumps({"name": "c", "command": "true", "configurations": {"a": {}}, **keys}))
    return path


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"configurations": {"2": {}, "warmup-1": {}}, "warmup_runs": 1}, "two runs would have the name warmup-1-2"),
        ({"configurations": {"a\n": {}}}, "matching regex"),
        ({"command": ["true", "a\0b"]}, "no process can get the command"),
        ({"command": ["true", "\ud800"]}, "not YAML|no process can get the command"),
        ({"env": {"A=B": "1"}}, "no process can get the command or the environment"),
        ({"configurations": {"a": {"env": {"A": "\0"}}}}, "no process can get the command or the environment"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(tmp_path, keys, message):
    with pytest.raises(WrongPlan, match=message):
        read_plan(write_plan(tmp_path, **keys))


def campaign_of(folder, plan):
    journal = CampaignJournal(folder)
    return journal, Campaign(plan, folder, journal, retry_failed=False)


def test_remaining_time_is_of_each_configuration_and_of_the_cooldowns(tmp_path):
    plan = Plan("c", {"long": ConfigurationPlan(), "short": ConfigurationPlan()}, "true", repeats=3, cooldown_s=1.0)
    journal, campaign = campaign_of(tmp_path, plan)
    order = order_of(plan)
    assert campaign._remaining_s(order) is None

    for run in order[:2]:
        journal.add(JournalLine(run.key, COMPLETED, 0.0, seconds=100.0 if run.configuration == "long" else 10.0))

    assert campaign._remaining_s(order[2:]) == pytest.approx(2 * 110 + 3)


def test_a_line_that_the_disk_takes_only_in_part_is_an_error_that_names_the_journal(tmp_path, monkeypatch):
    journal = CampaignJournal(tmp_path)
    sizes = iter([8])

    def write(file, content, write=os.write):
        if (size := next(sizes, 0)) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content[:size])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match=r"No space left on device.*campaign\.jsonl"):
        journal.add(JournalLine("a-1", STARTED, 1.0))

    assert journal.last("a-1") is None


def test_estimate_of_thousands_of_runs_costs_milliseconds(tmp_path):
    plan = Plan("c", {f"c{number}": ConfigurationPlan() for number in range(20)}, "true", repeats=200)
    journal, campaign = campaign_of(tmp_path, plan)
    order = order_of(plan)
    for run in order[:2000]:
        journal._take(JournalLine(run.key, COMPLETED, 0.0, seconds=10.0))

    start_s = time.process_time()
    assert campaign._remaining_s(order[2000:]) == pytest.approx(20_000)

    assert time.process_time() - start_s < 1.0  # 17 s where each run reads the journal


def started(folder, plan, mark):
    """Write a journal with the start of the first run, whose folder says that it completed."""
    [run] = order_of(plan)
    journal = CampaignJournal(folder)
    journal.add(JournalLine(run.key, STARTED, 1.0, mark, run.key))
    journal.close()
    (folder / run.key).mkdir()
    (folder / run.key / "summary.json").write_text('{"status": "completed"}')


@pytest.mark.parametrize("is_same", [True, False])
def test_a_run_that_completed_after_a_kill_is_not_repeated(tmp_path, is_same):
    plan = Plan("c", {"a": ConfigurationPlan()}, "no-such-command", repeats=1)
    started(tmp_path, plan, fingerprint(plan)["a"] if is_same else "another command")
    journal, campaign = campaign_of(tmp_path, plan)

    campaign._adopt()

    found = journal.last("a-1")
    assert (found.status, found.folder) == (COMPLETED if is_same else STARTED, "a-1")
    assert not is_same or campaign.run() == 0
