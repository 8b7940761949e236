"""The place of a rank in its job, from the variables of torchrun, Open MPI or Slurm.

Standard library only, because the training process imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from effllm.config.settings import ConfigError


@dataclass(frozen=True)
class Place:
    """The place of this process in its job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    launcher: str = "none"
    restart_id: str = ""  # shared by all restarts of a job: the run id of torchrun, else the job id of Slurm
    restart_count: int = 0
    launch_id: str = ""  # id of one srun or mpirun, if the launcher sets an id

    @property
    def one_host(self) -> bool:
        """Whether all ranks of the job share this host."""
        return self.world_size == self.local_world_size


#: Launcher -> variables with rank, local rank, world size and local world size.
_LAUNCHERS: dict[str, tuple[str, str, str, str]] = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
}


def _whole_number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text.split(",")[0].split("(")[0])  # SLURM_NTASKS_PER_NODE may be "8(x4)" or "8,4"
    except ValueError:
        raise ConfigError(name, text, "must be a whole number of at least 0") from None
    if value < 0:
        raise ConfigError(name, text, "must be a whole number of at least 0")
    return value


def read_place(environ: Mapping[str, str]) -> Place:
    """Return this process's place from its variables; torchrun has priority over Open MPI, and Open MPI over Slurm.

    Slurm's variables are used only in a task of ``srun``. A batch script also has ``SLURM_PROCID=0`` and the requested
    number of tasks, although no task has started. A program in a batch script or in a shell of ``salloc`` is one rank.

    Raises:
        ConfigError: a variable is not a number, or the rank is not below the world size.
    """
    for launcher, (rank_name, local_rank_name, world_name, local_world_name) in _LAUNCHERS.items():
        if not (environ.get(rank_name, "").strip() and environ.get(world_name, "").strip()):
            continue
        if launcher == "slurm" and not _is_srun_task(environ):
            continue
        rank, world_size = _whole_number(environ, rank_name, 0), _whole_number(environ, world_name, 1)
        if rank >= max(world_size, 1):
            raise ConfigError(rank_name, rank, f"must be below {world_name}={world_size}")
        local_world_size = _whole_number(environ, local_world_name, 1 if world_size == 1 else 0)
        if launcher == "slurm":  # SLURM_STEP_TASKS_PER_NODE is exact, SLURM_NTASKS_PER_NODE the requested number
            local_world_size = _whole_number(environ, "SLURM_STEP_TASKS_PER_NODE", local_world_size)
        return Place(
            rank=rank,
            local_rank=_whole_number(environ, local_rank_name, 0),
            world_size=max(world_size, 1),
            local_world_size=local_world_size,
            master_addr=environ.get("MASTER_ADDR", "").strip(),
            master_port=_whole_number(environ, "MASTER_PORT", 0),
            launcher=launcher,
            restart_id=_restart_id(environ),
            restart_count=_whole_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            launch_id=_launch_id(environ),
        )
    return Place(restart_id=_restart_id(environ))


#: Lists of the GPUs that a process may use.
_VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
#: Slurm sets these if parts of GPUs are allocated (gres/shard and gres/mps): other jobs may use the other parts.
_SHARES = ("SLURM_SHARDS_ON_NODE", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
MAX_NODE_GPUS = 64


def stated_gpus(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return how many GPUs a scheduler has allocated to a rank, and the name of the variable that states this number.

    In Slurm, the GPUs of a step have priority over those of the node. In Kubernetes, the device plugin states UUIDs;
    other values of its variable may be from an image or a user. GPUs that a list hides from the rank are left out,
    because another program may use them. The number is 0 without a statement, and for slices and shared GPUs.
    """
    of_step, of_node, of_plugin = "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE", "NVIDIA_VISIBLE_DEVICES"
    texts = {name: environ.get(name, "").strip() for name in (of_step, of_node, of_plugin, *_SHARES)}
    source, count = "", 0
    if environ.get("SLURM_JOB_ID", "").strip():
        source = of_step if texts[of_step] else of_node
        numbers = texts[source].split(",")  # the GPUs of the step, or the number of GPUs on the node
        if all(number.isascii() and number.isdecimal() and len(number) <= _MAX_DIGITS for number in numbers):
            count = len(set(numbers)) if source == of_step else int(numbers[0])
    elif "KUBERNETES_SERVICE_HOST" in environ:
        source, uuids = of_plugin, texts[of_plugin].split(",")
        count = len(set(uuids)) if all(uuid.startswith("GPU-") for uuid in uuids) else 0
    visible = [environ[name] for name in _VISIBLE_GPUS if name in environ]
    if any(texts[name] for name in _SHARES) or any("MIG-" in devices for devices in visible) or count > MAX_NODE_GPUS:
        return 0, ""
    count = min([count, *(len(devices.split(",")) if devices.strip() else 0 for devices in visible)])
    return (count, source) if count else (0, "")


_FIRST_RESERVED_STEP = 0xFFFFFFF0  # ids from here on are reserved: a shell of salloc, a batch script, ...
_MAX_DIGITS = 10  # of the id of a step, and of a number of GPUs
_MAX_ID_LETTERS = 200  # ids of jobs are parts of names of files, and are sent to the aggregator


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", "").strip()
    return step.isdecimal() and len(step) <= _MAX_DIGITS and int(step) < _FIRST_RESERVED_STEP


def _restart_id(environ: Mapping[str, str]) -> str:
    torchrun = _id_text(environ, "TORCHELASTIC_RUN_ID")
    if torchrun and torchrun != "none":  # "none": torchrun without --rdzv_id
        return torchrun
    return _id_text(environ, "SLURM_JOB_ID")


def _launch_id(environ: Mapping[str, str]) -> str:
    job, step = (_id_text(environ, f"SLURM_{name}_ID") for name in ("JOB", "STEP"))
    # Two launches in one allocation are two jobs. PMIX_NAMESPACE is set by Open MPI's mpirun.
    return f"{job}.{step}" if job and step else _id_text(environ, "PMIX_NAMESPACE") or job


def _id_text(environ: Mapping[str, str], name: str) -> str:
    """Return an id as a short text without control characters, which can be encoded."""
    text = environ.get(name, "").strip()[:_MAX_ID_LETTERS]
    return text if text.isprintable() else "".join(c if c.isprintable() else "_" for c in text)
