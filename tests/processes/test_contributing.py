"""Diffs in CONTRIBUTING.md: they can be applied to this tree, change only the promised number of places, and work in a
job.

After a change of the code, a failure means that the context or content of a diff must also be changed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]
#: Heading -> number of places that its diff changes; a place is a new file or a hunk of an existing file.
PLACES = {
    "A metric": 1,
    "A device": 1,
    "A sink": 1,
    "A kind of event": 1,
    "A hook of a training system": 2,
    "A counter of the loop": 2,
    "A setting": 1,
}
#: Number of lines that a diff adds to existing files.
LINES = {"A kind of event": 1, "A hook of a training system": 1, "A counter of the loop": 2}

TRAINER = """
import time

class Trainer:
    num_parameters = 1000
    def step(self, batch):
        time.sleep(0.005)
    def save(self):
        pass
"""
TRAIN = """
import json, os, sys, time
from pathlib import Path
import effllm
from ourtrainer.loop import Trainer

assert effllm.__file__.startswith(sys.argv[1]), effllm.__file__
vmstat, run = Path(sys.argv[2]) / "vmstat", Path("runs/run")
trainer, steps = Trainer(), 0
deadline_s = time.monotonic() + 60
while time.monotonic() < deadline_s:
    trainer.step([[1, 2, 3], [4, 5]])
    steps += 1
    vmstat.with_suffix(".new").write_text(f"pgfault 7\\npswpout {steps}\\n")
    os.replace(vmstat.with_suffix(".new"), vmstat)
    values = (run / "values.csv").read_text() if (run / "values.csv").exists() else ""
    events = (run / "events.jsonl").read_text() if (run / "events.jsonl").exists() else ""
    if "amu_gb" in values and '"swapping"' in events:
        break
trainer.save()
trainer.save()
trainer.step([[6]])
Path("steps.json").write_text(json.dumps(steps + 1))
"""


def diffs():
    """Return the diff below each heading of "Extensions"."""
    sections = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Extensions\n")[2].split("\n### ")[1:]
    return {
        section.partition("\n")[0]: re.search(r"^```diff\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[1]
        for section in sections
    }


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Return a copy of the package to which all diffs of CONTRIBUTING.md are applied."""
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "effllm", tree / "effllm", ignore=shutil.ignore_patterns("__pycache__"))
    environ = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}  # inside a repository `git apply` skips files
    for heading, diff in diffs().items():
        command = ["git", "apply", "-"]
        done = subprocess.run(command, cwd=tree, env=environ, input=diff, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"update the diff {heading!r} of CONTRIBUTING.md, it cannot be applied:\n{output}"
    return tree


@pytest.fixture(scope="module")
def proc(tree):
    """Return a folder with files that the new device of the copy reads instead of the files in /proc."""
    proc = tree / "proc"
    proc.mkdir()
    (proc / "meminfo").write_text("MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\n")
    (proc / "vmstat").write_text("pgfault 7\npswpout 0\n")
    file = tree / "effllm" / "devices" / "host_memory.py"
    text = file.read_text()
    assert text.count('Path("/proc")') == 1, "this test and the device of CONTRIBUTING.md read different files"
    file.write_text(text.replace('Path("/proc")', f"Path({str(proc)!r})"))
    return proc


SETTINGS = {
    "DEVICE": "host_memory",
    "SINKS": "tensorboard,csv",
    "PROJECT": "llama-2026",
    "LOG_INTERVAL": "10",
    "COLLECTION_INTERVAL": "0.05",
    "RUN_DIR": "runs",
    "RUN_NAME": "run",
}


def effllm(tree, folder, *arguments, **variables):
    """Run the command line of the copied package in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", "effllm", *arguments],
        env={**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "80", **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def run(tree, proc, tmp_path_factory):
    """Return the run folder of a job of one rank with all extensions."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "ourtrainer").mkdir()
    (folder / "ourtrainer" / "__init__.py").touch()
    (folder / "ourtrainer" / "loop.py").write_text(TRAINER)
    (folder / "train.py").write_text(TRAIN)
    homes = {f"XDG_{name}_HOME": str(folder / name) for name in ("CONFIG", "CACHE")}
    settings = {f"EFFICIENTLLM_{name}": value for name, value in SETTINGS.items()}
    done = effllm(tree, folder, "run", "train.py", str(tree), str(proc), **homes, **settings)
    run = folder / "runs" / "run"
    assert run.is_dir(), done.stderr
    jobs.until(lambda: read(run / "summary.json")["status"] != "running")
    return run


def read(path):
    return json.loads(path.read_text())


def lines(run, stem):
    return [json.loads(line) for path in sorted(run.glob(f"{stem}*.jsonl")) for line in path.read_text().splitlines()]


def test_each_diff_changes_the_documented_number_of_places():
    hunks = {heading: re.findall(r"^@@ -(\d+),.*@@", diff, re.MULTILINE) for heading, diff in diffs().items()}

    assert {heading: len(places) for heading, places in hunks.items()} == PLACES
    for heading, diff in diffs().items():
        files = re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]
        old = [re.findall(r"^\+(?!\+\+ )", file, re.MULTILINE) for file in files if not file.startswith("/dev/null")]
        assert sum(map(len, old)) == LINES.get(heading, sum(map(len, old))), heading
        assert not re.search(r"^-(?!-- )", diff, re.MULTILINE), f"{heading} changes existing lines"


