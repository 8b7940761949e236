"""The files that ``effllm fit`` reads: Megatron's scripts, and YAML of LLaMA-Factory and accelerate."""

import json

import pytest
from cases import cases

from effllm.commands import fit_sources
from effllm.commands.fit_sources import StatedSizes, UnreadableModel, find_source
from effllm.config.isolated import NoAnswer
from effllm.memory.megatron_arguments import notes_of_ambiguous_sizes, read_script, read_settings, read_shape
from effllm.memory.model_count import stated_model
from effllm.memory.plan import WrongModel
from effllm.memory.states import count_parameters
from effllm.memory.yaml_settings import note_of_left_out, read_yaml

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
    settings, notes = read_settings(arguments)
    layout = {"tp": 2, "gpus": 16, "zero": 1, "sequence_parallel": True, "implementation": "megatron"}
    batch = {"seq_length": 8192, "micro_batch": 1, "global_batch": 128, "checkpointing": "full"}
    assert (settings, notes) == ({**layout, **batch, "precision": "bf16-master", "optimizer": "adamw"}, [])
    assert notes_of_ambiguous_sizes(SCRIPT) == []


def test_arguments_without_switches_are_the_gpt_of_megatron():
    arguments = read_script(
        "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
        "--tokenizer-type GPT2BPETokenizer"
    )

    # A layer: 4 x 8 x 8 + 4 x 8, 2 x 8 x 32 + 32 + 8, two norms of 16; embeddings of 50,304 words and 16 positions.
    layer = 4 * 64 + 32 + 512 + 40 + 32
    assert count_parameters(read_shape(arguments, "")).total == (50304 + 16) * 8 + 2 * layer + 16


@cases(
    ("argument", "text"),
    [
        ("--num-layers many", "--num-layers is 'many', not a whole number"),
        ("--hidden-size 0", "--hidden-size is 0: a number from 1 to 100,000,000 is possible"),
        ("--num-attention-heads 33", "--num-attention-heads"),
        ("--num-layers $UNSET", r"--num-layers is \$UNSET, which has no value in the script"),
        ("--num-experts 8 --moe-layer-freq f(3)", "a whole number or a list such as"),
        ("--hybrid-override-pattern M-M*", "--hybrid-override-pattern: only the GPT model of Megatron is known"),
        ("--vocab-size=", "have no --vocab-size: Megatron reads it from the tokenizer"),
    ],
)
def test_an_argument_that_cannot_be_read_is_named(argument, text):
    with pytest.raises(WrongModel, match=text):
        read_shape(read_script(f"{SCRIPT} {argument}"), "")


@cases(
    ("argument", "note"),
    [
        ("--pipeline-model-parallel-size $PP", "--pipeline-model-parallel-size is $PP, which has no value"),
        ("--optimizer new", "--optimizer new is estimated as AdamW"),
        ("--spec my_plugin.hybrid get_spec", "--spec names layers of another module"),
    ],
)
def test_settings_that_are_not_read_have_a_note(argument, note):
    settings, (found,) = read_settings(read_script(f"{SCRIPT} {argument}"))

    assert found.startswith(note)
    assert not {"pp", "cp"} & set(settings)


@cases(
    ("script", "layers"),
    [
        ("A=1\nB=45\n--num-layers $((A + B)) --hidden-size 8", "46"),
        ("A=3\n--num-layers $(( $A * (4 - 2) / 4 )) --hidden-size 8", "1"),
        ("--num-layers ${LAYERS:-${A:-5}} --hidden-size 8", "5"),
        ("--num-layers $((A + 1)) --hidden-size 8", "$((A + 1))"),
        ("--num-layers $((9 ** 9 ** 9)) --hidden-size 8", "$((9 ** 9 ** 9))"),
        ("--num-layers $((1 / 0)) --hidden-size 8", "$((1 / 0))"),
    ],
)
def test_sums_and_products_of_a_script_are_computed(script, layers):
    arguments = read_script(script)

    assert (arguments["num-layers"], arguments["hidden-size"]) == (layers, "8")
    assert notes_of_ambiguous_sizes("if A; then --num-layers 2; else --num-layers 4; fi --num-layers 4") == [
        "--num-layers is 2 and 4 in the script, whose branches are not followed: 4 is taken"
    ]


