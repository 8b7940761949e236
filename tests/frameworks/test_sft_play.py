"""integration/sft_play: a training appends one row with its energy to a CSV file."""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path

import pytest
from nvml_library import GIB, Gpu, flat, square

from effllm.energy.calibration import Calibration, store
from effllm.instruments.run_results import read_results
from effllm.records.clock import unix_minus_monotonic_ns
from effllm.records.rank import Sensor

pytest.importorskip("transformers", reason="needs transformers")
yaml = pytest.importorskip("yaml", reason="needs PyYAML")

FOLDER = Path(__file__).parents[2] / "integration" / "sft_play"
#: Columns of the CSV file with measured values, in the order of the file.
MEASURED = ["tokens_processed", "wall_s", "warmup_s", "energy_J", "avg_power_W", "peak_power_W", "tok_per_s"]
MEASURED += ["J_per_token", "E10k_J", "vram_peak_MB", "vram_avg_MB"]
METADATA = ["model", "dataset", "backend", "optimizer", "batch_size", "grad_accum", "seq_len", "precision", "seed"]
METADATA += ["notes"]
ENERGY = ["energy_J", "avg_power_W", "peak_power_W", "J_per_token", "E10k_J"]


class Play:
    """Starts scripts/train.py with changes to configs/run_adamw.yaml, in a separate folder."""

    def __init__(self, launch):
        self._launch = launch

    def start(self, environ=None, settings=None, script="", options=(), ranks=1, restarts=0, **sections):
        body = yaml.safe_load((FOLDER / "configs" / "run_adamw.yaml").read_text())
        body["model"]["llama"] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        body["model"]["llama"]["num_attention_heads"] = 2
        body["train"] |= {"max_steps": 12, "batch_size": 4}
        body["metrics"]["warmup_s"] = 0.0
        for name, changes in sections.items():
            body[name] |= changes
        job = self._launch._job()
        (job.folder / "run.yaml").write_text(yaml.safe_dump(body))
        chosen = self._launch.environ({"device": "host", **(settings or {})}, HF_HUB_OFFLINE="1", **(environ or {}))
        run = ["-c", script] if isinstance(script, str) and script else [str(script or FOLDER / "scripts" / "train.py")]
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local_addr=127.0.0.1",
            f"--nproc_per_node={ranks}",
            f"--max_restarts={restarts}",
        ]
        return job.start(
            [sys.executable, *(launcher if ranks > 1 or restarts else ()), *run, "--config", "run.yaml", *options],
            chosen,
        )

    def run(self, **settings):
        return self.start(**settings).done()

    def folders(self):
        """Return the run folders of all starts."""
        return self._launch._jobs[-1].runs()


@pytest.fixture
def play(launch):
    return Play(launch)


