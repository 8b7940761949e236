"""The nodes of a Slurm job without ranks, from the answers of scontrol 22.05 and later."""

import pytest

from effllm.job.unused import EmptyNode
from effllm.server.slurm_nodes import SlurmNodes, hosts_of, nodes_without_ranks

JOB = (
    "JobId=7 JobName=train NumNodes=4 NodeList=n[01-04] JOB_GRES=gpu:h100:26 "
    "  Nodes=n01 CPU_IDs=0-7 Mem=1024 GRES=gpu:h100:8(IDX:0-7) "
    "  Nodes=n[02-03] CPU_IDs=0-7 Mem=1024 GRES=gpu:h100:8(IDX:0-7),shard:h100:0 "
    "  Nodes=n04 CPU_IDs=0 Mem=1024 GRES=gpu:h100:2(IDX:1,5) MinCPUsNode=1\n"
)


def step(name, nodes):
    return f"StepId=7.{name} UserId=0 State=RUNNING Partition=main NodeList={nodes} Nodes=1 CPUs=0 Tasks=1 Name=x\n"


def test_nodes_without_a_rank_are_listed_with_their_gpus():
    text = JOB + step("batch", "n01") + step("extern", "n[01-04]") + step("0", "n[01-02]")

    assert nodes_without_ranks(text, {"n01.cluster", "n02"}) == ([EmptyNode("n03", 8), EmptyNode("n04", 2)], "")


def test_node_with_another_step_is_not_counted():
    text = JOB + step("0", "n[01-02]") + step("1", "n04")

    assert nodes_without_ranks(text, {"n01", "n02"}) == ([], "other steps of the job run on 1 of these nodes")


def test_unknown_names_of_nodes_are_no_evidence():
    assert nodes_without_ranks(JOB, {"login"}) == ([], "the names of nodes in scontrol and of hosts differ")
    assert nodes_without_ranks("garbage", {"n01"})[0] == []


@pytest.mark.parametrize(
    ("gres", "why"),
    [
        ("gpu:1g.10gb:2(IDX:0-1)", "slices of GPUs (MIG) are allocated on 1 of these nodes"),
        ("gpu:a100:1(IDX:0),gpu:a100_3g.20gb:2(IDX:1-2)", "slices of GPUs (MIG) are allocated on 1 of these nodes"),
        ("gpu:" + "9" * 5000, "scontrol lists more than 64 GPUs on a node"),
    ],
)
def test_slices_and_impossible_numbers_are_not_counted_as_gpus(gres, why):
    text = JOB + f"  Nodes=n05 CPU_IDs=0 Mem=1 GRES={gres} \n"

    assert nodes_without_ranks(text, {"n01", "n02", "n03", "n04"}) == ([], why)


def test_node_without_gpus_is_no_loss():
    assert nodes_without_ranks(" Nodes=n[1-2] CPU_IDs=0 Mem=1 GRES=\n", {"n1"}) == ([], "")


@pytest.mark.parametrize(
    ("names", "expanded"),
    [
        ("vm", ["vm"]),
        ("a[1-3,07],b", ["a1", "a2", "a3", "a07", "b"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("a[x-2]", []),
        ("a[1-" + "9" * 5000 + "]", []),
    ],
)
def test_list_of_nodes_is_expanded(names, expanded):
    assert list(hosts_of(names)) == expanded


def test_job_outside_slurm_starts_no_scontrol():
    nodes = SlurmNodes({})

    assert nodes.poll({"a"}, 0.0) == ([], "the aggregator has no SLURM_JOB_ID")
    assert nodes.poll({"a"}, 1.0) is None


def test_missing_folder_for_temporary_files_is_a_reason(monkeypatch):
    """``tempfile`` raises this error in a container without a folder in which it can write."""

    def fail():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryFile", fail)

    (found, why) = SlurmNodes({"SLURM_JOB_ID": "7"}).poll({"a"}, 0.0)
    assert found == []
    assert "No usable temporary directory" in why
