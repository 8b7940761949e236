"""The layout of a Hugging Face Trainer's ranks: the groups of ranks that get the same batch."""

from __future__ import annotations

import sys
from typing import Any

from effllm.hooks._layout import DDP, FSDP, SINGLE, zero_facts
from effllm.hooks._parameters import unwrapped


def counts_its_batch(trainer: Any) -> tuple[bool, bool]:
    """Return whether this rank counts the positions of its batch, and whether it counts the samples.

    Tensor, context and pipeline parallel peers get the same batch, so only the first rank of each group counts it.
    Sequence parallel peers of DeepSpeed get parts of the same sequences, so only the first rank counts the samples.
    """
    sizes = getattr(getattr(trainer, "accelerator", None), "parallelism_config", None)
    own, named = True, set()
    for mesh in meshes(trainer):
        for name in mesh.mesh_dim_names:
            named.add(name)
            own = own and (name not in ("tp", "cp", "pp") or mesh.get_local_rank(name) == 0)
    size = tensor_parallel(trainer)
    if "tp" not in named and size > 1:
        own = own and _rank() % size == 0  # the ranks of a tensor parallel group are consecutive
    split = getattr(sizes, "sp_size", 1) or 1
    return own, own and (split <= 1 or _rank() % split == 0)


def meshes(trainer: Any) -> list[Any]:
    """Return the device meshes of accelerate, and of transformers if it sharded the model while loading it."""
    found = (
        getattr(getattr(trainer, "accelerator", None), "torch_device_mesh", None),
        getattr(unwrapped(getattr(trainer, "model", None)), "_device_mesh", None),
    )
    return [mesh for mesh in found if getattr(mesh, "mesh_dim_names", None)]


def layout_facts(trainer: Any, args: Any) -> dict[str, Any]:
    """Return what each rank of data parallelism has; with another kind of accelerate, the name of this kind."""
    accelerator: Any = getattr(trainer, "accelerator", None)
    kind = getattr(getattr(accelerator, "distributed_type", None), "name", "")
    engine: Any = getattr(trainer, "model_wrapped", None)
    if kind == "DEEPSPEED" and hasattr(engine, "zero_optimization_stage"):
        return zero_facts(engine)
    if kind == "FSDP" or any(_size(mesh, "fsdp") > 1 for mesh in meshes(trainer)):
        return {"parallel_layout": FSDP}
    if kind == "NO":
        return {"parallel_layout": "DataParallel" if getattr(args, "n_gpu", 1) > 1 else SINGLE}
    if kind.startswith("MULTI_"):
        return {"parallel_layout": DDP if accelerator.num_processes > tensor_parallel(trainer) else SINGLE}
    return {"parallel_layout": kind} if kind else {}


def _size(mesh: Any, name: str) -> int:
    return int(mesh.size(mesh.mesh_dim_names.index(name))) if name in mesh.mesh_dim_names else 1


def mesh_text(trainer: Any) -> str | None:
    """Return the dimensions of the first device mesh, as names with sizes; ``None`` without a mesh."""
    sizes = (f"{name}={mesh.size(i)}" for mesh in meshes(trainer)[:1] for i, name in enumerate(mesh.mesh_dim_names))
    return " ".join(sizes) or None


def tensor_parallel(trainer: Any) -> int:
    ask = getattr(trainer, "get_tp_size", None)
    return int(ask()) if ask is not None else 1


def _rank() -> int:
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    known = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return int(distributed.get_rank()) if known else 0
