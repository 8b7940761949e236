"""Values in a run of W&B or Trackio: the training's own calls carry them, and effllm makes no call."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from wandb_history import OFFLINE, rows

from effllm.metrics.output_names import chart_tag
from effllm.records.board import LOGGED, TRACKED

pytest.importorskip("wandb", reason="needs wandb")

#: A loop that logs to W&B at every second step; "late" opens the run after the first steps.
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, wandb

def num_windows():
    folders = Path(os.environ["EFFICIENTLLM_RUN_DIR"]).glob("*/windows-*.jsonl")
    return sum(path.read_text().count("\\n") for path in folders)

def begin():
    return wandb.init(project="p", mode="offline", dir=".", settings=wandb.Settings(x_disable_stats=True))

CALLS = []
run = None if "late" in sys.argv else begin()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = {"mine": 1.0, "EffLLM/mfu": -1.0, "text": "x"}
for step in range(1, 41):
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    until_s = time.monotonic() + 60
    while os.environ["EFFICIENTLLM_METRICS_ENABLED"] == "true" and num_windows() < step // 2 - 5:
        assert time.monotonic() < until_s, "there are no windows"
        time.sleep(0.05)
    run = run or (begin() if step == 5 else None)
    if run is not None and step % 2 == 0:
        HOW
        CALLS.append(step)
assert data == {"mine": 1.0, "EffLLM/mfu": -1.0, "text": "x"}, data
if run is not None:
    run.finish()
print("calls", len(CALLS))
"""
#: The last one is Megatron's writer: the module wandb, and a call for each value with the iteration as its place.
HOW = (
    "wandb.log(data)",
    "run.log(data, step=step)",
    "run.log(data=data)",
    "[wandb.log({key: value}, step) for key, value in data.items()]",
)
OURS = re.compile("efficientllm|EffLLM")


def run_script(frameworks, *arguments, how=HOW[0], sinks="console,wandb", **settings):
    settings = {"metrics_enabled": "true", **settings}
    return frameworks.run(SCRIPT.replace("HOW", how), *arguments, sinks=sinks, environ=OFFLINE, **settings)


def own(history):
    """Return the rows without the keys of effllm, times and steps of effllm's values."""
    kept = ("mine", "EffLLM/mfu", "text", "_step")
    return [{key: value for key, value in row.items() if key in kept} for row in history]


@pytest.mark.parametrize("how", HOW)
def test_user_history_is_the_same_with_and_without_effllm(frameworks, how):
    on = run_script(frameworks, how=how)
    off = run_script(frameworks, how=how, metrics_enabled="false")

    assert len(rows(on)) == len(rows(off)) == 20
    assert own(rows(on)) == own(rows(off))
    assert not any(OURS.search(key) for row in rows(off) for key in row if key != "EffLLM/mfu")
    assert any("efficientllm/al_seconds" in row for row in rows(on))


def test_values_in_the_history_are_those_of_the_windows(frameworks):
    job = run_script(frameworks)

    joined = [row for row in rows(job) if "efficientllm/iteration" in row]
    # The end of the run can have a window of its own, after the last iteration: it has the same number.
    windows: dict[int, list[dict[str, float]]] = {}
    for one in job.ledger.windows:
        windows.setdefault(one.iteration, []).append(one.values)
    assert len(joined) > 1
    assert len({row["efficientllm/iteration"] for row in joined}) == len(joined), "each report once"
    for row in joined:
        known = windows[row["efficientllm/iteration"]]
        assert row["efficientllm/al_seconds"] == pytest.approx(known[0]["al_seconds"])
        for tag, (key, factor) in TRACKED.items():
            if tag in known[0] and key not in ("EffLLM/mfu",):  # a key of the user wins
                assert any(row[key] == pytest.approx(values.get(tag, 0.0) * factor) for values in known), (tag, known)
    assert all(row["EffLLM/mfu"] == -1.0 for row in rows(job))


def test_run_opened_during_the_training_gets_values(frameworks):
    job = run_script(frameworks, "late")

    assert any("efficientllm/al_seconds" in row for row in rows(job))


def test_keys_in_a_tracker_are_the_tags_of_tensorboard():
    others = {tag: key for tag, (key, _) in TRACKED.items() if tag != "energy/total_joules" and "forecast/" not in tag}

    assert others == {tag: chart_tag(tag) for tag in others}


TRAINER = """
import time
import tiny
from transformers import Trainer

def slow(rows):
    time.sleep(0.1)  # the job has reports before its last log
    return tiny.collate(rows)

trainer = Trainer(model=tiny.llama(), args=tiny.arguments(report_to=["wandb"], logging_steps=2),
                  train_dataset=tiny.rows(96), data_collator=slow)
trainer.train()
tiny.losses(trainer)
"""


def test_trainer_of_transformers_logs_the_values_in_its_own_calls(frameworks):
    on = frameworks.run(TRAINER, sinks="console,wandb", environ={**OFFLINE, "WANDB_PROJECT": "p"})
    off = frameworks.run(TRAINER, metrics_enabled="false", environ={**OFFLINE, "WANDB_PROJECT": "p"})

    steps = [[row.get("train/global_step") for row in rows(job)] for job in (on, off)]
    assert steps[0] == steps[1]
    own_keys = [[{key for key in row if not OURS.search(key)} for row in rows(job)] for job in (on, off)]
    assert own_keys[0] == own_keys[1] and any("train/loss" in keys for keys in own_keys[0])
    keys = {key for row in rows(on) for key in row if OURS.search(key)}
    assert "EffLLM/energy_kwh" in keys
    assert "efficientllm/al_seconds" in keys
    logged = {key for key, _ in LOGGED.values()}
    assert not any(key.removeprefix("train/") in logged for row in rows(on) for key in row), "a value has one writer"


TRACKIO = """
import os, sqlite3, sys, time
from pathlib import Path
import torch, trackio

trackio.init(project="p", name="one", embed=False, auto_log_gpu=False, auto_log_cpu=False)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 61):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.1)
    trackio.log({"mine": step}, step=step)
trackio.finish()
"""
READ_TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps(SQLiteStorage.get_logs("p", "one")))
"""


def test_trackio_gets_the_values_in_calls_of_the_training(frameworks, tmp_path):
    pytest.importorskip("trackio", reason="needs trackio")
    histories, jobs = {}, {}
    for enabled in ("true", "false"):
        environ = {"TRACKIO_DIR": str(tmp_path / enabled), "NO_PROXY": "127.0.0.1,localhost"}
        jobs[enabled] = frameworks.run(TRACKIO, sinks="console,trackio", metrics_enabled=enabled, environ=environ)
        done = subprocess.run(
            [sys.executable, "-c", READ_TRACKIO], env={**os.environ, **environ}, capture_output=True, check=True
        )
        histories[enabled] = json.loads(done.stdout.splitlines()[-1])

    own = {way: [(row["step"], row["mine"]) for row in rows] for way, rows in histories.items()}
    assert own["true"] == own["false"] == [(step, step) for step in range(1, 61)]
    # The end of the run can have a window of its own, after the last iteration: it has the same number.
    windows = {row.iteration: row.values for row in reversed(jobs["true"].ledger.windows)}
    joined = [row for row in histories["true"] if "efficientllm/iteration" in row]
    assert joined
    for row in joined:
        values = windows[row["efficientllm/iteration"]]
        assert row["efficientllm/al_seconds"] == pytest.approx(values["al_seconds"])
        assert row["EffLLM/energy_kwh"] == pytest.approx(values["energy/total_joules"] / 3.6e6)
    assert not any(OURS.search(key) for row in histories["false"] for key in row)
