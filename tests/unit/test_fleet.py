"""``effllm top`` of a folder: its running jobs, the worst first, from run folders and from a ledger."""

import json
import time

import pytest
from rich.cells import cell_len
from run_folders import write_files
from sink_examples import make_summary

from effllm.analysis.run_folders import NoRun
from effllm.commands import top, top_fleet
from effllm.commands.top_fleet import Fleet, FleetFrame, JobLine, fleet_lines, print_once
from effllm.records.job import Coverage, Value
from effllm.records.verdict import OF_GPUS, Verdict, Waterfall, WaterfallPart
from effllm.views.top.text import plain


def lost(share):
    shares = {"device_idle": share, "useful": 1 - share}
    parts = [WaterfallPart(name, 1000 * one, one, None, False, None, None) for name, one in shares.items()]
    return Waterfall(1000.0, None, tuple(parts), OF_GPUS)


@pytest.fixture
def job(tmp_path):
    """Return a function that writes the run folder of a running job."""

    def write(name, *, gpus=8, share=0.1, is_over=False, age_s=10.0, **changes):
        known = {
            "run_id": name, "user": "alice", "status": "running", "is_over": is_over, "waterfall": lost(share),
            "updated_time_s": time.time() - age_s, "coverage": Coverage(gpus, gpus, gpus, gpus, 0, 0),
            "metrics": {"run_throughput/tokens_per_second_per_gpu": Value(19_900.0, ""), "pcu_ratio": Value(0.8, "")},
            "verdict": Verdict("device_idle", f"device idle: {share:.0%}", "", "", 0.1, "high"),
        }  # fmt: skip
        return write_files(tmp_path / "runs" / name, summary=make_summary(**{**known, **changes}))

    return write


def shown(path):
    fleet = Fleet(path)
    assert fleet.refresh(60.0, time.time())
    return [(line.name, line.state) for line in fleet.frame.jobs]


def test_running_jobs_are_shown_the_worst_first(job, tmp_path):
    job("small", gpus=8, share=0.5)
    job("large", gpus=512, share=0.2)
    job("ended", is_over=True)
    job("hangs", status="stalled", share=0.0)
    job("silent", age_s=300.0)
    job("gone", age_s=2 * 3600)

    assert shown(tmp_path / "runs") == [
        ("hangs", "stalled"), ("silent", "no update"), ("large", "running"), ("small", "running"),
    ]  # fmt: skip


def test_job_in_its_first_minute_is_starting(tmp_path):
    write_files(tmp_path / "runs" / "new", {"schema_version": 5, "run_id": "new", "user": "bob"})

    assert shown(tmp_path / "runs") == [("new", "starting")]


def test_ledger_shows_running_jobs_whose_folders_cannot_be_read(job, tmp_path):
    now_s = time.time()
    mine = {"run_id": "mine", "folder": str(job("mine")), "status": "running", "gpus": 8, "updated_time_s": now_s}
    hers = {"run_id": "hers", "folder": "/nowhere/hers", "status": "running", "user": "eve", "gpus": 4,
            "mfu_ratio": 0.4, "gpu_hours": 2.0, "wasted_gpu_hours": 1.0, "updated_time_s": now_s - 1800}  # fmt: skip
    old = {"run_id": "old", "folder": "/nowhere/old", "status": "completed"}
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "eve.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in (mine, hers, old)))
    fleet = Fleet(tmp_path / "ledger")
    fleet.refresh(60.0, now_s)

    assert [(line.name, line.user, line.lost_gpus) for line in fleet.frame.jobs] == [
        ("hers", "eve", pytest.approx(2.0)), ("mine", "alice", pytest.approx(0.8)),
    ]  # fmt: skip


def test_many_runs_are_read_in_parts_and_unchanged_ones_not_again(job, tmp_path, monkeypatch):
    for number in range(5):
        job(f"job-{number}")
    fleet, read = Fleet(tmp_path / "runs"), []
    line_of = top_fleet._line_of_folder
    monkeypatch.setattr(top_fleet, "_line_of_folder", lambda folder: (read.append(folder.name), line_of(folder))[1])

    assert not fleet.refresh(0.0, time.time())
    while not fleet.refresh(0.0005, time.time()):
        assert "runs are read" in fleet.frame.note
    assert len(fleet.frame.jobs) == 5
    fleet.refresh(60.0, time.time())
    assert sorted(read) == [f"job-{number}" for number in range(5)]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_line_of_a_job_fits_the_screen(width):
    job = JobLine("x" * 60, "/runs/x", user="a" * 30, gpus=16_384, tokens_per_second_per_gpu=19_900.0, mfu_ratio=0.412,
                  busy_ratio=0.99, elapsed_s=1e6, verdict="straggler: " + "long " * 40, lost_gpus=100.0)  # fmt: skip
    lines = fleet_lines(FleetFrame([job] * 3, 10, "note"), width, 10, 1)

    assert len(lines) == 10
    assert all(sum(cell_len(text) for text, _ in line) <= width for line in lines)
    assert "16,384" in plain(lines) and "stragg" in plain(lines)


def test_selected_job_stays_on_the_screen():
    jobs = [JobLine(f"job-{number:03}", "") for number in range(1000)]
    for selected in (0, 500, 999):
        assert f"job-{selected:03}" in plain(fleet_lines(FleetFrame(jobs, 1000), 80, 24, selected))


def test_once_prints_all_jobs_and_has_the_status_of_the_worst(job, tmp_path, capsys):
    job("fine")
    assert print_once(Fleet(tmp_path / "runs"), 80, as_json=False) == 0
    assert "1 running jobs with 8 GPUs of 1 runs" in capsys.readouterr().out
    job("hangs", status="stalled")
    assert top.main([str(tmp_path / "runs"), "--once", "--json"]) == 1
    assert [one["state"] for one in json.loads(capsys.readouterr().out)["jobs"]] == ["stalled", "running"]


def test_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(NoRun, match="has no run folder"):
        Fleet(tmp_path).refresh(1.0, time.time())
