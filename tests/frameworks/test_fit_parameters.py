"""The number of parameters of ``effllm fit`` against the modules of transformers, built on the meta device."""

import json
from contextlib import suppress

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from effllm.memory.config_json import architectures, config_tables, known_models, read_config
from effllm.memory.plan import WrongModel
from effllm.memory.states import count_parameters

SIZES = {
    "num_hidden_layers": 5,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 104,
    "vocab_size": 211,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8}
LATENT |= {"num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 2}
LATENT |= {"n_group": 1, "topk_group": 1, "num_key_value_heads": 6}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
#: Multimodal models, and the kind of their text model.
MULTIMODAL = {
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "llama4": "llama4_text",
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "llava": "llama",
}
FAMILIES = architectures()
NOT_PLAIN = {"kimi_k2", "gpt2", "opt", "deepseek_v2", "hunyuan_v1_dense"}  # below with sizes of their own
VARIANTS = [
    *((kind, {}) for kind in FAMILIES if kind not in {*NOT_PLAIN, *(one for one in FAMILIES if "_vl" in one)}),
    *((kind, {"tie_word_embeddings": tied}) for kind in ("llama", "gemma", "gpt_neox") for tied in (True, False)),
    *((kind, {"attention_bias": True}) for kind in ("llama", "qwen3", "gemma2", "deepseek_v3", "olmo2", "gpt_neox")),
    *((kind, {"head_dim": 20}) for kind in ("llama", "mistral", "qwen3", "gemma3_text", "mixtral")),
    ("llama", {"mlp_bias": True}),
    ("gpt2", {"n_positions": 32}),
    ("gpt2", {"n_inner": 100}),
    ("opt", {"ffn_dim": 104, "word_embed_proj_dim": 48}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 28}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
    ("qwen2_moe", {**ROUTED, "shared_expert_intermediate_size": 36, "decoder_sparse_step": 2}),
    ("qwen3_moe", {**ROUTED, "mlp_only_layers": [1, 3]}),
    ("cohere", {"use_qk_norm": True}),
    ("stablelm", {"use_qkv_bias": True}),
    ("starcoder2", {"use_bias": False}),
    ("falcon", {"ffn_hidden_size": 104}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    ("glm4_moe", {**ROUTED, "n_routed_experts": 8, "first_k_dense_replace": 1, "use_qk_norm": True}),
    ("llama4_text", {**ROUTED, "num_local_experts": 8, "intermediate_size_mlp": 72, "interleave_moe_layer_step": 2}),
    ("granitemoe", {"num_local_experts": 4, "attention_bias": True}),
    ("hunyuan_v1_dense", {"head_dim": 8}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True}),
    ("ernie4_5", {"use_bias": True}),
]


def parameters_on_meta(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize(("kind", "changes"), VARIANTS, ids=lambda value: str(value)[:40])
def test_parameters_of_each_architecture_are_exact(kind, changes):
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})

    shape = read_config(config.to_dict())

    assert count_parameters(shape).total == parameters_on_meta(config)


@pytest.mark.parametrize("row", [one for one in known_models() if one.config["model_type"] != "kimi_k2"], ids=str)
def test_parameters_of_known_models_are_those_of_transformers(row):
    fields = {key: value for key, value in row.config.items() if key != "model_type"}
    config = AutoConfig.for_model(row.config["model_type"], **fields)

    assert count_parameters(row.shape).total == parameters_on_meta(config)


@pytest.mark.parametrize("kind", MULTIMODAL)
@pytest.mark.parametrize("is_tied", [False, True])
def test_parameters_of_text_models_are_exact(kind, is_tied):
    sizes = {**SIZES, "model_type": MULTIMODAL[kind], "head_dim": 8, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, text_config=sizes, tie_word_embeddings=is_tied)
    config.text_config.tie_word_embeddings = is_tied
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    named = model.named_parameters()
    expected = sum(one.numel() for name, one in named if "language_model" in name or name.startswith("lm_head"))

    shape = read_config(config.to_dict())

    assert count_parameters(shape).total == expected
    assert "only the text model: the parameters of vision_config are not counted" in shape.notes


@pytest.mark.parametrize("kind", config_tables()["text_defaults"])
def test_defaults_of_text_models_are_those_of_transformers(kind):
    stated = AutoConfig.for_model(kind).to_dict()

    assert config_tables()["text_defaults"][kind] == {
        name: stated[name] for name in config_tables()["text_defaults"][kind]
    }


def test_formulas_give_the_parameters_of_each_text_model_of_transformers_or_none():
    exact = 0
    for config_class, build in transformers.MODEL_FOR_CAUSAL_LM_MAPPING.items():
        try:
            config = config_class()
            with torch.device("meta"):
                expected = sum(one.numel() for one in build(config).parameters())
        except Exception:  # noqa: BLE001 - the defaults of a few classes are not a model
            continue
        fields = json.loads(config.to_json_string(use_diff=False))
        with suppress(WrongModel):  # also an unknown architecture
            if not {"text_config", "vision_config", "audio_config"} & set(fields):
                assert count_parameters(read_config(fields)).total == expected, config_class.__name__
                exact += 1
    assert exact > 30
