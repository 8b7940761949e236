"""effllm/config/place.py: ranks and worlds of torchrun, Slurm and Open MPI."""

import pytest
from cases import cases

from effllm.config.place import Place, read_place
from effllm.config.settings import ConfigError

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "777",
    "SLURM_STEP_ID": "0",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@cases(
    ("environ", "place"),
    [
        (TORCHRUN, Place(5, 1, 8, 4, "node0", 29500, "torchrun", "abc", 2)),
        (SLURM, Place(5, 1, 8, 4, launcher="slurm", restart_id="777", launch_id="777.0")),
        (OPENMPI, Place(5, 1, 8, 4, launcher="openmpi")),
    ],
)
def test_place_is_read_from_the_variables_of_a_launcher(environ, place):
    assert read_place(environ) == place
    assert not place.one_host


def test_variables_of_torchrun_are_used_under_slurm():
    place = read_place({**SLURM, **TORCHRUN, "RANK": "3"})

    assert (place.launcher, place.rank, place.restart_id) == ("torchrun", 3, "abc")
    assert read_place({**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}).restart_id == "777"


def test_shell_inside_an_allocation_is_a_job_of_one_rank():
    place = read_place({"SLURM_JOB_ID": "777", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "8"})

    assert (place.launcher, place.rank, place.world_size, place.one_host) == ("none", 0, 1, True)


def test_slurm_tasks_per_node_give_the_local_world_size():
    assert read_place({**SLURM, "SLURM_NTASKS_PER_NODE": "8(x4)"}).local_world_size == 8


def test_job_without_local_world_size_is_treated_as_several_hosts():
    assert not read_place({"RANK": "0", "WORLD_SIZE": "2"}).one_host
    assert read_place({"RANK": "0", "WORLD_SIZE": "1"}).one_host


@cases(
    ("changes", "variable"),
    [
        ({"RANK": "8"}, "RANK=8 .* below WORLD_SIZE=8"),
        ({"RANK": "x"}, "RANK='x'"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"LOCAL_WORLD_SIZE": "many"}, "LOCAL_WORLD_SIZE='many'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    ],
)
def test_a_wrong_variable_of_a_launcher_is_named(changes, variable):
    with pytest.raises(ConfigError, match=variable):
        read_place({**TORCHRUN, **changes})


def test_launches_in_one_allocation_have_different_ids():
    first, second = ({**SLURM, "SLURM_STEP_ID": step} for step in ("0", "1"))

    assert [read_place(one).launch_id for one in (first, second)] == ["777.0", "777.1"]
    assert read_place({"PMIX_NAMESPACE": "prterun-node0-4711@1"}).launch_id == ""
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-node0-4711@1"}
    assert read_place(mpi).launch_id == "prterun-node0-4711@1"


@pytest.mark.parametrize("step", ["", "4294967291", "4294967290"])
def test_program_in_a_batch_script_or_shell_is_one_rank(step):
    batch = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": step}

    place = read_place(batch)

    assert (place.rank, place.world_size, place.one_host, place.launcher) == (0, 1, True, "none")
    assert place.restart_id == "777"


def test_started_slurm_tasks_are_used_instead_of_requested_tasks():
    one_node = {**SLURM, "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "", "SLURM_STEP_TASKS_PER_NODE": "8"}

    assert read_place(one_node).one_host
    assert not read_place({**one_node, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}).one_host
    assert not read_place({**one_node, "SLURM_STEP_TASKS_PER_NODE": "4,3,1"}).one_host
