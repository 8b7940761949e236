"""The facts of precision and layout have one form in all frameworks."""

from types import SimpleNamespace

import pytest

from effllm.hooks import megatron, torchtitan
from effllm.hooks._layout import divides_only_data, precision_of, strategy_facts
from effllm.hooks._trainer_facts import layout_facts


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("32-true", "fp32"), ("bf16-mixed", "bf16"), ("16-mixed", "fp16"), ("torch.bfloat16", "bf16"),
        ("transformer-engine", "fp8"), ("bf16", "bf16"), ("64-true", "64-true"),
    ],
)  # fmt: skip
def test_precision_of_a_framework_has_its_short_name(name, precision):
    assert precision_of(name) == precision


@pytest.mark.parametrize(
    ("names", "is_for_them"),
    [
        (None, True), (("dp",), True), (("dp_replicate", "dp_shard"), True), (("data_parallel",), True),
        (("tp",), False), (("dp", "cp"), False), (("dp_shard_cp",), False), (("pp", "dp"), False), (("world",), False),
    ],
)  # fmt: skip
def test_ranks_of_a_mesh_for_data_have_batches_of_their_own(names, is_for_them):
    assert divides_only_data(SimpleNamespace(mesh_dim_names=names, size=lambda _: 2)) == is_for_them


def test_mesh_that_was_made_of_one_for_context_parallelism_is_not_for_data():
    sizes = {}
    root = SimpleNamespace(mesh_dim_names=("dp_shard", "cp"), size=sizes.get)
    made = SimpleNamespace(mesh_dim_names=("fsdp",), size=lambda _: 2, _get_root_mesh=lambda: root)

    for size, is_for_them in ((2, False), (1, True)):
        sizes.update({0: 2, 1: size})
        assert divides_only_data(made) == is_for_them


@pytest.mark.parametrize(
    ("name", "layout"), [("DDPStrategy", "DDP"), ("FSDPStrategy", "FSDP"), ("ModelParallelStrategy",) * 2]
)
def test_strategy_of_lightning_is_a_layout(name, layout):
    assert strategy_facts(type(name, (), {})()) == {"parallel_layout": layout}


@pytest.mark.parametrize(
    ("settings", "replicas", "facts"),
    [
        ({}, 1, {"parallel_layout": "single"}),
        ({}, 8, {"parallel_layout": "DDP"}),
        ({"use_distributed_optimizer": True}, 8, {"parallel_layout": "ZeRO", "zero_stage": 1}),
        ({"use_distributed_optimizer": True}, 1, {"parallel_layout": "single"}),
        ({"use_megatron_fsdp": True, "use_distributed_optimizer": True}, 8, {"parallel_layout": "FSDP"}),
        ({"use_custom_fsdp": True}, 8, {"parallel_layout": "FSDP"}),
    ],
)
def test_distributed_optimizer_of_megatron_is_zero_1(settings, replicas, facts):
    assert megatron.layout_facts(SimpleNamespace(**settings), replicas) == facts


def test_torchtitan_shards_with_fsdp():
    dims = SimpleNamespace(dp_shard=4, dp_replicate=1, tp=2, pp=1, cp=1, ep=1)
    sizes = {"tensor_parallel": 2, "pipeline_parallel": 1, "context_parallel": 1, "expert_parallel": 1}

    assert torchtitan._layout_facts(dims) == {"parallel_layout": "FSDP", **sizes}


@pytest.mark.parametrize(
    ("kind", "gpus", "tp", "layout"),
    [
        ("NO", 1, 1, "single"), ("NO", 2, 1, "DataParallel"), ("MULTI_GPU", 1, 1, "DDP"), ("MULTI_GPU", 1, 2, "single"),
        ("FSDP", 1, 1, "FSDP"), ("XLA", 1, 1, "XLA"),
    ],
)  # fmt: skip
def test_kind_of_accelerate_is_the_layout_of_a_trainer(kind, gpus, tp, layout):
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(name=kind), num_processes=2)
    trainer = SimpleNamespace(accelerator=accelerator, model=None, get_tp_size=lambda: tp)

    assert layout_facts(trainer, SimpleNamespace(n_gpu=gpus)) == {"parallel_layout": layout}


def test_trainer_without_accelerate_has_no_layout():
    assert layout_facts(None, SimpleNamespace()) == {}