def test_new_hook_counts_iterations_of_its_training_system(run):
    summary, facts = read(run / "summary.json"), read(run / "run.json")
    steps = read(run.parents[1] / "steps.json")

    assert (facts["framework"], summary["status"]) == ("ourtrainer", "completed")
    assert (summary["iterations"], summary["samples"]) == (steps, 2 * (steps - 1) + 1)
    assert summary["tokens"] == 5 * (steps - 1) + 1


def test_new_device_is_sampled(run):
    [device] = read(run / "run.json")["ranks"]["0"]["devices"]

    assert (device["kind"], device["key"][:7]) == ("host_memory", "MEMORY-")
    assert read(run / "summary.json")["metrics"]["amu_gb"]["value"] == 1.0  # 1 GiB of 2 GiB is in use


def test_new_sink_receives_the_reports(run):
    values = [line.split(",") for line in (run / "values.csv").read_text().splitlines()]

    assert ["10", "throughput/tokens_per_iteration", "5.0"] in values
    assert "sink" not in read(run / "summary.json")["events"]


def test_new_metric_is_listed_and_drawn_in_a_chart(run, tree):
    assert (
        "efficientllm-throughput/tokens_per_iteration (metric, tokens/iteration)" in effllm(tree, run, "explain").stdout
    )
    [file] = run.glob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    assert events.Scalars("efficientllm-throughput/tokens_per_iteration")[0].value == 5.0
    assert b"throughput/tokens_per_iteration$" in file.read_bytes(), "no chart on the page of Custom Scalars"


def test_new_event_kind_is_listed_and_recorded(run, tree):
    assert "swapping (event, console, each text once, coloured)" in effllm(tree, run, "explain").stdout
    event = next(event for event in lines(run, "events") if event["kind"] == "swapping")
    assert re.fullmatch(r"rank 0: MEMORY-.*: \d+ pages were written to swap", event["text"])
    assert (event["rank"], event["device"][:7]) == (0, "MEMORY-")


def test_new_counter_is_written_for_the_run_and_for_each_rank(run):
    assert lines(run, "windows")[-1]["run"]["marked_phases"] == 2  # the two checkpoints
    assert sum(row.get("marked_phases", 0) for row in lines(run, "ranks")) == 2


def test_new_setting_is_printed_documented_and_recorded(run, tree):
    printed = effllm(tree, run, "env", EFFICIENTLLM_PROJECT="llama-2026").stdout

    assert "export EFFICIENTLLM_PROJECT=llama-2026\n" in printed
    assert "| `PROJECT` |  | run.json has the name of this project" in effllm(tree, run, "env", "--markdown").stdout
    assert read(run / "run.json")["config"]["project"] == "llama-2026"