def test_layout_of_megatron_in_a_yaml_of_llama_factory_is_read():
    fields = {"finetuning_type": "full", "bf16": True, "cutoff_len": 4096, "per_device_train_batch_size": 1}
    fields |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4, "expert_model_parallel_size": 2}

    found, notes = read_yaml(
        "llama-factory", {**fields, "use_distributed_optimizer": True, "recompute_granularity": "full"}, None
    )

    assert notes == []
    layout = {"tp": 1, "pp": 4, "ep": 2, "cp": 1, "zero": 1, "implementation": "megatron", "precision": "bf16-master"}
    assert found.items() >= {**layout, "checkpointing": "full", "seq_length": 4096, "micro_batch": 1}.items()


def test_yaml_of_axolotl_is_a_model_and_its_plan(tmp_path):
    path = tmp_path / "qlora.yaml"
    path.write_text(
        "base_model: mistralai/Mistral-7B-v0.1\nload_in_4bit: true\nadapter: qlora\nlora_r: 32\n"
        "lora_target_linear: true\nsequence_len: 8192\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n"
        "optimizer: adamw_bnb_8bit\nbf16: auto\ngradient_checkpointing: true\nflash_attention: true\n"
        "lora_modules_to_save: [embed_tokens]\nfsdp: [full_shard]\nfsdp_config: {fsdp_offload_params: true}\n"
    )

    found = find_source(str(path))

    assert count_parameters(found.shape).total == 7_241_732_096
    lora = {"lora_rank": 32, "lora_targets": "all", "base_bits": 4, "precision": "bf16", "optimizer": "adamw-8bit"}
    batch = {"seq_length": 8192, "micro_batch": 2, "accumulation": 4, "checkpointing": "full", "attention": "flash"}
    assert found.settings == {**lora, **batch, "zero": 3, "tp": 1, "cp": 1}
    assert found.notes[-1] == "not in the estimate: lora_modules_to_save and fsdp_config.fsdp_offload_params"


@cases(
    ("changes", "settings"),
    [
        ({}, {"precision": "bf16", "checkpointing": "none"}),
        ({"bf16": False, "float16": True}, {"precision": "fp16"}),
        ({"bf16": None}, {"precision": "fp32"}),
        ({"context_parallel_size": 4, "tensor_parallel_size": 2}, {"cp": 4, "tp": 2}),
        ({"fsdp": ["shard_grad_op", "auto_wrap"]}, {"zero": 2}),
        ({"fsdp_config": {"activation_checkpointing": True}}, {"zero": 3, "checkpointing": "full"}),
    ],
)
def test_full_training_of_axolotl(changes, settings):
    fields = {"base_model": "x", "sequence_len": 2048, "bf16": True, **changes}

    found, _ = read_yaml("axolotl", fields, fields.get("deepspeed"))

    assert found.items() >= settings.items() and "lora_rank" not in found
    del fields["bf16"]
    assert read_yaml("axolotl", fields)[0]["precision"].startswith(("bf16", "fp16"))  # auto


@cases(
    ("changes", "settings"),
    [
        ({}, {"lora_rank": 8, "lora_targets": "all", "precision": "bf16", "checkpointing": "full"}),
        ({"quant_bits": 4, "target_modules": ["q_proj", "v_proj"]}, {"base_bits": 4, "lora_targets": "qv"}),
        ({"tuner_type": "full", "deepspeed": "zero3"}, {"precision": "bf16-zero", "zero": 3}),
        ({"tensor_model_parallel_size": 2, "micro_batch_size": 4}, {"tp": 2, "micro_batch": 4, "zero": 0}),
    ],
)
def test_yaml_of_swift_is_a_model_and_its_plan(tmp_path, changes, settings):
    path = tmp_path / "sft.yaml"
    path.write_text(json.dumps({"model": "Qwen/Qwen2.5-7B-Instruct", "max_length": 4096, **changes}))

    found = find_source(str(path))

    assert found.shape.name == "qwen2.5-7b" and found.settings["seq_length"] == 4096
    assert found.settings.items() >= settings.items()


