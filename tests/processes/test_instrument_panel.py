"""The example in integration/instrument_panel runs and writes its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.long]
TRAIN = Path(__file__).parents[2] / "integration" / "instrument_panel" / "train.py"


@pytest.fixture(scope="module")
def panel(tmp_path_factory):
    """Return the folder that a run has written."""
    pytest.importorskip("torch")
    out = tmp_path_factory.mktemp("panel")
    environ = os.environ | {"OUT": str(out), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(TRAIN)], env=environ, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    return out


def read(path):
    return json.loads(path.read_text())


def test_panel_writes_a_profile_of_each_epoch(panel):
    profiles = [read(panel / f"profiling_epoch{epoch}.json") for epoch in range(3)]

    assert [one["timing"]["iteration"]["count"] for one in profiles] == [100, 200, 300]
    for one in profiles:
        shares = [one["timing"][name]["share_of_iteration"] for name in ("forward", "backward", "optimizer")]
        assert 0.5 < sum(shares) <= 1.0
        assert 0 < one["memory"]["baseline_gb"] <= one["memory"]["peak_allocated_gb"]
        assert one["throughput"]["tokens_per_sec"] == pytest.approx(9 * one["throughput"]["samples_per_sec"])


def test_panel_writes_metrics_and_scores_of_the_experiment(panel):
    body = read(panel / "logs" / "verifier_iter1_metrics.json")
    losses = body["raw_metrics"]["loss"]

    assert (len(losses), body["last_step"]) == (30, 290)
    assert losses[-1] < 0.7 * losses[0]
    assert body["metric_summaries"]["loss"]["mean"] == pytest.approx(sum(losses) / 30)
    assert sum(body["score_distribution"]["score_counts"].values()) == 30 * 32
    assert set(body["score_distribution"]["score_counts"]) == {"0.0", "0.5", "1.0"}
    checkpoints = [read(panel / "logs" / f"verifier_iter1_epoch{epoch}.json") for epoch in range(3)]
    assert [one["metric_summaries"]["loss"]["count"] for one in checkpoints] == [10, 20, 30]
