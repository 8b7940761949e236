"""The memory of a model before the run: parameters, parts, verdicts and changes."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from cases import cases, repeats

from effllm.devices.known.hardware import find_by_typed_words, similar_gpus, usable_bytes
from effllm.memory.changes import DOES_NOT_FIT, FITS, UNCLEAR, fitting_changes, verdict
from effllm.memory.config_json import (
    UnknownArchitecture,
    architectures,
    find_model,
    known_models,
    read_config,
    similar_names,
)
from effllm.memory.estimate import (
    ACTIVATION_LIMITS,
    NOT_COUNTED_LIMITS,
    UNKNOWN,
    ByteRange,
    MeasuredStep,
    estimate,
    total_of,
)
from effllm.memory.model_count import stated_model
from effllm.memory.plan import INFERENCE, ImpossiblePlan, MemoryPlan, WrongModel
from effllm.memory.states import count_parameters
from effllm.views.fit_text import BASIS_AT, wrapped

TINY = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "intermediate_size": 16, "vocab_size": 10}
# Embedding and head 2 x 10 x 8; a layer: queries and output 2 x 8 x 8, keys and values 2 x 8 x 4, MLP 3 x 8 x 16,
# norms 2 x 8; the last norm 8.
TINY_PARAMETERS = 160 + 2 * (128 + 64 + 384 + 16) + 8
EIGHT_B = find_model("llama-3.1-8b").shape


def held(shape, plan):
    return {part.name: part.bytes.expected for part in estimate(shape, plan).parts}


def test_allocated_memory_has_the_buckets_but_not_context_fragmentation_and_nccl():
    found = estimate(EIGHT_B, MemoryPlan(dp=2))
    outside = ("CUDA context", "fragmentation", "communication buffers")
    inside = sum(part.bytes.expected for part in found.parts if part.name not in outside)

    # The buckets of DDP are as large as the gradients, which are in 32 bits.
    assert found.allocated.expected == pytest.approx(inside + 4 * found.parameters.total)
    fragmented = found.part("fragmentation").bytes.expected
    assert found.reserved.expected == pytest.approx(found.allocated.expected + fragmented)


@cases("row", known_models())
def test_known_models_have_their_published_parameters_and_a_compared_place_or_the_mark(row):
    assert row.source.startswith("https://")
    assert row.published_parameters in (None, count_parameters(row.shape).total)
    assert sum("not compared" in note for note in row.notes) == (row.compared is None)
    assert re.match(r"[\w.-]+/[\w.-]+@[0-9a-f]{8} \S+|PyPI [a-z]+ [0-9.]+: \S+|None", str(row.compared))


def test_usable_memory_is_below_that_of_the_board_and_similar_gpus_are_named():
    assert 0.9 < usable_bytes(find_by_typed_words("t4")) / find_by_typed_words("t4").memory_bytes < 0.95
    assert 0.95 < usable_bytes(find_by_typed_words("h100")) / find_by_typed_words("h100").memory_bytes < 1
    assert find_by_typed_words("h300-80gb") is None
    assert "NVIDIA H100 80GB HBM3" in similar_gpus("h300-80gb")


def test_the_document_has_the_number_of_compared_rows():
    text = (Path(__file__).parents[2] / "docs" / "fit.md").read_text()
    missing = [row.name for row in known_models() if row.compared is None]

    assert f"{len(known_models()) - len(missing)} of the {len(known_models())} rows were compared" in text
    assert f"{' and '.join(f'`{name}`' for name in missing)} were not compared" in text


@cases("name", ["llama-3.1-8b", "Llama 3.1 8B", "meta-llama/Llama-3.1-8B", "llama-3-8b"])
def test_models_are_found_by_name_alias_and_repository(name):
    assert find_model(name).name == "llama-3.1-8b"
    assert find_model("qwen3-9b") is None
    assert "qwen3-8b" in similar_names("qwen3-9b")


def test_memory_of_experts_needs_all_parameters():
    counts = count_parameters(find_model("mixtral-8x7b").shape)

    assert counts.total - counts.active == 6 * 32 * 3 * 4096 * 14336
    weights = held(find_model("mixtral-8x7b").shape, MemoryPlan(mode=INFERENCE, precision="bf16"))["weights"]
    assert weights == 2 * counts.total


@cases(
    ("precision", "weights", "gradients", "states"),
    [("fp32", 4, 4, 8), ("bf16", 2, 2, 4), ("bf16-mixed", 4, 4, 8), ("bf16-master", 2, 4, 12), ("bf16-zero", 2, 2, 12)],
)
def test_bytes_of_a_parameter_follow_the_precision(precision, weights, gradients, states):
    found = estimate(read_config(TINY), MemoryPlan(precision=precision, accumulation=2, seq_length=8))

    assert found.part("weights").bytes.expected == weights * TINY_PARAMETERS
    assert found.part("gradients").bytes.expected == gradients * TINY_PARAMETERS
    assert found.part("optimizer states").bytes.expected == states * TINY_PARAMETERS


@cases(
    ("optimizer", "bytes_of_states"),
    [
        ("sgd", 0),
        ("sgd-momentum", 4 * TINY_PARAMETERS),
        ("lion", 4 * TINY_PARAMETERS),
        ("muon", 4 * (TINY_PARAMETERS + 160 + 5 * 8)),  # twice for embedding, head and norms
        # rows + columns of two 10 x 8; of 8 x 8 (two), 4 x 8 (two), 16 x 8 (two), 8 x 16 in two layers; norms
        ("adafactor", 4 * (2 * 18 + 2 * (2 * 16 + 2 * 12 + 3 * 24) + 5 * 8)),
    ],
)
def test_states_of_optimizers_are_counted_by_hand(optimizer, bytes_of_states):
    states = held(read_config(TINY), MemoryPlan(precision="fp32", optimizer=optimizer))["optimizer states"]

    assert states == bytes_of_states


def test_adapters_have_r_times_rows_and_columns():
    plan = MemoryPlan(precision="bf16", lora_rank=4, lora_targets="qv")

    found = estimate(read_config(TINY), plan)

    assert found.trained == 2 * 4 * ((8 + 8) + (4 + 8))
    assert found.part("optimizer states").bytes.expected == 8 * found.trained


def test_a_base_of_4_bits_needs_about_half_a_byte_for_a_weight():
    matrices = 2 * (128 + 64 + 384)
    plan = MemoryPlan(precision="bf16", lora_rank=2, lora_targets="qv", base_bits=4)

    found = estimate(read_config(TINY), plan)

    weights, others = found.part("weights").bytes, 2 * (1352 - matrices) + 4 * found.trained
    assert weights.low == pytest.approx(matrices * (0.5 + 1 / 64 + 4 / 16384) + others)
    assert weights.expected == weights.high == pytest.approx(matrices * (0.5 + 4 / 64) + others)


def test_products_of_8_bits_keep_their_inputs_in_spite_of_checkpointing():
    plan = MemoryPlan(precision="bf16", lora_rank=16, base_bits=8, checkpointing="full", seq_length=2048)
    found = estimate(EIGHT_B, plan)
    names = ("weights", "optimizer states", "gradients", "activations", "logits")

    # `effllm fit llama-3.1-8b --measure` counts 16.80 GB with transformers 5.23.
    assert sum(found.part(name).bytes.expected for name in names) == pytest.approx(16.80e9, rel=0.01)
    # Checkpointing with use_reentrant=True frees them: 26,624 inputs of 2 bytes for each token in each of 32 layers.
    assert found.part("activations").bytes.low < found.part("activations").bytes.expected - 2048 * 32 * 2 * 26_624


def test_a_product_of_4_bits_is_not_cast_by_autocast():
    plan = MemoryPlan(precision="bf16-mixed", optimizer="sgd", lora_rank=8, base_bits=4, seq_length=8)

    part = estimate(EIGHT_B, plan).part("activations").bytes

    assert part.expected < 0.2 * 2 * count_parameters(EIGHT_B).total


def test_a_window_below_the_length_has_a_mask_and_repeated_keys():
    shape = find_model("mistral-7b").shape
    plans = [MemoryPlan(precision="bf16", optimizer="sgd", seq_length=length) for length in (4096, 4100)]

    whole, narrow = (estimate(shape, plan).part("activations").bytes.expected for plan in plans)

    # 32 layers: a mask in 16 bits, and 32 instead of 8 heads of keys and values; one mask of a byte for each pair.
    more = 32 * (4100**2 * 2 + 4100 * 2 * (32 - 8) * 128 * 2) + 4100**2
    assert narrow - whole * 4100 / 4096 == pytest.approx(more, rel=0.001)


def test_attention_with_capped_scores_is_eager():
    shape = find_model("gemma-2-2b").shape

    assert estimate(shape, MemoryPlan()).plan.attention == "eager"
    assert estimate(shape, MemoryPlan(attention="flash")).plan.attention == "flash"


def test_a_fused_loss_has_one_tile_in_place_of_whole_logits():
    plan = MemoryPlan(precision="bf16", lora_rank=8, seq_length=8192)
    whole, fused = (estimate(EIGHT_B, replace(plan, fused_loss=one)).part("logits").bytes for one in (False, True))

    assert whole.expected > 8192 * 128256 * 8  # the logits and their gradients in 32 bits
    tile = 4096 * 32768 * 2
    assert fused.low == 0
    assert tile < fused.expected < tile + 8192 * 4096 * 8
    assert fused.high - fused.expected == 7.25 * 2 * tile


def test_experts_of_a_quantized_base_may_not_be_quantized():
    known = find_model("qwen3-30b-a3b")
    plan = MemoryPlan(precision="bf16", lora_rank=8, base_bits=4)

    weights = estimate(known.shape, plan).part("weights").bytes

    assert weights.expected < 20e9
    assert 55e9 < weights.high < 60e9  # 29 of 30.5 thousand million parameters are those of experts


def test_a_product_of_4_bits_copies_its_matrix():
    plan = MemoryPlan(mode="inference", precision="bf16", base_bits=4)

    part = estimate(EIGHT_B, plan).part("beside a quantized base").bytes

    assert part == ByteRange(0, 4096 * 14336 * 2, 2 * 4096 * 128256 * 2)


def test_zero_divides_states_then_gradients_then_weights():
    parts = [held(EIGHT_B, MemoryPlan(precision="bf16", dp=8, zero=stage, checkpointing="full")) for stage in range(4)]

    for name, first in (("optimizer states", 1), ("gradients", 2), ("weights", 3)):
        for stage in (1, 2, 3):
            divisor = 8 if stage >= first else 1
            assert parts[stage][name] == pytest.approx(parts[0][name] / divisor), (name, stage)


def test_checkpointing_keeps_inputs_of_layers_or_outputs_of_products():
    plan = MemoryPlan(precision="bf16", attention="flash", optimizer="sgd", seq_length=16384)
    full, selective, none = (
        held(EIGHT_B, replace(plan, checkpointing=kind))["activations"] for kind in ("full", "selective", "none")
    )
    short = MemoryPlan(precision="bf16", checkpointing="full", dp=8, zero=3)

    assert full < selective < none and full < none / 3
    # Under FSDP the residual stream of mixed precision is in 16 bits.
    assert held(EIGHT_B, short)["activations"] == held(EIGHT_B, replace(short, precision="bf16-mixed"))["activations"]


def test_eager_attention_grows_with_the_square_of_the_length():
    def extra(length):
        eager, fused = (
            held(EIGHT_B, MemoryPlan(precision="bf16", attention=kind, optimizer="sgd", seq_length=length))[
                "activations"
            ]
            for kind in ("eager", "sdpa")
        )
        return eager - fused

    assert extra(8192) / extra(4096) == pytest.approx(4, rel=0.1)


def test_kv_cache_of_grouped_queries_windows_and_latents():
    def cache(name, **changes):
        plan = MemoryPlan(mode=INFERENCE, precision="bf16", micro_batch=2, seq_length=8192)
        return estimate(find_model(name).shape, replace(plan, **changes)).part("KV cache").bytes

    assert cache("llama-3.1-8b") == ByteRange.exact(2 * 2 * 8192 * 32 * 8 * 128 * 2)
    assert cache("mistral-7b").low == 2 * 2 * 4096 * 32 * 8 * 128 * 2
    assert cache("mistral-7b").high == 2 * cache("mistral-7b").low
    assert cache("deepseek-v3").low == 2 * 8192 * 61 * (512 + 64) * 2
    assert cache("llama-3.1-8b", tp=4).expected == cache("llama-3.1-8b").expected / 4


@cases(
    ("name", "changes", "ratio"),
    [
        ("llama-3.1-8b", {}, ACTIVATION_LIMITS),
        ("llama-3.1-8b", {"tp": 2}, NOT_COUNTED_LIMITS),
        ("llama-3.1-8b", {"precision": "bf16", "lora_rank": 8, "base_bits": 4}, ACTIVATION_LIMITS),
        ("deepseek-v3", {}, ACTIVATION_LIMITS),
        ("llama-3.1-8b", {"checkpointing": "selective"}, NOT_COUNTED_LIMITS),
        ("llama-3.1-8b", {"checkpointing": "selective", "attention": "eager"}, ACTIVATION_LIMITS),
    ],
)
def test_intervals_are_wider_for_plans_that_were_not_counted(name, changes, ratio):
    part = estimate(find_model(name).shape, MemoryPlan(optimizer="sgd", **changes)).part("activations").bytes

    assert (part.low / part.expected, part.high / part.expected) == pytest.approx(ratio)


def test_limits_of_independent_parts_add_as_squares():
    total = total_of([ByteRange(7, 10, 14), ByteRange(16, 20, 23)])

    assert total == ByteRange(25, 30, 35)


@pytest.mark.parametrize(("usable", "word"), [(36, FITS), (30, UNCLEAR), (24, DOES_NOT_FIT)])
def test_a_plan_is_unclear_if_its_interval_contains_the_memory(usable, word):
    assert verdict(ByteRange(25, 30, 35), usable) == word


def test_changes_fit_and_are_ordered_by_their_cost():
    found = estimate(EIGHT_B, MemoryPlan(seq_length=4096))
    usable = usable_bytes(find_by_typed_words("h100-80gb"))

    changes = fitting_changes(found, usable)

    assert verdict(found.total, usable) == DOES_NOT_FIT
    assert changes
    assert all(one.total.high <= usable for one in changes)
    assert [one.cost_rank for one in changes] == sorted(one.cost_rank for one in changes)


def test_experts_have_adapters_in_megatron_alone():
    shape = find_model("qwen3-30b-a3b").shape
    by_peft, by_megatron = (
        estimate(shape, MemoryPlan(precision="bf16-master", lora_rank=8, implementation=name)).trained
        for name in ("transformers", "megatron")
    )

    # An expert has a matrix of 2 x 768 rows of gate and product, and one of 2,048 rows.
    assert by_megatron - by_peft == 48 * 128 * 8 * (2 * 768 + 2048 + 2048 + 768)


FOUR_ROWS = MemoryPlan(precision="bf16", seq_length=4096, micro_batch=4, accumulation=3)


@cases(
    ("plan", "share", "keeps_gpus", "options", "costs"),
    [
        (MemoryPlan(dp=8), 0.35, True, "--tp 8 --dp 1 --accumulation 8", 2),
        (FOUR_ROWS, 0.8, False, "--micro-batch 1 --accumulation 12", 1),
        (MemoryPlan(mode=INFERENCE, precision="bf16"), 0.7, True, "--gpus 2 --tp 2", 1),
        (MemoryPlan(mode=INFERENCE, precision="bf16"), 0.7, False, "--tp 2", 1),
    ],
)
def test_changes_keep_the_global_batch_and_name_more_gpus(plan, share, keeps_gpus, options, costs):
    found = estimate(EIGHT_B, plan)

    changes = fitting_changes(found, share * found.total.expected, keeps_gpus=keeps_gpus)

    [change] = [one for one in changes if one.options == options]
    assert len(change.costs) == costs
    batches = [one.dp * one.accumulation * one.micro_batch for one in (change.plan, plan)]
    assert batches[0] == batches[1]


@cases(
    ("changes", "text"),
    [
        ({"hidden_size": -8}, "hidden_size is -8: a number from 1 to 100,000,000 is possible"),
        ({"num_hidden_layers": 10**4000}, "num_hidden_layers is 1000"),
        ({"num_attention_heads": 3}, "hidden_size 8 is not a multiple of num_attention_heads 3"),
        ({"vocab_size": "ten"}, 'vocab_size is "ten", not a whole number'),
        ({"vocab_size": float("nan")}, "vocab_size is NaN, not a whole number"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window is -1: a number from 0"),
        ({"num_key_value_heads": 3, "num_attention_heads": 4}, r"not a multiple of 3 key-value heads \(num_key_value"),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false", not true or false'),
        ({"layer_types": ["full_attention"] * 99}, r'layer_types is \["full_attention", .* not a list of 2 layers'),
        ({"sliding_window": 4, "sliding_window_pattern": "LLX"}, 'sliding_window_pattern is "LLX", not a number or'),
    ],
)
def test_impossible_sizes_are_named(changes, text):
    with pytest.raises(WrongModel, match=text):
        read_config({**TINY, **changes})


@cases(
    ("changes", "text"),
    [
        ({"intermediate_size": [16, 32]}, r"intermediate_size is \[16, 32\]: there are no formulas for a size of each"),
        ({"block_configs": [{}, {}]}, r"block_configs is \[\{\}, \{\}\]"),
        ({"layer_types": ["full_attention", "linear_attention"]}, 'layer_types has "linear_attention"'),
    ],
)
def test_other_layers_have_no_formulas(changes, text):
    with pytest.raises(UnknownArchitecture, match=text):
        read_config({**TINY, **changes})


@cases(
    ("changes", "sliding"),
    [
        ({"sliding_window_pattern": "LLLG"}, 6),
        ({"sliding_window_pattern": "L"}, 7),  # the last layer is always global
        ({"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window_pattern": "LLLG"}, 4),
        ({"sliding_window": None, "sliding_window_pattern": "LLLG"}, 0),
    ],
)
def test_patterns_of_windows_are_read(changes, sliding):
    fields = {**TINY, "model_type": "exaone4", "num_hidden_layers": 8, "sliding_window": 4, **changes}

    assert read_config(fields).sliding_layers == sliding


@cases(
    ("kind", "outer", "inner", "tied"),
    [
        ("gemma3", None, False, True),
        ("qwen3_vl", None, True, False),
        ("llava", None, True, True),
        ("llama4", True, None, False),
        ("of_a_repository", True, None, True),
        ("of_a_repository", True, False, False),
    ],
)
def test_embedding_of_a_multimodal_model_is_the_head_as_its_class_reads_it(kind, outer, inner, tied):
    stated = {"model_type": kind, "text_config": dict(TINY)}
    for fields, value in ((stated, outer), (stated["text_config"], inner)):
        if value is not None:
            fields["tie_word_embeddings"] = value

    shape = read_config(stated)

    assert shape.tied is tied
    assert any("a checkpoint may have its own" in note for note in shape.notes) == (kind == "gemma3" and outer is None)


def test_a_refusal_names_the_field_and_its_value_as_written():
    for row in {row.config["model_type"]: row for row in known_models()}.values():
        for field, value in itertools.product(set(row.config) - {"model_type"}, ("x", [8, 8], -3, 0.5, 10**13, {}, 0)):
            try:
                read_config({**row.config, field: value})
            except WrongModel as error:
                assert f"{field} is {json.dumps(value)}" in str(error), (row.name, str(error))


def test_params_json_of_mistral_has_the_same_sizes_as_its_config():
    sizes = {"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8}

    dense = read_config({**sizes, "vocab_size": 32000, "norm_eps": 1e-05})
    routed = read_config({**sizes, "vocab_size": 32000, "moe": {"num_experts": 8, "num_experts_per_tok": 2}})

    assert count_parameters(dense).total == 7_241_732_096  # Mistral 7B
    assert count_parameters(routed).total == 46_702_792_704  # Mixtral 8x7B
    with pytest.raises(UnknownArchitecture, match=r"params\.json with kv_lora_rank"):
        read_config({**sizes, "vocab_size": 32000, "kv_lora_rank": 512})


STEP = MeasuredStep(4_500_000, 0, 16_000_000, 12_000_000, 10_000_000, 42_000_000)


def test_zero_divides_what_an_unknown_model_needs():
    shape = stated_model("new", "newest", 8_000_000, None)

    found = estimate(shape, MemoryPlan(precision="bf16", dp=4, zero=3))
    measured = estimate(shape, MemoryPlan(precision="bf16", optimizer="sgd", dp=4, zero=2), STEP)

    assert [found.part(name).bytes.low for name in ("weights", "gradients", "optimizer states")] == [4e6, 4e6, 8e6]
    assert found.part("activations").bytes == UNKNOWN
    assert [measured.part(name).bytes.expected for name in ("gradients", "activations")] == [3e6, 10e6]
    assert estimate(EIGHT_B, MemoryPlan(), STEP) == estimate(EIGHT_B, MemoryPlan())


def test_measured_activations_take_the_place_of_unknown_ones():
    shape = stated_model("new", "newest", 8_000_000, None)

    found = estimate(shape, MemoryPlan(precision="bf16", optimizer="sgd"), STEP)

    # The gradients are those at the measured peak; the optimizer's step has all of them; cuBLAS has 32 MiB.
    allocated = 16e6 + 12e6 + 10e6 + 32 * 2**20
    assert found.part("activations").bytes == pytest.approx(ByteRange(9.3e6, 10e6, 10.3e6))
    assert (found.part("gradients").bytes.expected, found.part("gradients").largest) == (12e6, 16e6)
    assert found.part("weights").bytes == ByteRange.exact(16e6)
    assert found.part("fragmentation").bytes == pytest.approx(ByteRange(0.0, 0.1 * allocated, 0.3 * allocated))
    assert found.total.high < 1.7e9 and verdict(found.total, 2e9) == FITS
    assert found.part("activations").basis.startswith("measured with fake tensors")


def test_measured_quantized_base_has_the_weights_that_were_built():
    shape = stated_model("new", "newest", 8_000_000, None)
    step = STEP._replace(has_other_kernels=True)

    found = estimate(shape, MemoryPlan(precision="bf16", lora_rank=1, base_bits=4), step)

    assert found.part("weights").bytes.expected == found.part("weights").bytes.high == 4_500_000
    assert found.part("activations").bytes == ByteRange(0, 10e6, 10.3e6)


@pytest.mark.parametrize("outer", [{}, {"tie_word_embeddings": True}])
def test_a_text_config_has_the_defaults_of_transformers(outer):
    config = {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {}, **outer}

    shape = read_config(config)

    # Vicuna 7B, on which LLaVA 1.5 is built: 6,738,415,616 parameters, of which 32000 x 4096 are the head.
    assert count_parameters(shape).total == 6_738_415_616 - (32000 * 4096 if outer else 0)
    assert [note.split(":")[0] for note in shape.notes] == [
        "only the text model",
        "text_config has no vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, "
        "num_key_value_heads",
    ]


@pytest.mark.parametrize("place", [lambda one: one, lambda one: {"model_type": "llava", "text_config": one}])
def test_quantized_weights_have_a_note(place):
    (note,) = read_config(place({**TINY, "quantization_config": {"quant_method": "gptq", "bits": 4}})).notes

    assert note.startswith("the weights are quantized (gptq), which is not read")


@cases("kind", [*architectures(), "newest"][-repeats(6, 100) :])
def test_absurd_fields_are_a_wrong_model_or_a_shape(kind):
    names = ("num_experts", "n_routed_experts", "mlp_only_layers", "sliding_window_pattern", "layer_types", "head_dim")
    names += ("decoder_sparse_step", "moe_layer_freq", "hidden_act", "sliding_window", "kv_lora_rank")
    for name in names:
        for value in ("many", [], {}, -1, 0, 10**30, 1.5, float("inf"), float("nan"), True, [None]):
            try:
                estimate(read_config({**TINY, "model_type": kind, name: value}), MemoryPlan(seq_length=8))
            except (WrongModel, ImpossiblePlan) as error:
                assert str(error)


@cases(
    ("changes", "text"),
    [
        ({"tp": 3}, "tensor parallelism 3 does not divide 32 attention heads"),
        ({"pp": 64}, "pipeline parallelism 64 is above the 32 layers"),
        ({"ep": 2}, "the model has no experts"),
        ({"micro_batch": 0}, "micro-batch is 0"),
        ({"precision": "bf17"}, "precision bf17 is not one of: fp32, bf16"),
        ({"lora_rank": 10**6}, "LoRA rank 1,000,000"),
        ({"sequence_parallel": True}, "sequence parallelism needs tensor parallelism"),
        ({"seq_length": 10**7, "micro_batch": 10**7}, "is not possible"),
    ],
)
def test_contradictory_plans_are_named(changes, text):
    with pytest.raises(ImpossiblePlan, match=text):
        estimate(EIGHT_B, replace(MemoryPlan(), **changes))


def test_the_basis_of_a_part_continues_in_its_column():
    part = f"{'activations':<22} {10.5:>8.2f} {11.54:>9.2f} {11.77:>8.2f}  tensors kept for the backward pass"

    first, second = wrapped(part, 80)

    assert (first, second) == (part.removesuffix(" backward pass"), " " * BASIS_AT + "backward pass")
    assert wrapped("note: " + "a " * 50, 40)[1].startswith("  a")
    assert wrapped(part, 200) == [part]