@cases(
    ("stated", "unread"),
    [
        ("a_new_option: 1\nlogging_steps: 5\noutput_dir: x\nlearning_rate: 0.1", ["a_new_option"]),
        ("fp8: false\nrl:\nqat: {}\nrelora: none\nlora_dropout: 0.0\nplugins: []\nfp16: auto", []),
        ("qat: {weight_dtype: int4}\ntrl: {beta: 1, use_vllm: true}", ["qat", "trl"]),
        ("qat: {enabled: false, weight_dtype: int4}", []),
        (
            "fsdp_config: {reshard_after_forward: true, fsdp_version: 2, forward_prefetch: true}",
            ["fsdp_config.forward_prefetch"],
        ),
        ("dp_shard_size: 1\ndp_replicate_size: 2", ["dp_replicate_size"]),
        ("deepspeed: {zero_optimization: {stage: 3, overlap_comm: true, stage3_max_reuse_distance: 1e9}}", []),
        ("deepspeed: {optimizer: {type: Lamb, params: {lr: 1}}}", ["optimizer"]),
    ],
)
def test_what_a_yaml_states_and_the_estimate_does_not_contain_is_listed(tmp_path, stated, unread):
    path = tmp_path / "sft.yaml"
    path.write_text(f"base_model: Qwen/Qwen3-8B\nsequence_len: 1024\nmicro_batch_size: 1\n{stated}\n")

    notes = [note for note in find_source(str(path)).notes if note.startswith("not in the estimate")]

    assert notes == note_of_left_out(unread)
    assert note_of_left_out(["plugins", "fp8", "rl"]) == ["not in the estimate: plugins, fp8 and rl"]


@cases(
    ("arguments", "notes"),
    [
        ("--fp8-format hybrid --moe-latent-size 8", ["not in the estimate: --fp8-format and --moe-latent-size"]),
        ("--expert-tensor-parallel-size 1", ["not in the estimate: --expert-tensor-parallel-size"]),
        ("--expert-tensor-parallel-size 1 --tensor-model-parallel-size 1", []),
        ("--lr 1e-4 --save x --attention-dropout 0.0 --sequence-parallel --recompute-num-layers 1 --rdzv-id 1", []),
    ],
)
def test_arguments_of_megatron_that_are_not_estimated_are_listed(tmp_path, arguments, notes):
    path = tmp_path / "run.sh"
    path.write_text(f"{SCRIPT} {arguments}")

    assert [note for note in find_source(str(path)).notes if note.startswith("not in the estimate")] == notes


@cases(
    ("arguments", "expected"),
    [
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", {"zero": 3}),
        ("--optimizer muon", {"optimizer": "muon"}),
        ("--grad-reduce-in-bf16", {"precision": "bf16-zero"}),
    ],
)
def test_further_settings_of_megatron(arguments, expected):
    settings, notes = read_settings(read_script(f"{SCRIPT} {arguments}"))

    assert {name: settings[name] for name in expected} == expected
    assert notes == []


@cases(("stated", "layers"), [("([0]*3+[1]*29)", 29), ("[0,1]*16", 16), ("4", 8), ("1", 32)])
def test_layers_with_experts_are_a_number_or_a_list(stated, layers):
    shape = read_shape(read_script(f"{SCRIPT} --num-experts 8 --moe-layer-freq '{stated}'"), "")

    assert shape.experts.layers == layers


def test_gpt_oss_of_megatron_has_its_published_parameters():
    shape = read_shape(
        read_script(
            "--num-layers 24 --hidden-size 2880 --num-attention-heads 64 --group-query-attention --num-query-groups 8 "
            "--kv-channels 64 --num-experts 32 --moe-ffn-hidden-size 2880 --moe-router-topk 4 --normalization RMSNorm "
            "--padded-vocab-size 201088 --untie-embeddings-and-output-weights --quick-geglu --softmax-type learnable "
            "--enable-gpt-oss"
        ),
        "",
    )

    assert count_parameters(shape).total == 20_914_757_184


