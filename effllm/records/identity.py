"""The identity of a run: its id, user, job of the scheduler, hosts, GPU models, model, commit, times and tags.

run.json, summary.json and the sink prometheus use the same names. ``None`` means unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from effllm.config.setting_values import MAX_TAGS
from effllm.records.plain_text import one_line
from effllm.records.rank import Count, Word

MAX_LETTERS = 200  # of each text
MAX_HOSTS = 32  # maximum number of names in `Identity.hosts`; `Identity.host_count` is the number of all hosts
MAX_GPU_MODELS = 8
MAX_WHOLE = 2**63  # a larger number is no id; its conversion to text may take long

#: The variables that schedulers document for their jobs, by field of `Submission`. Kubernetes documents none.
_SCHEDULERS: dict[str, dict[str, str]] = {
    "Slurm": {
        "job_id": "SLURM_JOB_ID",
        "job_name": "SLURM_JOB_NAME",
        "account": "SLURM_JOB_ACCOUNT",
        "partition": "SLURM_JOB_PARTITION",
        "user": "SLURM_JOB_USER",
    },
    "PBS": {"job_id": "PBS_JOBID", "job_name": "PBS_JOBNAME", "partition": "PBS_QUEUE"},
    "LSF": {"job_id": "LSB_JOBID", "job_name": "LSB_JOBNAME", "partition": "LSB_QUEUE"},
}
_USERS = ("LOGNAME", "USER")


class Submission(Struct, frozen=True):
    """The user and the job of the scheduler, from the environment of rank 0, and the tags of the user."""

    user: Word | None = None
    account: Word | None = None
    job_id: Word | None = None  # of the scheduler
    job_name: Word | None = None
    partition: Word | None = None  # of Slurm; the queue of other schedulers
    tags: Annotated[tuple[Word, ...], Meta(max_length=MAX_TAGS)] = ()


class Identity(Submission, frozen=True, kw_only=True):
    """The identity of a run."""

    run_id: Word | None = None  # the name of the run folder: unique in its parent folder, the same in all attempts
    hosts: tuple[Word, ...] = ()  # sorted; at most MAX_HOSTS
    host_count: Count | None = None
    gpu_models: tuple[Word, ...] = ()  # sorted; at most MAX_GPU_MODELS
    gpu_model_count: Count | None = None
    model: Word | None = None
    git_commit: Word | None = None  # of the training code
    started_time_s: float | None = None  # unix time of the first start
    ended_time_s: float | None = None  # unix time of the end; None while the run continues, and after a kill


#: Facts of the training script that are used for unknown fields with the same names.
_DECLARABLE = ("user", "account", "job_id", "job_name", "partition", "model", "git_commit")


def read_submission(environ: Mapping[str, str], tags: str) -> Submission:
    """Return the scheduler's facts in the environment, and the tags; in a shell inside the scheduler's job, too."""
    names = next((names for names in _SCHEDULERS.values() if environ.get(names["job_id"], "").strip()), {})
    texts = {field: _line(environ.get(name)) for field, name in names.items()}
    if texts.get("user") is None:
        texts["user"] = next((user for name in _USERS if (user := _line(environ.get(name)))), None)
    return Submission(**texts, tags=read_tags(tags))


def read_tags(text: str) -> tuple[str, ...]:
    """Return the tags in a value of ``EFFICIENTLLM_TAGS``."""
    return tuple(text.split(",")) if text else ()


def clean_submission(submission: Submission, tags: tuple[str, ...]) -> Submission:
    """Return a received record without control characters and long texts; ``tags`` replace missing tags."""
    texts = {field: _line(getattr(submission, field)) for field in Submission.__struct_fields__ if field != "tags"}
    return Submission(**texts, tags=tuple(tag for text in submission.tags if (tag := _line(text))) or tags)


def with_facts(
    identity: Identity, submission: Submission | None, facts: Mapping[str, Any], ranks: Mapping[str, Mapping[str, Any]]
) -> Identity:
    """Return the identity, which may be from an earlier attempt, with newer facts.

    The submission is ``None`` before the HELLO of rank 0; the ranks are as in run.json.
    """
    submitted = asdict(submission) if submission is not None else {}
    if not submitted.get("tags"):
        submitted.pop("tags", None)  # an attempt without tags keeps the tags of the earlier attempt
    declared = {name: text for name in _DECLARABLE if not submitted.get(name) and (text := _line(facts.get(name)))}
    hosts = _sorted_names(rank_facts["host"] for rank_facts in ranks.values())
    devices = [device for rank_facts in ranks.values() for device in rank_facts["devices"]]
    models = _sorted_names(device["name"] for device in devices if device["is_gpu"])
    if hosts:
        submitted |= {"hosts": tuple(hosts[:MAX_HOSTS]), "host_count": len(hosts)}
        submitted |= {"gpu_models": tuple(models[:MAX_GPU_MODELS]), "gpu_model_count": len(models)}
    return replace(identity, **{**submitted, **declared})


def _sorted_names(names: Iterable[str]) -> list[str]:
    return sorted({name for text in set(names) if (name := _line(text))})


def _line(value: object) -> str | None:
    """Return a text or a whole number as a short line; ``None`` for any other value."""
    if type(value) is int:  # a script may declare job_id=4711
        value = str(value) if abs(value) < MAX_WHOLE else ""
    text = one_line(value).strip()[:MAX_LETTERS] if isinstance(value, str) else ""
    return text or None
