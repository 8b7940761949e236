"""Campaigns without processes: the plan and the order of the runs."""

import json

import pytest

from effllm.commands.campaign import ConfigurationPlan, Plan, WrongPlan, main, order_of, read_plan


def write_plan(folder, **keys):
    path = folder / "plan.yaml"
    path.write_text(json.dumps({"name": "c", "command": "true", "configurations": {"a": {}}, **keys}))
    return path


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"configurations": {"2": {}, "warmup-1": {}}, "warmup_runs": 1}, "two runs would have the name warmup-1-2"),
        ({"configurations": {"a\n": {}}}, "matching regex"),
        ({"configurations": {"a-1-again": {}}}, "matching regex"),
        ({"command": ["true", "a\0b"]}, r"matching regex .* - at `\$.command\[1\]`"),
        ({"command": ["true", "\ud800"]}, "not YAML|no process can get"),
        ({"env": {"A=B": "1"}}, r"matching regex .* - at `key` in `\$.env`"),
        ({"configurations": {"a": {"env": {"A": "\0"}}}}, "no process can get"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(tmp_path, keys, message):
    with pytest.raises(WrongPlan, match=message):
        read_plan(write_plan(tmp_path, **keys))


def test_merge_keys_of_a_plan_are_expanded(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(
        """
name: c
command: "true"
configurations:
  base: &base {args: --lr 1, env: {A: "1"}}
  new: {<<: *base, args: --lr 2}
"""
    )

    assert read_plan(path).configurations["new"] == ConfigurationPlan(args="--lr 2", env={"A": "1"})


def test_each_block_has_every_configuration_and_its_order_depends_on_the_seed():
    names = "abcdef"
    plan = Plan("c", {name: ConfigurationPlan() for name in names}, "true", repeats=2, warmup_runs=1)

    keys = [run.key for run in order_of(plan)]

    assert keys[0] == "warmup-1-a"
    assert sorted(keys[1:7]) == [f"{name}-1" for name in names]
    assert sorted(keys[7:]) == [f"{name}-2" for name in names]
    assert [key[0] for key in keys[1:7]] != [key[0] for key in keys[7:]]


def test_a_dry_run_prints_the_order_and_starts_nothing(tmp_path, capsys):
    path = write_plan(tmp_path, command="true --lr 1", run_dir=str(tmp_path / "runs"))

    assert main(path, retry_failed=False, dry_run=True) == 0

    assert capsys.readouterr().out.splitlines() == ["a-1: true --lr 1", "a-2: true --lr 1", "a-3: true --lr 1"]
    assert not (tmp_path / "runs").exists()
