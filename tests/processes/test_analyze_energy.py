"""integration/sft_play/scripts/analyze_energy.py: the comparison of the runs in a CSV file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from effllm.instruments.results_csv import append_row

SCRIPT = Path(__file__).parents[2] / "integration" / "sft_play" / "scripts" / "analyze_energy.py"
BNB = {"backend": "bnb", "optimizer": "paged_adamw_8bit", "precision": "fp16"}
UNSLOTH = {"backend": "unsloth", "optimizer": "adamw_torch", "precision": "bf16"}
SAME = {"model": "Qwen/Qwen2.5-0.5B", "dataset": "sft", "seq_len": 512, "batch_size": 8, "grad_accum": 1}


def run(tmp_path, *names):
    """Run the script in the test's folder."""
    command = [sys.executable, "-S", str(SCRIPT), *names]  # -S: without installed packages
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


def measured(tokens, tokens_per_second, joules, peak_mb, **metadata):
    """Return the row of a run."""
    values = {"tokens_processed": tokens, "tok_per_s": tokens_per_second, "vram_peak_MB": peak_mb}
    if joules is not None:
        values |= {
            "energy_J": joules,
            "J_per_token": joules / tokens,
            "avg_power_W": joules / tokens * tokens_per_second,
        }
    return {**SAME, **values, **metadata}


def test_values_of_a_group_are_quotients_of_sums_over_its_runs(tmp_path):
    # Sums: bnb has 260 kJ, 4 M tokens and 200 s + 600 s; unsloth has 60 kJ, 2 M tokens and 200 s.
    append_row(tmp_path / "r.csv", measured(1_000_000, 5000.0, 50e3, 9000.0, **BNB))
    append_row(tmp_path / "r.csv", measured(3_000_000, 5000.0, 210e3, 9100.0, **BNB))
    append_row(tmp_path / "r.csv", measured(2_000_000, 10_000.0, 60e3, 6000.0, **UNSLOTH))

    lines = run(tmp_path, "r.csv").stdout.splitlines()

    assert lines[0] == "r.csv: 3 runs"
    assert lines[3].split() == ["bnb", "paged_adamw_8bit", "fp16", "2", "5,000", "65.0", "650", "325", "9,100"]
    assert lines[4].split() == ["unsloth", "adamw_torch", "bf16", "1", "10,000", "30.0", "300", "300", "6,000"]
    assert lines[6:] == [
        "unsloth adamw_torch bf16, compared with bnb paged_adamw_8bit fp16:",
        "  +100.0 % tokens/s, -53.8 % J/token, -34.1 % peak memory",
    ]
    assert max(map(len, lines)) <= 80


def test_runs_without_energy_are_counted_but_not_summed(tmp_path):
    append_row(tmp_path / "r.csv", measured(1_000_000, 5000.0, 50e3, None, **BNB))
    append_row(tmp_path / "r.csv", measured(9_000_000, 5000.0, None, None, **BNB))

    lines = run(tmp_path, "r.csv").stdout.splitlines()

    assert lines[3].split()[3:] == ["2", "5,000", "50.0", "500", "250", "-"]
    assert lines[-1] == "without energy: 1 of 2 runs"


def test_settings_that_differ_between_runs_are_listed(tmp_path):
    append_row(tmp_path / "r.csv", measured(1_000_000, 5000.0, 50e3, None, **BNB))
    append_row(tmp_path / "r.csv", {**measured(1_000_000, 5000.0, 50e3, None, **UNSLOTH), "seq_len": 1024})

    assert run(tmp_path, "r.csv").stdout.splitlines()[-1] == "the runs differ in seq_len: 1024, 512"


def write(tmp_path, text):
    (tmp_path / "r.csv").write_text(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "r.csv: No such file or directory"),
        ("", "r.csv has no column tokens_processed"),
        ("a,b\n1,2\n", "r.csv has no column tokens_processed"),
        ("ROW", "r.csv, line 2: energy_J is 'many', not a number"),
        ("HEADER", "r.csv has no row"),
    ],
)
def test_file_that_cannot_be_analysed_is_reported_in_one_line(tmp_path, text, line):
    if text in ("ROW", "HEADER"):
        append_row(tmp_path / "r.csv", {**measured(1, 1.0, None, None, **BNB), "energy_J": "many"})
        text = "".join((tmp_path / "r.csv").read_text().splitlines(keepends=True)[: 1 + (text == "ROW")])
    if text is not None:
        write(tmp_path, text)

    done = run(tmp_path, "r.csv")

    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"analyze_energy: {line}\n")
