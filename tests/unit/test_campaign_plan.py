"""Campaigns without processes: the plan and the order of the runs."""

import json

from cases import cases
from typer.testing import CliRunner

from effllm.commands.app import app
from effllm.commands.campaign import ConfigurationPlan, Plan, main, order_of, read_plan


def write_plan(folder, **keys):
    path = folder / "plan.yaml"
    path.write_text(json.dumps({"name": "c", "command": "true", "configurations": {"a": {}}, **keys}))
    return path


@cases(
    ("keys", "message"),
    [
        ({"configurations": {"2": {}, "warmup-1": {}}, "warmup_runs": 1}, "two runs would have the name warmup-1-2"),
        ({"configurations": {"a\n": {}}}, "matching regex"),
        ({"configurations": {"a-1-again": {}}}, "matching regex"),
        ({"configurations": {"../a": {}}}, "matching regex"),
        ({"configurations": {"a": {"arg": "x"}}}, "unknown field `arg`"),
        (
            {"configurations": {"a": {"command": "no-such-program --x"}}},
            "no-such-program of the configuration a does not",
        ),
        ({"command": ""}, "the configuration a has no command"),
        ({"command": ["true", "a\0b"]}, "matching regex"),
        ({"command": ["true", "\ud800"]}, ""),
        ({"env": {"A=B": "1"}}, "matching regex"),
        ({"configurations": {"a": {"env": {"A": "\0"}}}}, "no process can get"),
        ({"repeat": 3}, "unknown field `repeat`; the known keys are name, configurations, command, repeats"),
        ({"repeats": 0}, "`int` >= 1"),
        ({"tags": ["a b"]}, "EFFICIENTLLM_TAGS"),
        *((text, "") for text in ("name: [", "name: a\nname: b\n", "\x00", "- 1", "&a [*a]")),
    ],
)
def test_a_wrong_plan_is_one_line_and_runs_nothing(tmp_path, keys, message):
    if isinstance(keys, str):
        (tmp_path / "plan.yaml").write_text(keys)
    else:
        write_plan(tmp_path, run_dir=str(tmp_path / "runs"), **keys)
    done = CliRunner().invoke(app, ["campaign", str(tmp_path / "plan.yaml")])

    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
    assert not (tmp_path / "runs").exists()


def test_merge_keys_of_a_plan_are_expanded(tmp_path):
    path = tmp_path / "plan.yaml"
    base = 'base: &base {args: --lr 1, env: {A: "1"}}'
    path.write_text(f'name: c\ncommand: "true"\nconfigurations:\n  {base}\n  new: {{<<: *base, args: --lr 2}}\n')

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