def test_a_vocabulary_is_that_of_the_option_or_of_a_known_tokenizer(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace("--vocab-size 128256", ""))
    assert (
        find_source(str(path), StatedSizes(vocab=1000)).shape.vocab == 1024
    )  # a multiple of 128 for each of two ranks

    path.write_text(SCRIPT.replace("--vocab-size 128256", "--tokenizer-model Qwen/Qwen3-8B"))
    assert find_source(str(path)).shape.vocab == 152064


@cases(
    ("changes", "expected"),
    [
        ({}, {"lora_rank": 8, "precision": "bf16", "micro_batch": 2, "checkpointing": "full"}),
        ({"finetuning_type": "full"}, {"precision": "bf16-mixed"}),
        ({"finetuning_type": "full", "pure_bf16": True}, {"precision": "bf16"}),
        ({"optim": "paged_adamw_8bit", "flash_attn": "disabled"}, {"optimizer": "adamw-8bit", "attention": "eager"}),
    ],
)
def test_settings_of_llama_factory(changes, expected):
    fields = {"finetuning_type": "lora", "bf16": True, "per_device_train_batch_size": 2, "lora_rank": 8}

    settings, notes = read_yaml("llama-factory", {**fields, **changes}, None)

    assert {name: settings.get(name) for name in expected} == expected
    assert notes == []


OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
REPLICAS = {"parallelism_config": {"parallelism_config_dp_replicate_size": 2}}
NVME = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"offload_param_device": "nvme"}}


@cases(
    ("kind", "fields", "deepspeed", "text"),
    [
        ("llama-factory", {"stage": "dpo"}, None, "stage dpo is estimated as sft"),
        ("llama-factory", {"finetuning_type": "oft"}, None, "oft is estimated as LoRA"),
        ("llama-factory", {}, {"zero_optimization": OFFLOAD}, "zero_optimization.offload_optimizer"),
        ("llama-factory", {"lora_target": "q_proj,up_proj"}, None, "is estimated as --lora-targets all"),
        ("llama-factory", {"fsdp": ["full_shard", "offload"]}, None, "fsdp offload is not estimated"),
        ("llama-factory", {"tensor_model_parallel_size": 2, "recompute_num_layers": 4}, None, "recompute_num_layers"),
        ("accelerate", REPLICAS, None, "dp_replicate_size is estimated as sharding between all GPUs"),
        ("accelerate", NVME, None, "not in the estimate: deepspeed_config.offload_param_device"),
    ],
)
def test_options_that_change_the_memory_have_a_note(kind, fields, deepspeed, text):
    _, (note,) = read_yaml(kind, fields, deepspeed)

    assert text in note


MEGATRON_SWITCHES = ("sequence_parallelism", "recompute_activations", "use_distributed_optimizer")


@cases(
    ("fields", "expected"),
    [
        ({"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "bf16"}, {"precision": "bf16-mixed"}),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard_after_forward": True}}, {"zero": 3}),
        (
            {"parallelism_config": {f"parallelism_config_{name}_size": 2 for name in ("tp", "cp", "dp_shard")}},
            {"tp": 2, "cp": 2},
        ),
        (
            {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": {"zero_stage": 3}},
            {"zero": 3, "precision": "bf16-zero"},
        ),
        (
            {
                "distributed_type": "MEGATRON_LM",
                "mixed_precision": "bf16",
                "megatron_lm_config": {"megatron_lm_tp_degree": 2}
                | {f"megatron_lm_{name}": True for name in MEGATRON_SWITCHES},
            },
            {"tp": 2, "sequence_parallel": True, "checkpointing": "selective", "zero": 1, "precision": "bf16-master"},
        ),
    ],
)
def test_settings_of_accelerate(fields, expected):
    settings, _ = read_yaml("accelerate", fields)

    assert {name: settings.get(name) for name in expected} == expected


