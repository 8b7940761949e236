"""The plan of a campaign: configurations and repeats, in an interleaved random order."""

from __future__ import annotations

import os
import random
import shlex
import shutil
from collections import Counter
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from effllm.analysis.sides import CAMPAIGN, CONFIGURATION, REPEAT, WARMUP
from effllm.analysis.yaml_document import load_yaml

MAX_PLAN_BYTES = 2**20
#: Names are tags and names of folders; a folder NAME-again-1 is of a run that was started again.
Name = Annotated[str, Meta(pattern=r"^(?!.*-again)[A-Za-z0-9][A-Za-z0-9._-]*\Z", max_length=40)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
Words = str | list[str]


class WrongPlan(ValueError):
    """A plan cannot be used; the message is one line."""


class ConfigurationPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """One configuration: what it adds to the plan's command and environment."""

    args: Words = []
    env: dict[str, str] = {}
    command: Words | None = None  # replaces the plan's command


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """A campaign: every configuration is run ``repeats`` times."""

    name: Name
    configurations: Annotated[dict[Name, ConfigurationPlan], Meta(min_length=1, max_length=1000)]
    command: Words = []
    repeats: Annotated[int, Meta(ge=1, le=1000)] = 3
    warmup_runs: Annotated[int, Meta(ge=0, le=100)] = 0  # runs before the first repeat, which are not compared
    cooldown_s: Seconds = 0.0  # pause between two runs
    timeout_s: Annotated[float, Meta(gt=0)] | None = None  # a longer run is ended and has failed
    seed: int = 0  # of the order
    env: dict[str, str] = {}
    tags: list[str] = []
    run_dir: str = ""  # parent of the campaign's folder; EFFICIENTLLM_RUN_DIR by default


class PlannedRun(NamedTuple):
    """One run of a campaign."""

    configuration: str
    repeat: int  # from 1; 0 for a warm-up run
    number: int  # of the warm-up run, else 0

    @property
    def key(self) -> str:
        """Name of the run, and of its folder."""
        return f"warmup-{self.number}-{self.configuration}" if self.number else f"{self.configuration}-{self.repeat}"


def read_plan(path: Path) -> Plan:
    """Return the plan in a YAML file, whose commands exist.

    Raises:
        WrongPlan: the file cannot be read, has an unknown key or a wrong value, two runs have one name, or a command
            does not exist.
        ImportError: PyYAML is not installed.
    """
    import yaml

    try:
        with path.open("rb") as file:
            content = file.read(MAX_PLAN_BYTES + 1)
    except OSError as error:
        raise WrongPlan(f"{path}: {error.strerror}") from error
    if len(content) > MAX_PLAN_BYTES:
        raise WrongPlan(f"{path} is larger than {MAX_PLAN_BYTES >> 20} MiB")
    try:
        plan = msgspec.convert(load_yaml(content), Plan)
    except yaml.YAMLError as error:
        raise WrongPlan(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except msgspec.ValidationError as error:
        raise WrongPlan(f"{path}: {_explained(str(error))}") from error
    for name in plan.configurations:
        words = command_of(plan, name)
        if not words:
            raise WrongPlan(f"{path}: the configuration {name} has no command")
        environ = {**plan.env, **plan.configurations[name].env}
        if not all(map(_is_passable, (*words, *environ, *environ.values()))) or any("=" in one for one in environ):
            raise WrongPlan(f"{path}: no process can get the command or the environment of the configuration {name}")
        if shutil.which(words[0]) is None:
            raise WrongPlan(f"{path}: the command {words[0]} of the configuration {name} does not exist")
    times = Counter(run.key for run in order_of(plan))
    if twice := [key for key, count in times.items() if count > 1]:
        raise WrongPlan(f"{path}: two runs would have the name {twice[0]}: rename a configuration")
    return plan


def command_of(plan: Plan, configuration: str) -> list[str]:
    """Return the words of a configuration's command.

    Raises:
        WrongPlan: a text has an open quotation mark.
    """
    about = plan.configurations[configuration]
    command = about.command if about.command is not None else plan.command
    return [*_words(command), *_words(about.args)]


def tags_of(plan: Plan, run: PlannedRun) -> list[str]:
    """Return the tags of a run; a warm-up run is not of a configuration."""
    if run.number:
        return [*plan.tags, f"{WARMUP}={plan.name}"]
    own = {CAMPAIGN: plan.name, CONFIGURATION: run.configuration, REPEAT: f"{run.repeat}/{plan.repeats}"}
    return [*plan.tags, *(f"{name}={value}" for name, value in own.items())]


def order_of(plan: Plan) -> list[PlannedRun]:
    """Return all runs in order: warm-up runs, then one block per repeat with every configuration in random order.

    In a block, each configuration has about the same temperature and load of the cluster. The order of a block depends
    only on the seed and the number of the block, so a plan can get more repeats later.
    """
    names = sorted(plan.configurations)
    runs = [PlannedRun(names[at % len(names)], 0, at + 1) for at in range(plan.warmup_runs)]
    for repeat in range(1, plan.repeats + 1):
        block = list(names)
        random.Random(f"{plan.seed}/{repeat}").shuffle(block)  # noqa: S311 - not for cryptography
        runs += [PlannedRun(name, repeat, 0) for name in block]
    return runs


def _words(command: Words) -> list[str]:
    if isinstance(command, list):
        return command
    try:
        return shlex.split(command)
    except ValueError as error:
        raise WrongPlan(f"{command!r}: {error}") from error


def _is_passable(text: str) -> bool:
    """Whether the system can pass a text to a process."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _explained(error: str) -> str:
    if "unknown field" in error:
        where = ConfigurationPlan if ".configurations[" in error else Plan
        return f"{error}; the known keys are {', '.join(where.__struct_fields__)}"
    return error
