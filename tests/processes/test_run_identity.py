"""The identity of a run: the same values in run.json, summary.json and the Prometheus page, also after a restart."""

import json
import os
import re
import signal
import urllib.error
import urllib.request

import jobs
import pytest

from effllm.records.identity import Identity

NAMES = Identity.__struct_fields__
SBATCH = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": 'say "hi"\x1b[2J\n<b>', "SLURM_JOB_ACCOUNT": "physics",
    "SLURM_JOB_PARTITION": "gpu", "SLURM_JOB_USER": "alice", "SLURM_PROCID": "0", "SLURM_NTASKS": "2",
}  # fmt: skip


def identity(document):
    """Return the fields of an identity in a document, as in JSON."""
    return {name: document[name] for name in NAMES}


def summary_of(job):
    return identity(json.loads((job.ledger.folder / "summary.json").read_bytes()))


def page(port):
    """Return the labels of the info series; ``None`` before the page is served."""
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            families = list(parser.text_string_to_metric_families(answer.read().decode()))
    except urllib.error.URLError:
        return None
    labels = [sample.labels for one in families for sample in one.samples if sample.name == "efficientllm_run_info"]
    return labels[0] if labels else None


def as_labels(facts):
    facts = {**facts, "project": facts["account"]}  # the tags have no project
    texts = {name: ",".join(value) if isinstance(value, list) else value for name, value in facts.items()}
    return {name: "" if value is None else str(value) for name, value in texts.items() if name != "ended_time_s"}


@jobs.skip_without_torch
@pytest.mark.torch
@pytest.mark.long
def test_torchrun_inside_sbatch_has_one_identity_in_all_outputs(launch, tmp_path):
    port, options = jobs.unused_port(), ["--standalone", "--nproc-per-node=2", "--local-addr=127.0.0.1"]
    settings = {"sinks": f"console,prometheus:port={port}", "tags": "team=vision,ablation=3", "environ": SBATCH}
    job = launch.torchrun(options, "torch_loop.py", "--until", tmp_path / "enough", **settings)
    jobs.until(lambda: job.num_windows and len(job.ledger.facts.get("ranks", {})) == 2)
    jobs.until(lambda: page(port) == as_labels(identity(job.ledger.facts)))
    (tmp_path / "enough").touch()
    job.done()

    facts, (folder,) = identity(job.ledger.facts), job.runs()
    assert facts == summary_of(job)
    expected = {
        "user": "alice", "account": "physics", "job_id": "4711", "partition": "gpu", "run_id": folder.name,
        "job_name": 'say "hi" [2J <b>', "tags": ["ablation=3", "team=vision"], "hosts": [os.uname().nodename],
        "host_count": 1,
    }  # fmt: skip
    assert {name: facts[name] for name in expected} == expected
    assert re.search("(?i)simulated", str(facts["gpu_models"])), "the devices of the test"
    (attempt,) = job.ledger.summary.goodput.attempts
    assert (facts["started_time_s"], facts["ended_time_s"]) == (attempt.start_time_s, attempt.end_time_s)
    assert job.ledger.facts["launcher"] == "torchrun"
    assert "\x1b" not in (folder / "summary.txt").read_text()


def test_next_attempt_keeps_run_id_start_and_scheduler_job(launch):
    job = launch.python("loop.py", "--until", "for ever", environ=SBATCH, run_name="mine")
    jobs.until(lambda: job.num_windows >= 2 and job.ledger.facts["job_id"])
    os.kill(job.process.pid, signal.SIGKILL)
    job.wait()
    jobs.until(lambda: not job.left())
    first = identity(job.ledger.facts)
    second = launch.python("loop.py", environ=SBATCH, run_name="mine").done()

    facts = identity(second.ledger.facts)
    # On a busy machine, the first attempt may be killed before git returns the commit.
    kept = {name: value for name, value in first.items() if value is not None and name != "ended_time_s"}
    assert second.ledger.summary.attempts == 2
    assert {name: facts[name] for name in kept} == kept
    assert {"run_id", "started_time_s", "job_id"} <= set(kept)
    assert facts == summary_of(second)
    assert facts["ended_time_s"] == second.ledger.summary.goodput.attempts[-1].end_time_s > first["ended_time_s"]
