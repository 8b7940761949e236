"""The facts ``precision`` and ``parallel_layout``, which have the same values in all frameworks."""

from __future__ import annotations

import re
import sys
from typing import Any

#: What a rank of data parallelism has: the whole model (SINGLE: there is only one rank), or with FSDP and ZERO a part.
SINGLE, DDP, FSDP, ZERO = "single", "DDP", "FSDP", "ZeRO"
_PRECISIONS = {
    "32": "fp32", "32-true": "fp32", "float32": "fp32",
    "16-true": "fp16", "16-mixed": "fp16", "float16": "fp16",
    "bf16-true": "bf16", "bf16-mixed": "bf16", "bfloat16": "bf16",
    "transformer-engine": "fp8", "transformer-engine-float16": "fp8",
}  # fmt: skip
# Names of a mesh's dimensions on which every rank has batches of its own.
_DATA_DIMENSION = re.compile(r"(dp|ddp|fsdp|hsdp|data|replicate|shard)([_-]?(parallel|replicate|shard|sharded))*")
# Modules of torch that a loop loads to divide a sequence or a model between ranks.
_DIVIDING = ("torch.distributed.tensor.experimental._attention", "torch.distributed.pipelining.stage")
_STRATEGIES = {
    "SingleDeviceStrategy": SINGLE, "DDPStrategy": DDP, "FSDPStrategy": FSDP, "DeepSpeedStrategy": ZERO,
}  # fmt: skip


def precision_of(name: Any) -> str:
    """Return the precision of matrix products, such as ``bf16``, from the name of a framework or a type of torch."""
    text = str(name).removeprefix("torch.")
    return _PRECISIONS.get(text, text)


def strategy_facts(strategy: Any) -> dict[str, str]:
    """Return the layout of a strategy of Lightning; of a strategy that is not in the table, its name."""
    name = type(strategy).__name__
    return {"parallel_layout": _STRATEGIES.get(name, name)}


def zero_facts(engine: Any) -> dict[str, Any]:
    """Return the layout of an engine of DeepSpeed; ``zero_stage`` is 0 without ZeRO."""
    stage = engine.zero_optimization_stage()
    without_zero = DDP if getattr(engine, "dp_world_size", 1) > 1 else SINGLE
    return {"parallel_layout": ZERO if stage else without_zero, "zero_stage": stage}


def is_sharded_over_all_ranks(model: Any) -> bool:
    """Whether FSDP has sharded a model, over all ranks of the job, and each rank is known to have its own batches."""
    if any(name in sys.modules for name in _DIVIDING):
        return False
    world_size = sys.modules["torch"].distributed.get_world_size()
    wrappers = [module for module in model.modules() if hasattr(module, "_fsdp_wrapped_module")]  # of FSDP1
    is_sharded = bool(wrappers) or any(hasattr(module, "_get_fsdp_state") for module in model.modules())
    meshes = [parameter.device_mesh for parameter in model.parameters() if hasattr(parameter, "device_mesh")]
    meshes += [wrapper._device_mesh for wrapper in wrappers if getattr(wrapper, "_device_mesh", None) is not None]
    sizes = {_num_sharing_ranks(wrapper) for wrapper in wrappers} | {mesh.size() for mesh in meshes}
    return is_sharded and sizes == {world_size} and all(map(divides_only_data, meshes))


def _num_sharing_ranks(wrapper: Any) -> int:
    """Return the number of ranks that train a module of FSDP1; hybrid sharding has a second group, between hosts."""
    host_group = getattr(wrapper, "_inter_node_pg", None)
    return int(wrapper.process_group.size()) * (int(host_group.size()) if host_group is not None else 1)


def divides_only_data(mesh: Any) -> bool:
    """Whether a mesh, and the mesh of which it is a part, divide only the data; FSDP's own mesh has no names."""
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    names = [
        *(mesh.mesh_dim_names or ()),
        *(name for i, name in enumerate(root.mesh_dim_names or ()) if root.size(i) > 1),
    ]
    return all(_DATA_DIMENSION.fullmatch(name) for name in names)
