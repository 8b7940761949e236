"""The GPUs that a scheduler or a container states as allocated, and which of them are identified."""

import pytest

from effllm.devices.allocation import (
    HIDDEN,
    HostGpu,
    Statement,
    allocation,
    hidden_by_system,
    ranges,
    read_statement,
)

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
NODES = {"SLURM_JOB_NUM_NODES": "4", "SLURMD_NODENAME": "n1"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def gpus(*numbers, free=(), sliced=()):
    return [HostGpu(f"GPU-{number}", number, number in sliced, number in free) for number in numbers]


@pytest.mark.parametrize(
    ("environ", "source", "numbers"),
    [
        ({**SLURM, "SLURM_JOB_GPUS": "0-3,5"}, "SLURM_JOB_GPUS", (0, 1, 2, 3, 5)),
        ({**SLURM, "SLURM_JOB_GPUS": "4,5", "SLURM_STEP_GPUS": "4", "SLURM_STEP_ID": "0"}, "SLURM_JOB_GPUS", (4, 5)),
        ({**SLURM, "SLURM_STEP_GPUS": "6", "SLURM_GPUS_ON_NODE": "1"}, "SLURM_STEP_GPUS", (6,)),
        ({**KUBERNETES, "NVIDIA_VISIBLE_DEVICES": "2,3"}, "NVIDIA_VISIBLE_DEVICES", (2, 3)),
    ],
)
def test_stated_numbers_of_gpus_are_read(environ, source, numbers):
    assert read_statement(environ) == Statement(source, len(numbers), numbers)


def test_step_on_another_node_does_not_use_the_numbers_of_the_batch_script():
    """The environment of the batch script, with its node's GPUs, is inherited by steps on all nodes."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_GPUS": "0-3", "SLURM_GPUS_ON_NODE": "2"}

    assert read_statement({**environ, "SLURM_STEP_ID": "0"}) == Statement("SLURM_GPUS_ON_NODE", 2)
    assert read_statement({**environ, "SLURM_STEP_ID": "0", "SLURM_STEP_GPUS": "1"}).numbers == (1,)
    assert read_statement({**environ, "SLURM_STEP_ID": "4294967291"}).numbers == (0, 1, 2, 3)


def test_uuids_of_a_kubernetes_device_plugin_are_read():
    environ = {**KUBERNETES, "NVIDIA_VISIBLE_DEVICES": "GPU-1, GPU-2"}

    assert read_statement(environ) == Statement("NVIDIA_VISIBLE_DEVICES", 2, keys=("GPU-1", "GPU-2"))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NVIDIA_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"},
        {"SLURM_JOB_GPUS": "0,1"},
        SLURM,
        {**SLURM, "SLURM_JOB_GPUS": "", "SLURM_GPUS_ON_NODE": "0"},
        {**SLURM, "SLURM_JOB_GPUS": "gpu:0", "SLURM_GPUS_ON_NODE": "x"},
        {**SLURM, "SLURM_JOB_GPUS": "0-999999999"},
        *({**KUBERNETES, "NVIDIA_VISIBLE_DEVICES": text} for text in ("all", "none", "void", "", "/var/run/nvidia")),
    ],
)
def test_environment_without_a_clear_statement_states_nothing(environ):
    assert read_statement(environ) is None


def test_allocated_gpus_are_identified_by_the_numbers_of_their_device_files():
    found = allocation(Statement("SLURM_JOB_GPUS", 2, (1, 3)), gpus(0, 1, 2, 3, free=(0, 3)), NODES)

    assert (found.gpus, found.labels, found.free) == (("GPU-1", "GPU-3"), ("1", "3"), ("GPU-3",))
    assert (found.source, found.count, found.nodes, found.node, found.why) == ("SLURM_JOB_GPUS", 2, 4, "n1", "")


def test_constrained_devices_are_the_allocation_under_any_number():
    found = allocation(Statement("SLURM_JOB_GPUS", 2, (4, 5)), gpus(0, 1, free=(1,)), {})

    assert (found.gpus, found.free) == (("GPU-0", "GPU-1"), ("GPU-1",))


@pytest.mark.parametrize(
    ("statement", "seen", "why"),
    [
        (Statement("SLURM_JOB_GPUS", 4, (0, 1, 2, 3)), gpus(0), "NVML lists 1 of 4 allocated GPUs"),
        (Statement("SLURM_GPUS_ON_NODE", 2), gpus(0, 1, 2), "it is not known which 2 of 3 GPUs are allocated"),
        (Statement("SLURM_JOB_GPUS", 2, (8, 9)), gpus(0, 1, 2), "it is not known which 2 of 3 GPUs are allocated"),
        (Statement("SLURM_JOB_GPUS", 2, (0, 1)), gpus(0, 1, sliced=(1,)), "MIG is enabled"),
        (Statement("NVIDIA_VISIBLE_DEVICES", 1, keys=("MIG-1",)), gpus(0), "MIG is enabled"),
        (Statement("NVIDIA_VISIBLE_DEVICES", 2, keys=("GPU-0", "GPU-9")), gpus(0, 1), "NVML lists 1 of 2"),
    ],
)
def test_gpus_that_cannot_be_identified_are_not_counted(statement, seen, why):
    found = allocation(statement, seen, {})

    assert found.why.startswith(why)
    assert (found.gpus, found.free) == ((), ())


def test_container_that_hides_gpus_states_the_visible_gpus(tmp_path):
    driver, dev = tmp_path / "driver", tmp_path / "dev"
    for bus in range(8):
        (driver / f"0000:{bus:02x}:00.0").mkdir(parents=True)
    dev.mkdir()
    for name in ("nvidia2", "nvidia5", "nvidiactl", "null"):
        (dev / name).touch()

    assert hidden_by_system(2, driver, dev) == Statement(HIDDEN, 2)
    assert hidden_by_system(8, driver, dev) is None
    assert hidden_by_system(1, driver, dev) is None, "one of two device files cannot be used: that GPU is broken"
    assert hidden_by_system(2, tmp_path / "nothing", dev) is None


def test_consecutive_numbers_are_a_range():
    assert ranges(["7", "4", "10", "5", "6"]) == "4-7, 10"
    assert ranges(["GPU-b", "GPU-a"]) == "GPU-a, GPU-b"