def rows(job, name="outputs/energy_results.csv"):
    with (job.folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_appends_a_row_with_all_columns(play):
    job = play.run(settings={"device": "simulated"})

    (row,) = rows(job)
    assert list(row) == MEASURED + METADATA
    assert [name for name, cell in row.items() if not cell] == []
    joules, tokens = float(row["energy_J"]), int(row["tokens_processed"])
    assert float(row["J_per_token"]) == pytest.approx(joules / tokens, rel=1e-6)
    assert float(row["E10k_J"]) == pytest.approx(1e4 * joules / tokens, rel=1e-6)
    assert float(row["avg_power_W"]) == pytest.approx(float(row["J_per_token"]) * float(row["tok_per_s"]), rel=1e-6)
    assert 0 < joules / float(row["avg_power_W"]) < float(row["wall_s"])
    assert row["notes"] == "full fine-tuning, simulated devices"


def test_metadata_of_a_row_equal_the_arguments_of_the_trainer(play):
    lora = {"lora": {"r": 4, "alpha": 8, "dropout": 0.1}}

    job = play.run(train={"optim": "adafactor", "grad_accum": 2, "seed": 7, "bf16": True}, tuning=lora)

    (row,) = rows(job)
    assert {name: row[name] for name in METADATA} == {
        "model": "tiny-llama",
        "dataset": "sft",
        "backend": "torch",
        "optimizer": "adafactor",
        "batch_size": "4",
        "grad_accum": "2",
        "seq_len": "256",
        "precision": "bf16",
        "seed": "7",
        "notes": "LoRA r=4 alpha=8 dropout=0.1",
    }


def test_missing_sensor_leaves_empty_cells_and_logs_one_reason(play):
    job = play.run()

    (row,) = rows(job)
    if row["energy_J"]:
        pytest.skip("this machine has a power sensor")
    assert [row[name] for name in [*ENERGY, "vram_peak_MB", "vram_avg_MB"]] == [""] * 7
    assert int(row["tokens_processed"]) > 0
    assert float(row["wall_s"]) > 0
    assert len([line for line in job.stdout.splitlines() if line.startswith("[train] not measured: energy")]) == 1


@pytest.mark.parametrize(("packing", "workers"), [(False, 2), (True, 0)])
def test_every_token_is_counted_once(play, packing, workers):
    """12 steps of 4 rows; row i has i + 2 tokens, and the Trainer's sampler takes each of the 48 rows once."""
    folder = play._launch._folder
    texts = "".join(f'{{"text": "{"a" * (i + 2)}"}}\n' for i in range(48))
    (folder / "rows.jsonl").write_text(texts)

    job = play.run(data={"path": str(folder / "rows.jsonl"), "packing": packing}, train={"num_workers": workers})

    (row,) = rows(job)
    assert int(row["tokens_processed"]) == sum(i + 2 for i in range(48))


def test_two_ranks_append_one_row_with_the_tokens_of_both(play):
    folder = play._launch._folder
    (folder / "rows.jsonl").write_text("".join(f'{{"text": "{"a" * (i + 2)}"}}\n' for i in range(96)))

    job = play.run(data={"path": str(folder / "rows.jsonl")}, settings={"device": "simulated"}, ranks=2)

    (row,) = rows(job)
    summary = job.ledger.summary
    assert int(row["tokens_processed"]) == sum(i + 2 for i in range(96))
    assert (summary.coverage.ranks_expected, len(summary.energy.by_device)) == (2, 2)
    assert 0 < float(row["energy_J"]) <= sum(summary.energy.by_device.values())
    assert job.stdout.count("a row was appended") == 1


RAISES_IN_STEP_7 = """
import sys, transformers
sys.path.insert(0, {scripts!r})
step = transformers.Trainer.compute_loss
def compute_loss(self, *arguments, **more):
    if self.state.global_step == 6:
        raise RuntimeError("in mid-step")
    return step(self, *arguments, **more)
transformers.Trainer.compute_loss = compute_loss
import train
sys.exit(train.main())
"""


def test_training_that_fails_during_a_step_appends_no_row(play):
    job = play.start(script=RAISES_IN_STEP_7.format(scripts=str(FOLDER / "scripts"))).wait(100.0)

    assert job.code == 1
    assert job.stderr.rstrip().endswith("RuntimeError: in mid-step")
    assert "[train] no row in outputs/energy_results.csv: the training did not complete" in job.stdout
    assert not (job.folder / "outputs" / "energy_results.csv").exists()
    assert job.ledger.summary.status == "failed"


def test_restarted_trainings_append_one_row_each_that_completes(play, tmp_path):
    """Of four starts, the second fails in mid-step; the last has another optimizer. The header is written once."""
    path = tmp_path / "results.csv"
    settings, metrics = {"device": "simulated"}, {"results_csv": str(path)}
    fails = RAISES_IN_STEP_7.format(scripts=str(FOLDER / "scripts"))

    play.run(settings=settings, metrics=metrics)
    first = path.read_text()
    assert play.start(settings=settings, metrics=metrics, script=fails).wait(100.0).code == 1
    assert path.read_text() == first
    path.write_text(first.removesuffix("\n"))  # an editor removed the last line break
    play.run(settings=settings, metrics=metrics, train={"optim": "adafactor"})

    lines = path.read_text().splitlines()
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert path.read_text().startswith(first)
    assert (len(lines), lines[0].split(",")) == (3, MEASURED + METADATA)
    assert [row["optimizer"] for row in found] == ["adamw_torch", "adafactor"]
    assert len({row["tokens_processed"] for row in found}) == 1
    assert len(play.folders()) == 3


FAILS_BEFORE_RESTART = """
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    exec({fails!r})
else:
    import sys
    sys.path.insert(0, {scripts!r})
    import train
    sys.exit(train.main())
"""


def test_row_of_a_training_that_torchrun_restarts_has_all_attempts(play, tmp_path):
    """Attempt 1 fails in step 7; attempt 2 repeats all 12 steps, because the script writes no checkpoint."""
    scripts, path = str(FOLDER / "scripts"), tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"text": "{"a" * 9}"}}\n' for _ in range(48)))
    script = tmp_path / "restarted.py"
    script.write_text(FAILS_BEFORE_RESTART.format(fails=RAISES_IN_STEP_7.format(scripts=scripts), scripts=scripts))

    job = play.run(settings={"device": "simulated"}, script=script, restarts=1, data={"path": str(path)})

    (row,) = rows(job)
    summary = job.ledger.summary
    assert (summary.status, summary.attempts, summary.iterations) == ("completed", 2, 6 + 12)
    assert int(row["tokens_processed"]) == (6 + 12) * 4 * 9
    assert float(row["wall_s"]) == pytest.approx(summary.elapsed_s)


@pytest.mark.parametrize(
    ("section", "change", "line"),
    [
        (
            "metrics",
            {"sample_intervall_s": 1},
            "metrics.sample_intervall_s is not a key; did you mean sample_interval_s?",
        ),
        ("train", {"optim": "adamv"}, "train: adamv is not a valid OptimizerNames"),
    ],
)
def test_wrong_setting_is_reported_in_one_line(play, section, change, line):
    job = play.start(**{section: change}).wait(100.0)

    assert job.code == 2
    assert job.stdout.splitlines()[-1].startswith(f"[train] run.yaml: {line}")
    assert "Traceback" not in job.stderr