def test_a_yaml_names_its_model_and_its_deepspeed_config(tmp_path):
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    path = tmp_path / "sft.yaml"
    path.write_text("model_name_or_path: Qwen/Qwen3-8B\nfinetuning_type: full\nbf16: true\ndeepspeed: zero.json\n")

    found = find_source(str(path))

    assert (found.shape.name, found.settings["zero"], found.settings["precision"]) == ("qwen3-8b", 3, "bf16-zero")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.yaml", "model_name_or_path: qwen3-8b\ndeepspeed: none.json\n", "none.json, which is not there"),
        ("a.yaml", "model_name_or_path: qwen3-8b\ndeepspeed: deep.zero.json\n", "maximum recursion"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.yaml", "model_name_or_path: company/gated\n", "nothing is downloaded"),
        ("a.yaml", "model_name_or_path: qwen3-8b\ncutoff_len: long\n", "cutoff_len is 'long'"),
        ("a.yaml", "model_name_or_path: [a]\n", r"model_name_or_path is \['a'\]: give a name of the table"),
        ("a.yaml", "model_name_or_path: qwen3-8b\nlora_rank: -1\n", "a.yaml: lora_rank is -1: a number from 1"),
        ("a.yaml", "distributed_type: DEEPSPEED\nnum_processes: 0\n", "num_processes is 0: a number from 1"),
        ("list.json", "[]", "it has no fields: give the config.json"),
        ("model.safetensors", "\0\udcff", "is not a text file: give the config.json"),
        ("a.yaml", "model_name_or_path: company/Meta-Llama-3-8B-Instruct-GPTQ\n", "nothing is downloaded"),
        ("run.sh", "torchrun train.py\n", "neither JSON nor a script of Megatron with the sizes"),
        ("run.sh", "pretrain --num-layers 2 --hidden-size 8\n", "no --num-attention-heads"),
    ],
)
def test_a_file_without_a_model_is_named(tmp_path, name, content, text):
    (tmp_path / name).write_text(content, errors="surrogateescape")
    (tmp_path / "deep.zero.json").write_text('{"a": ' * 700 + "1" + "}" * 700)

    with pytest.raises(UnreadableModel, match=text):
        find_source(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3.1-8b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
    ],
)
def test_a_tuned_model_has_the_sizes_of_its_base(name, model):
    found = find_source(name)

    assert found.shape.name == model
    assert found.notes[-1].startswith(f"{name} is taken as a variant of {model}")
    assert [note for note in find_source("deepseek-math-7b").notes if "not compared" in note] and not find_source(
        model
    ).notes
    with pytest.raises(UnreadableModel, match="MODEL is empty"):
        find_source("")


@pytest.mark.parametrize("is_accelerate", [False, True])
def test_a_deepspeed_config_is_found_in_a_folder_above(tmp_path, is_accelerate):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    path = tmp_path / "runs" / "sft.yaml"
    path.parent.mkdir()
    of_accelerate = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: configs/zero.json}\n"
    of_factory = "model_name_or_path: qwen3-8b\ndeepspeed: configs/zero.json\n"
    path.write_text(of_accelerate if is_accelerate else of_factory)

    assert find_source(str(path)).settings["zero"] == 1


def test_model_that_the_formulas_refuse_is_counted_where_it_can_be_built(monkeypatch, tmp_path):
    fields = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 100, "num_attention_heads": 96}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields | {"intermediate_size": 8, "vocab_size": 10}))

    def cannot_build(_fields, _name):
        raise NoAnswer("it does not build")

    monkeypatch.setattr(fit_sources, "can_count", lambda: True)
    monkeypatch.setattr(fit_sources, "count_model", lambda _fields, name: stated_model(name, "llama", 7_000, None))
    assert count_parameters(find_source(str(path)).shape).total == 7_000
    monkeypatch.setattr(fit_sources, "count_model", cannot_build)
    with pytest.raises(UnreadableModel, match="hidden_size 100 is not a multiple of num_attention_heads 96"):
        find_source(str(path))
