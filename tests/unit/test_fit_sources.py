"""The files that ``effllm fit`` reads: Megatron's scripts, and YAML of LLaMA-Factory and accelerate."""

import json

import pytest

from effllm.commands.fit_sources import UnreadableModel, find
from effllm.memory.megatron_arguments import read_script, read_settings, read_shape
from effllm.memory.model import WrongModel
from effllm.memory.parameters import count_parameters
from effllm.memory.yaml_settings import accelerate_settings, llama_factory_settings

SCRIPT = """#!/bin/bash
# --num-layers 99 is a comment
GPUS_PER_NODE=8
TP=${TP:-2}
HIDDEN=4096
MODEL_ARGS=(
    --num-layers 32
    --hidden-size $HIDDEN
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --ffn-hidden-size 14336
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --seq-length 8192 --max-position-embeddings 8192
    --vocab-size 128256
)
TRAIN="--micro-batch-size 1 --global-batch-size 128 --bf16 --recompute-granularity full"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes=2 pretrain_gpt.py \\
    "${MODEL_ARGS[@]}" $TRAIN --tensor-model-parallel-size ${TP} --use-distributed-optimizer --sequence-parallel
"""


def test_a_launch_script_is_the_model_and_its_plan():
    arguments = read_script(SCRIPT)

    shape = read_shape(arguments, "llama")
    assert count_parameters(shape).total == 8_030_261_248  # as Llama 3.1 8B
    assert read_settings(arguments) == {
        "tp": 2,
        "seq_length": 8192,
        "micro_batch": 1,
        "global_batch": 128,
        "gpus": 16,
        "zero": 1,
        "implementation": "megatron",
        "precision": "bf16-master",
        "optimizer": "adamw",
        "sequence_parallel": True,
        "checkpointing": "full",
    }


def test_arguments_without_switches_are_the_gpt_of_megatron():
    arguments = read_script(
        "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
        "--tokenizer-type GPT2BPETokenizer"
    )

    # A layer: 4 x 8 x 8 + 4 x 8, 2 x 8 x 32 + 32 + 8, two norms of 16; embeddings of 50,304 words and 16 positions.
    layer = 4 * 64 + 32 + 512 + 40 + 32
    assert count_parameters(read_shape(arguments, "")).total == (50304 + 16) * 8 + 2 * layer + 16


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ("--vocab-size", "have no --vocab-size: Megatron reads it from the tokenizer"),
        ("--num-attention-heads", "the arguments have no --num-attention-heads"),
    ],
)
def test_missing_arguments_are_named(changes, text):
    arguments = {name: value for name, value in read_script(SCRIPT).items() if f"--{name}" != changes}

    with pytest.raises(WrongModel, match=text):
        read_shape(arguments, "")


@pytest.mark.parametrize("value", ["many", "1e3", "$UNSET"])
def test_an_argument_that_is_not_a_number_is_named(value):
    with pytest.raises(WrongModel, match=r"--num-layers is|no --num-layers"):
        read_shape({**read_script(SCRIPT), "num-layers": value}, "")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"lora_rank": 8, "precision": "bf16", "micro_batch": 2, "checkpointing": "full"}),
        ({"quantization_bit": 4}, {"base_bits": 4}),
        ({"finetuning_type": "full"}, {"precision": "bf16-mixed"}),
        ({"finetuning_type": "full", "pure_bf16": True}, {"precision": "bf16"}),
        ({"optim": "paged_adamw_8bit", "flash_attn": "disabled"}, {"optimizer": "adamw-8bit", "attention": "eager"}),
        ({"lora_target": "q_proj,v_proj"}, {"lora_targets": "qv"}),
    ],
)
def test_settings_of_llama_factory(changes, expected):
    fields = {"finetuning_type": "lora", "bf16": True, "per_device_train_batch_size": 2, "lora_rank": 8}

    settings, notes = llama_factory_settings({**fields, **changes}, None)

    assert {name: settings.get(name) for name in expected} == expected
    assert notes == []


def test_what_is_not_estimated_of_llama_factory_is_named():
    settings, notes = llama_factory_settings({"finetuning_type": "full", "use_galore": True, "optim": "new"}, None)

    assert notes == ["use_galore is not estimated", "optim new is estimated as AdamW"]
    assert settings["optimizer"] == "adamw"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "bf16"}, {"precision": "bf16-mixed"}),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, {"zero": 2}),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard_after_forward": True}}, {"zero": 3}),
        (
            {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": {"zero_stage": 3}},
            {"zero": 3, "precision": "bf16-zero"},
        ),
    ],
)
def test_settings_of_accelerate(fields, expected):
    settings, _ = accelerate_settings(fields)

    assert {name: settings.get(name) for name in expected} == expected


def test_a_yaml_names_its_model_and_its_deepspeed_config(tmp_path):
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    path = tmp_path / "sft.yaml"
    path.write_text("model_name_or_path: Qwen/Qwen3-8B\nfinetuning_type: full\nbf16: true\ndeepspeed: zero.json\n")

    found = find(str(path))

    assert (found.shape.name, found.settings["zero"], found.settings["precision"]) == ("qwen3-8b", 3, "bf16-zero")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.yaml", "model_name_or_path: qwen3-8b\ndeepspeed: none.json\n", "none.json, which is not there"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.yaml", "model_name_or_path: a.yaml\n", "a.yaml, which is no model"),
        ("a.yaml", "lr: 1\n", "neither of LLaMA-Factory"),
        ("a.yaml", "model_name_or_path: company/gated\n", "nothing is downloaded"),
        ("a.yaml", "model_name_or_path: qwen3-8b\ncutoff_len: long\n", "cutoff_len is 'long'"),
        ("run.sh", "torchrun train.py\n", "neither JSON nor a script with --num-layers"),
        ("run.sh", "pretrain --num-layers 2 --hidden-size 8\n", "no --num-attention-heads"),
    ],
)
def test_a_file_without_a_model_is_named(tmp_path, name, content, text):
    path = tmp_path / name
    path.write_text(content)

    with pytest.raises(UnreadableModel, match=text):
        find(str(path))


def test_a_row_that_was_not_compared_has_one_note():
    (note,) = find("deepseek-math-7b").notes

    assert "not compared" in note
    assert find("llama-3.1-8b").notes == ()
