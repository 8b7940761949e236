"""The number of GPUs that a scheduler states as allocated to a rank on its node."""

import pytest
from builders import hello

from effllm.config.place import read_place, stated_gpus
from effllm.config.settings import Config
from effllm.job.aggregator import Aggregator
from effllm.network.transport import decode_from_agent, encode
from effllm.records.clock import Now
from effllm.records.identity import read_submission
from effllm.records.wire import Supersede

SLURM = {"SLURM_JOB_ID": "7"}
NODE = {**SLURM, "SLURM_GPUS_ON_NODE": "8"}
TASK = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
PLUGIN = {**POD, "NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2,GPU-3"}


@pytest.mark.parametrize(
    ("environ", "stated"),
    [
        (NODE, (8, "SLURM_GPUS_ON_NODE")),
        ({**NODE, "SLURM_STEP_GPUS": "2,3,6"}, (3, "SLURM_STEP_GPUS")),
        ({**NODE, "SLURM_STEP_GPUS": " "}, (8, "SLURM_GPUS_ON_NODE")),
        (PLUGIN, (3, "NVIDIA_VISIBLE_DEVICES")),
        ({**NODE, **PLUGIN}, (8, "SLURM_GPUS_ON_NODE")),
    ],
)
def test_scheduler_states_the_gpus_of_a_rank(environ, stated):
    assert stated_gpus(environ) == stated


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_gpus_that_are_hidden_from_the_rank_are_left_out(name):
    """Another program of the job may use them, such as a server that generates text."""
    assert stated_gpus({**NODE, name: "0,1,2"}) == (3, "SLURM_GPUS_ON_NODE")
    assert stated_gpus({**NODE, name: "0,1,2,3,4,5,6,7"}) == (8, "SLURM_GPUS_ON_NODE")
    assert stated_gpus({**NODE, name: ""}) == (0, "")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_GPUS_ON_NODE": "8"},
        {"NVIDIA_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"},
        {"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"},  # docker run --gpus: the choice of a user
        SLURM,
        *(
            {**SLURM, "SLURM_GPUS_ON_NODE": text}
            for text in ("0", "-1", "1e3", "65", "9" * 5000, "\u0663", "4\x00", "x")
        ),
        *({**NODE, "SLURM_STEP_GPUS": text} for text in ("0-3", "0:0,0:1", "gpu:2", "1" * 5000, "NoDevFiles")),
        *({**POD, "NVIDIA_VISIBLE_DEVICES": text} for text in ("all", "none", "void", "", "0,1", "/var/run/nvidia")),
        POD,
        {**POD, "NVIDIA_VISIBLE_DEVICES": "MIG-1,MIG-2"},
        {**NODE, "CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"},
        {**NODE, "SLURM_SHARDS_ON_NODE": "4"},
        {**NODE, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"},
        {**PLUGIN, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"},
    ],
)
def test_environment_without_a_clear_statement_states_nothing(environ):
    assert stated_gpus(environ) == (0, "")


HOSTILE = ["", " ", "-1", "1e9", str(2**62), str(2**64), "9" * 5000, "a\x1b[2J\n[EfficientLLM] b\udcff", "x" * 100_000]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_scheduler_makes_a_hello_invalid(text):
    names = ["SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_ACCOUNT", "SLURM_JOB_PARTITION", "SLURM_JOB_USER"]
    names += ["TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "SLURM_STEP_ID"]
    names += ["SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"]
    for name in names:
        environ = {**NODE, name: text}
        number, source = stated_gpus(environ)
        sent = hello(1, stated_gpus=number, gpus_source=source, submission=read_submission(environ, ""))
        received = decode_from_agent(encode(sent))
        assert received == sent
        assert Aggregator(Config(), "job", 1, 1.0).hello(received, Now(1.0, 1.0)) == ""
        for one in (getattr(received.submission, key) for key in ("job_id", "job_name")):
            assert one is None or one.isprintable()
        place = read_place({**TASK, **environ})
        supersede = Supersede(place.restart_id, "job")
        assert decode_from_agent(encode(supersede)) == supersede
        assert place.launch_id.isprintable()
