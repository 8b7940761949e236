"""effllm/records/identity.py: the user, the job of the scheduler, hosts, GPU models and tags of a run."""

import json

import msgspec
import pytest
from builders import gpu, hello
from cases import cases

from effllm.config.settings import Config
from effllm.records.identity import Identity, Submission, clean_submission, read_submission
from effllm.records.orders import Orders
from effllm.records.wire import Hello
from effllm.server.run_facts import RunFacts
from effllm.store.run_folder import RunFolder, identity_of

SBATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train-7b",
    "SLURM_JOB_ACCOUNT": "physics",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_USER": "alice",
}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "abc"}
ALICE = Submission("alice", "physics", "4711", "train-7b", "gpu")


def facts_of(tags="", folder="/runs/mine", **facts):
    return RunFacts(Orders(Config(tags=tags), "0123", "tcp://127.0.0.1:1", folder, facts=facts))


def taken(facts):
    return facts.take_facts(0.0, float("-inf"), lambda: None)


@pytest.mark.parametrize("launcher", [{}, TORCHRUN, {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}])
def test_slurm_job_is_known_under_sbatch_torchrun_and_srun(launcher):
    assert read_submission({**SBATCH, **launcher, "USER": "root"}, "") == ALICE


@cases(
    ("environ", "expected"),
    [
        ({"PBS_JOBID": "7.pbs", "PBS_JOBNAME": "a", "PBS_QUEUE": "q", "LOGNAME": "u"}, ("u", None, "7.pbs", "a", "q")),
        ({"LSB_JOBID": "8", "LSB_JOBNAME": "b", "LSB_QUEUE": "r", "USER": "v"}, ("v", None, "8", "b", "r")),
        ({"SLURM_JOB_NAME": "left over", "SLURM_JOB_ID": " "}, (None,) * 5),
        ({}, (None,) * 5),
    ],
)
def test_other_schedulers_give_what_they_document(environ, expected):
    assert read_submission(environ, "") == Submission(*expected)


def test_environment_texts_become_one_short_printable_line():
    environ = {**SBATCH, "SLURM_JOB_NAME": "a\x1b[2J\n[EfficientLLM] b\udcff", "SLURM_JOB_ACCOUNT": "x" * 10_000}

    found = read_submission(environ, "")

    assert found.job_name == "a [2J [EfficientLLM] b"
    assert found.account == "x" * 200
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(hello(submission=found)), type=Hello).submission == found


def test_received_texts_are_cleaned_again():
    forged = Submission(job_name="a\x1b[2Jb", tags=("c\nd", "\n"))

    assert clean_submission(forged, ("e",)) == Submission(job_name="a [2Jb", tags=("c d",))
    assert clean_submission(Submission(), ("e",)) == Submission(tags=("e",))


def test_whole_number_declared_as_an_id_is_a_text():
    facts = facts_of(job_id=4711, user=True, account=10**5000, model=1.5)
    facts.begin(None)

    found = facts.identity
    assert (found.job_id, found.user, found.account, found.model) == ("4711", None, None, None)


def test_no_other_variable_is_read():
    environ = {**SBATCH, "HF_TOKEN": "hf_secret", "SLURM_JWT": "secret", "AWS_SECRET_ACCESS_KEY": "secret"}

    assert "secret" not in repr(read_submission(environ, "a=1"))


def test_identity_comes_from_rank_0_and_hosts_and_gpus_from_all_ranks():
    facts = facts_of(model="llama-7b")
    facts.begin(None)
    facts.add_hello(hello(1, host="node1", devices=(gpu("GPU-0", name="H100"),), submission=Submission(user="mallory")))
    facts.add_hello(
        hello(0, devices=(gpu("GPU-0", name="H100"),), submission=msgspec.structs.replace(ALICE, tags=("a=1",)))
    )

    document = taken(facts)

    assert facts.identity == Identity(
        "alice", "physics", "4711", "train-7b", "gpu", ("a=1",),
        run_id="mine", hosts=("node0", "node1"), host_count=2, gpu_models=("H100",), gpu_model_count=1,
        model="llama-7b",
    )  # fmt: skip
    assert {name: document[name] for name in ("run_id", "user", "hosts", "model", "ended_time_s")} == {
        "run_id": "mine", "user": "alice", "hosts": ("node0", "node1"), "model": "llama-7b", "ended_time_s": None,
    }  # fmt: skip


def test_long_list_of_hosts_is_cut_and_counted():
    facts = facts_of()
    for rank in range(100):
        facts.add_hello(hello(rank, 100, host=f"node{rank:02}"))
    taken(facts)

    assert facts.identity.hosts == tuple(f"node{rank:02}" for rank in range(32))
    assert facts.identity.host_count == 100


def test_facts_of_the_script_fill_only_missing_fields():
    facts = facts_of(user="script", account="budget", partition=7, hosts="not hosts")
    facts.add_hello(hello(0, submission=Submission(user="alice")))
    document = taken(facts)

    assert (document["user"], document["account"], document["partition"]) == ("alice", "budget", "7")
    assert document["hosts"] == ("node0",)


def test_user_is_the_process_owner_if_the_environment_has_no_name():
    facts = facts_of()
    facts.add_hello(hello(0, submission=Submission()))
    found = []
    facts.read_slow_facts(found.append)
    for one in found:
        facts.add_slow_facts(one)

    user = taken(facts)["user"]
    assert user is None or (isinstance(user, str) and user)
    assert user == found[-1].facts.get("user")


def test_tags_of_the_settings_are_used_without_an_agent_of_rank_0():
    assert facts_of(tags="a=1,b").begin(None)["tags"] == ("a=1", "b")


def first_attempt(folder):
    """Write the run folder of an attempt of 60 s; return its facts."""
    first = facts_of(folder=str(folder))
    store = RunFolder(folder, first.begin(folder))
    first.add_hello(hello(0, submission=ALICE))
    first.add_times(1000.0)
    first.add_times(1000.0, 1060.0)
    store.update_facts(taken(first))
    store.close()
    return first


def test_next_attempt_keeps_start_and_identity_and_has_no_end(tmp_path):
    first, second = first_attempt(tmp_path), facts_of(folder=str(tmp_path))
    written = json.loads((tmp_path / "run.json").read_text())
    second.begin(tmp_path)

    assert (written["started_time_s"], written["ended_time_s"]) == (1000.0, 1060.0)
    assert identity_of(tmp_path) == first.identity
    assert second.identity == msgspec.structs.replace(first.identity, ended_time_s=None)


def test_next_attempt_in_another_scheduler_job_has_its_job_id(tmp_path):
    first_attempt(tmp_path)
    second = facts_of(folder=str(tmp_path))
    second.begin(tmp_path)
    second.add_hello(hello(0, submission=Submission("alice", job_id="4712")))
    taken(second)

    assert (second.identity.job_id, second.identity.account) == ("4712", None)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"user": 7}', '{"hosts": "node0"}', '{"run_id": "' + "x" * 300 + '"}']
)
def test_run_json_that_cannot_be_read_gives_no_identity(tmp_path, text):
    (tmp_path / "run.json").write_text(text)

    assert identity_of(tmp_path) == Identity()


def test_settings_in_run_json_contain_no_password_of_a_sink():
    config = Config(sinks=("console", "otlp:endpoint=https://me:secret@collector/v1/metrics"))
    facts = RunFacts(Orders(config, "0123", "tcp://127.0.0.1:1", "/runs/mine"))

    assert facts.values["config"]["sinks"] == ["console", "otlp:endpoint=https://collector/v1/metrics"]
