"""The GPUs that a scheduler or a container states as allocated, and which of them are identified."""

import pytest
from builders import hello

from effllm.config.place import read_place
from effllm.config.settings import Config
from effllm.devices.allocation import (
    GPUS_ON_NODE,
    HIDDEN,
    HostGpu,
    Statement,
    allocation,
    hidden_by_system,
    ranges,
    read_statement,
)
from effllm.job.aggregator import Aggregator
from effllm.network.transport import decode_from_agent, encode
from effllm.records.clock import Now
from effllm.records.identity import read_submission
from effllm.records.wire import Supersede

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
NODES = {"SLURM_JOB_NUM_NODES": "4", "SLURMD_NODENAME": "n1"}
SBATCH = {**SLURM, **NODES, "SLURM_JOB_GPUS": "0-3", "SLURM_GPUS_ON_NODE": "4"}
TASK = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def gpus(*numbers, free=(), sliced=()):
    return [HostGpu(f"GPU-{number}", number, number in sliced, number in free, number) for number in numbers]


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
        {**SLURM, "SLURM_JOB_GPUS": "0:0,0:1"},
        {**SLURM, "SLURM_JOB_GPUS": "0,0"},
        {**SLURM, "SLURM_JOB_GPUS": "1" * 5000, "SLURM_STEP_GPUS": "0-" + "9" * 5000, "SLURM_STEP_ID": "9" * 5000},
        *({**SLURM, "SLURM_GPUS_ON_NODE": text} for text in ("-1", "1e3", "9" * 5000, str(2**63), "\u0663", "4\x00")),
        {**SLURM, "ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0", "GPU_DEVICE_ORDINAL": "0,1"},
        {**KUBERNETES, "ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0"},
        {**KUBERNETES, "NVIDIA_VISIBLE_DEVICES": "0:0,0:1"},
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


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"},
        {"SLURM_STEP_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "2"},
        {"SLURM_JOB_GPUS": "0:0,0:1", "SLURM_GPUS_ON_NODE": "2"},
        {"SLURM_GPUS_ON_NODE": "1"},
    ],
)
def test_slices_of_slurm_are_numbers_that_identify_no_gpu(environ):
    """Slurm numbers slices like GPUs: gpu:1g.10gb:2 gives SLURM_JOB_GPUS=0,1 for two slices of one GPU."""
    statement = read_statement({**SLURM, **environ})

    for seen in (gpus(0, sliced=(0,)), gpus(0, 1, free=(1,), sliced=(0,)), gpus(0, 1, 2, free=(1, 2), sliced=(0,))):
        found = allocation(statement, seen, {})
        assert (found.gpus, found.free) == ((), ())
        assert found.why.startswith("MIG is enabled")


@pytest.mark.parametrize("name", ["SLURM_SHARDS_ON_NODE", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
def test_part_of_a_gpu_is_not_a_whole_unused_gpu(name):
    statement = read_statement({**SLURM, "SLURM_JOB_GPUS": "0", "SLURM_GPUS_ON_NODE": "1", name: "4"})

    found = allocation(statement, gpus(0, free=(0,)), {})

    assert (found.free, found.why) == ((), "parts of GPUs are allocated, and other jobs may use the other parts")


def test_number_that_can_be_two_gpus_identifies_none():
    """On some hosts /dev/nvidia0 is not the first GPU on the PCI bus, whose order Slurm's numbers have."""
    seen = [HostGpu(f"GPU-{number}", number, False, True, index) for index, number in enumerate((2, 3, 0, 1))]

    found = allocation(Statement("SLURM_JOB_GPUS", 2, (0, 1)), seen, {})
    assert (found.gpus, found.why) == ((), "the numbers of the device files differ from the order of the PCI bus")
    assert len(allocation(Statement("SLURM_JOB_GPUS", 4, (0, 1, 2, 3)), seen, {}).gpus) == 4


def test_amd_gpus_are_known_only_by_their_number():
    """Slurm states AMD GPUs in the same variables; without NVML they are not identified."""
    statement = read_statement({**SLURM, "SLURM_JOB_GPUS": "0,1", "ROCR_VISIBLE_DEVICES": "0"})

    found = allocation(statement, (), {}, "NVML does not list the GPUs: library not found")
    assert (found.count, found.gpus, found.why) == (2, (), "NVML does not list the GPUs: library not found")
    assert allocation(statement, (), {}).why == "NVML lists 0 of 2 allocated GPUs"


HOSTILE = ["", " ", "-1", "1e9", str(2**62), str(2**64), "9" * 5000, "a\x1b[2J\n[EfficientLLM] b\udcff", "x" * 100_000]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_scheduler_makes_a_hello_invalid(text):
    names = ["SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_ACCOUNT", "SLURM_JOB_PARTITION", "SLURM_JOB_USER"]
    names += ["SLURMD_NODENAME", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE"]
    names += ["SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_STEP_ID", "SLURM_JOB_NUM_NODES"]
    for name in names:
        environ = {**SBATCH, name: text}
        statement = read_statement(environ) or Statement(GPUS_ON_NODE, 1)
        found = allocation(statement, gpus(0, 1, free=(1,)), environ)
        sent = hello(1, allocation=found, submission=read_submission(environ, ""))
        received = decode_from_agent(encode(sent))
        assert received == sent
        assert Aggregator(Config(), "job", 1, 1.0).hello(received, Now(1.0, 1.0)) == ""
        for one in (found.node, found.why, *(getattr(received.submission, key) for key in ("job_id", "job_name"))):
            assert one is None or one.isprintable()
        place = read_place({**TASK, **environ})
        supersede = Supersede(place.restart_id, "job")
        assert decode_from_agent(encode(supersede)) == supersede
        assert place.launch_id.isprintable()


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