def test_row_is_written_to_a_second_file_if_the_columns_differ(play, tmp_path):
    other = tmp_path / "results.csv"
    other.write_text("run,joules\n1,2\n")

    job = play.run(metrics={"results_csv": str(other)})

    assert other.read_text() == "run,joules\n1,2\n"
    assert len(rows(job, tmp_path / "results.effllm.csv")) == 1
    assert (
        f"[train] {other} has other columns (without tokens_processed); the row goes to results.effllm.csv"
        in job.stdout
    )


def test_training_that_ends_in_its_warmup_writes_a_row_without_energy(play):
    job = play.run(settings={"device": "simulated"}, metrics={"warmup_s": 600.0})

    (row,) = rows(job)
    assert [row[name] for name in ["tokens_processed", "tok_per_s", *ENERGY]] == [""] * 7
    assert float(row["wall_s"]) >= float(row["warmup_s"]) > 0
    assert "[train] not measured: the run ended during its warm-up (12 iterations)\n" in job.stdout


COUNTS = """
import tiny
from transformers import Trainer
from effllm.instruments.token_counter import CountingCollator

collator = CountingCollator(tiny.collate)
more = {"dataloader_num_workers": 2, "gradient_accumulation_steps": 2}
Trainer(tiny.llama(), tiny.arguments(**more), data_collator=collator, train_dataset=tiny.rows(60)).train()
print("counted", collator.batches, collator.samples, collator.tokens, collator.tokens_loss)
"""


def test_counting_collator_of_a_trainer_counts_the_trained_batches(frameworks):
    """6 steps of 2 micro-batches with 2 rows; a row has 5 or 8 tokens, and its first token has no label."""
    job = frameworks.run(COUNTS)

    _, batches, samples, tokens, tokens_loss = job.stdout.splitlines()[-1].split()
    summary = job.ledger.summary
    assert (int(batches), int(samples)) == (12, 24)
    assert (int(tokens), int(samples)) == (summary.tokens, summary.samples)
    assert int(tokens_loss) == int(tokens) - 24
    assert 24 * 5 <= int(tokens) <= 24 * 8


@pytest.mark.alone
def test_measured_joules_agree_with_the_known_power_of_the_gpu(play, trace, tmp_path):
    """The power is a square wave of 180 and 620 W; the energy counter has a tick of 0.1 s, and shows 0.4 % too much."""
    wave = square(180.0, 620.0, 0.83, 0.6)
    memory = {"memory": flat(40.0 * GIB), "memory_total": 80 * GIB}
    (gpu,) = trace.write(Gpu("GPU-a", "0:01:00", power=wave, power_mode="held", tick_s=0.1, gain=1.004, **memory))
    known = Sensor(tick_s=0.1, tick_error_s=1e-5, lag_error_s=0.001, is_held=True, gain_error=0.005, source="measured")
    today = time.strftime("%Y-%m-%d")
    store(
        tmp_path / "cache" / "efficientllm" / "calibration",
        Calibration("Traced", "570.0", today, known, measured_lag=True),
    )
    settings = {"device": "nvml", "collection_interval": 0.1, "log_interval": 25}

    job = play.run(
        environ=trace.environment() | {"CUDA_VISIBLE_DEVICES": "0"},
        settings=settings,
        train={"max_steps": 300},
        metrics={"warmup_s": 1.0},
    )

    to_monotonic_s = -unix_minus_monotonic_ns() * 1e-9
    (row,) = rows(job)
    warming = {window.window for window in job.ledger.windows if window.warming_up}
    measured = [one for one in job.ledger.ranks if one.window not in warming and one.tokens]
    start_s, end_s = measured[0].start_time_s, measured[-1].end_time_s
    truth_j = gpu.energy_j(start_s + to_monotonic_s, end_s + to_monotonic_s)
    stated = read_results(job.ledger.folder)
    assert warming
    assert abs(float(row["energy_J"]) - truth_j) <= stated.energy_error_j + stated.energy_gain_error_j
    assert abs(float(row["energy_J"]) - 1.004 * truth_j) <= stated.energy_error_j
    assert stated.energy_gain_error_j == pytest.approx(0.005 * float(row["energy_J"]))
    assert stated.energy_error_j < 0.005 * truth_j
    line = f"J  ± {stated.energy_error_j:.4g} J timing, ± {stated.energy_gain_error_j:.4g} J sensor"
    assert [one.endswith(line) for one in job.stdout.splitlines() if "  energy_J " in one] == [True]
    assert float(row["peak_power_W"]) == pytest.approx(1.004 * 620.0)
    assert 180.0 < float(row["avg_power_W"]) < 620.0
    assert (float(row["vram_peak_MB"]), float(row["vram_avg_MB"])) == (40960.0, 40960.0)
