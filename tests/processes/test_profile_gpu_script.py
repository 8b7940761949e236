"""The script 40_profile_gpu.py of the instrument panel: its sections and its JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "integration" / "instrument_panel" / "scripts" / "40_profile_gpu.py"
pytestmark = pytest.mark.torch


def run(*options):
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def written(folder, *options):
    """Run the script; return the printed text and the written results."""
    pytest.importorskip("torch")
    path = folder / "results.json"
    done = run("--output", str(path), *options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, json.loads(path.read_text())


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """Return the text and the results of all sections."""
    return written(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def without_throughput(tmp_path_factory):
    """Return the text and the results without the section that trains."""
    return written(tmp_path_factory.mktemp("profile"), "--skip-throughput")


@pytest.mark.long
def test_all_sections_are_printed_in_the_documents_order(profiled):
    titles = ["GPU Information", "Memory Profiling", "Model Memory Requirements", "Throughput Benchmark"]
    titles.append("Model Compatibility Check")

    places = [profiled[0].index(f"{'=' * 60}\n{title}\n") for title in titles]

    assert places == sorted(places)


def test_both_tables_have_the_figures_of_one_model(without_throughput):
    results = without_throughput[1]

    needed = {(row["model"], row["use"]): row["expected_bytes"] for row in results["requirements"]}
    assert needed == {(row["model"], row["use"]): row["required_bytes"] for row in results["compatibility"]}
    assert all(row["reason"] for row in results["requirements"])


def test_experts_need_the_memory_of_all_parameters(without_throughput):
    rows = without_throughput[1]["requirements"]
    [row] = [one for one in rows if (one["model"], one["use"]) == ("deepseek-v3", "inference")]

    assert row["low_bytes"] >= 2 * row["parameters"] > 2 * 600e9


@pytest.mark.long
def test_throughput_is_that_of_a_model_that_was_trained(profiled):
    found = profiled[1]["throughput"]

    assert found["training_iterations"] >= 1
    assert 0 < found["training_tokens_per_s"] < found["forward_tokens_per_s"]


def test_throughput_can_be_left_out(without_throughput):
    text, results = without_throughput

    assert "throughput" not in results
    assert "Throughput" not in text
    assert "note: deepseek-math-7b: the sizes of this row were not compared" in text


@pytest.mark.long
@pytest.mark.parametrize("wrong", ["--device -1", "--device 99", "--output {}", "--output {}/none/results.json"])
def test_a_wrong_device_or_file_is_refused(tmp_path, wrong):
    done = run("--skip-throughput", *wrong.format(tmp_path).split())

    assert done.returncode == 2
    assert wrong.format(tmp_path) in done.stderr.splitlines()[-1]
