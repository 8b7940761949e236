"""A run folder with schema 1 (`effllm demo --ranks 2 --iterations 60 --log-interval 20`) can still be read."""

import shutil
from pathlib import Path

import msgspec
import pytest
from sink_examples import make_report, make_row

from effllm import metrics
from effllm.records.job import Summary
from effllm.store.reader import read_events, read_ranks, read_windows
from effllm.store.run_folder import RunFolder
from effllm.store.summary_text import summary_text

OLDER = Path(__file__).parents[1] / "golden" / "run_folder_1"


def test_windows_of_an_older_folder_are_read():
    windows = read_windows(OLDER)
    rows = list(windows)

    assert (windows.skipped, [row.iteration for row in rows]) == (0, [20, 40, 60, 60])
    assert [row.last.counts.tokens for row in rows] == [327_680, 327_680, 327_680, 0]
    assert [row.job.counts.tokens for row in rows] == [327_680, 655_360, 983_040, 983_040]
    assert {(row.last.constants.parameters, row.run.constants.gpus, row.job.constants.world_size) for row in rows} == {
        (124_000_000, 2, 2)
    }
    values = metrics.evaluate(rows[0].run, rows[0].last, rows[0].job)
    assert rows[0].values == pytest.approx({tag: values[tag] for tag in rows[0].values})


def test_rows_of_ranks_of_an_older_folder_are_read():
    ranks = read_ranks(OLDER)
    rows = list(ranks)

    assert (ranks.skipped, len(rows)) == (0, 8)
    assert {(row.rank, row.host, row.device) for row in rows} == {(0, "vm", "SIM-vm-0"), (1, "vm", "SIM-vm-1")}
    assert sum(row.tokens for row in rows) == 983_040


def test_events_and_summary_of_an_older_folder_are_read():
    summary = msgspec.json.decode((OLDER / "summary.json").read_bytes(), type=Summary)

    assert [event.kind for event in read_events(OLDER)] == ["joined", "joined", "left", "left"]
    *_, last = read_windows(OLDER)
    assert last.job.energy.measured_j == summary.energy.measured_joules
    assert (summary.status, summary.iterations, summary.tokens) == ("completed", 60, 983_040)
    folder = Path("/data/runs/demo-20261122-224146-a921")
    assert summary_text(summary, folder, folder / "tensorboard") == (OLDER / "summary.txt").read_text()


def test_an_older_folder_can_be_continued(tmp_path):
    folder = shutil.copytree(OLDER, tmp_path / "run")
    store = RunFolder(folder, {})
    store.write(make_report(70, attempt=2), [make_row(iteration=70)])
    store.close()

    rows = list(read_windows(folder))
    assert [(row.attempt, row.last.constants.parameters) for row in rows] == [(1, 124_000_000)] * 4 + [
        (2, 7_000_000_000)
    ]
    assert len(list(read_ranks(folder))) == 9
