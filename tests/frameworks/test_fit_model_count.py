"""Parameters of models of any architecture, counted in the models that transformers builds."""

import itertools
import json

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from typer.testing import CliRunner

from effllm.commands.app import app
from effllm.config import isolated
from effllm.config.isolated import NoAnswer
from effllm.memory import model_count
from effllm.memory.config_json import read_config
from effllm.memory.model_count import count_model, tensors_of
from effllm.memory.states import count_parameters

#: Of published models; the numbers are those of their pages, and of transformers on the meta device.
ERNIE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "hidden_size": 2560,
    "intermediate_size": 12288, "moe_capacity": [64, 64, 64], "moe_intermediate_size": 1536, "moe_k": 6,
    "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
    "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4, "tie_word_embeddings": True,
    "use_bias": False, "vocab_size": 103424,
}  # fmt: skip
ERNIE_PARAMETERS = 21_825_437_888


def fit(tmp_path, fields, *arguments):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return CliRunner().invoke(app, ["fit", str(tmp_path / "config.json"), *arguments])


def test_model_that_no_formula_knows_does_not_fit_a_gpu_that_is_too_small(tmp_path):
    done = fit(tmp_path, ERNIE, "--mode", "inference", "--gpu", "rtx4090", "--json")

    [model] = json.loads(done.stdout)["models"]
    assert (done.exit_code, model["inference"]["verdict"]) == (1, "does not fit")
    assert model["parameters"] == ERNIE_PARAMETERS
    assert 2.9e9 < model["active_parameters"] < 3.5e9  # "3B" in the name of the model
    assert model["inference"]["parts"]["weights"]["low"] == 2 * ERNIE_PARAMETERS


def test_known_architecture_is_counted_with_the_same_number(tmp_path):
    fields = transformers.LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4).to_dict()

    done = fit(tmp_path, {**fields, "architectures": ["LlamaForCausalLM"]}, "--json")

    [model] = json.loads(done.stdout)["models"]
    assert any("parameters counted in LlamaForCausalLM" in note for note in model["notes"])
    assert model["has_known_layers"] and model["training"]["total"]["high"] is not None


def test_parts_that_the_formulas_leave_out_are_counted(tmp_path):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    vision = {"depth": 2, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "out_hidden_size": 64}
    text = {**sizes, "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = transformers.Qwen2VLForConditionalGeneration(config)
    stated = {**config.to_dict(), "architectures": ["Qwen2VLForConditionalGeneration"]}

    [found] = json.loads(fit(tmp_path, stated, "--json").stdout)["models"]

    assert found["parameters"] == sum(one.numel() for one in model.parameters())
    assert not any(note.startswith("only the text model") for note in found["notes"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["NewestForCausalLM"]}, "has no model NewestForCausalLM"),
        ({"architectures": ["AutoModelForCausalLM"]}, "has no model AutoModelForCausalLM"),
        ({"architectures": None}, "no architectures"),
        ({"moe_k": "many", "hidden_size": "wide"}, "Error"),
        ({"hidden_size": 10**9, "intermediate_size": 10**12}, "Error"),
    ],
)
def test_model_that_cannot_be_built_is_refused_with_the_reason(tmp_path, changes, reason):
    done = fit(tmp_path, {**ERNIE, **changes})

    assert (done.exit_code, done.stdout) == (3, "")
    assert "unknown architecture (model_type ernie4_5_moe), and " in done.stderr and reason in done.stderr
    assert done.stderr.endswith("give --params N\n") and len(done.stderr.splitlines()) == 1


def test_building_ends_at_the_deadline(monkeypatch):
    monkeypatch.setattr(model_count, "DEADLINE_S", 0.5)

    with pytest.raises(NoAnswer, match="did not build the model in 0 s"):
        count_model({**ERNIE, "num_hidden_layers": 9_000}, "slow")


def test_building_ends_at_the_limit_of_memory(monkeypatch):
    monkeypatch.setattr(isolated, "MAX_MEMORY_BYTES", 200 * 2**20)

    with pytest.raises(NoAnswer):
        count_model(ERNIE, "large")


def test_no_code_of_a_repository_is_run_and_nothing_is_downloaded(tmp_path, monkeypatch):
    (tmp_path / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    evil = {"auto_map": {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}}
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)

    shape = count_model({**ERNIE, **evil, "_name_or_path": "absent/nothing"}, "evil")

    assert count_parameters(shape).total == ERNIE_PARAMETERS
    assert [path.name for path in tmp_path.iterdir()] == ["modeling_evil.py"]


def test_layers_that_transformers_leaves_out_are_listed():
    shape = count_model({**ERNIE, "num_nextn_predict_layers": 1}, "mtp")

    assert "num_nextn_predict_layers is 1: transformers builds no such layers" in shape.notes


def small_models():
    """Yield each model of a causal language model that can be built with small sizes."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 211}
    for config_class, build in transformers.MODEL_FOR_CAUSAL_LM_MAPPING.items():
        try:
            config = config_class(**sizes)
            with torch.device("meta"):
                yield build(config)
        except Exception:  # noqa: BLE001 - sizes that one of the classes does not accept
            continue


def test_tensors_of_each_model_of_transformers_have_all_of_its_parameters():
    checked = 0
    for model in small_models():
        counted = sum(one.elements * one.count for one in tensors_of(model))
        assert counted == sum(one.numel() for one in model.parameters()), type(model).__name__
        checked += 1
    assert checked > 80


def test_infinity_in_a_config_of_transformers_5_is_read():
    config = transformers.Mamba2Config(num_hidden_layers=2, hidden_size=64, num_heads=4, head_dim=32, state_size=16)
    stated = json.loads(config.to_json_string(use_diff=False))
    with torch.device("meta"):
        expected = sum(one.numel() for one in transformers.Mamba2ForCausalLM(config).parameters())

    shape = count_model({**stated, "architectures": ["Mamba2ForCausalLM"]}, "mamba2")

    assert stated["time_step_limit"][1] == {"__float__": "Infinity"}
    assert count_parameters(shape).total == expected


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen2_vl", "qwen3_vl", "paligemma", "llama4"])
def test_embedding_of_a_multimodal_model_is_the_head_as_transformers_builds_it(kind):
    """Each combination of tie_word_embeddings, in the outer config and in that of the text model."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "num_local_experts": 2}
    build = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[CONFIG_MAPPING[kind]]
    usual = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    for outer, inner in itertools.product((None, False, True), repeat=2):
        text = {**usual["text_config"], **sizes, "tie_word_embeddings": inner}
        for name in ("layer_types", "moe_layers", "no_rope_layers"):
            text.pop(name, None)
        stated = {**usual, "text_config": text, "tie_word_embeddings": outer}
        for fields in (stated, text):
            if fields["tie_word_embeddings"] is None:
                del fields["tie_word_embeddings"]
        with torch.device("meta"):
            model = build(CONFIG_MAPPING[kind].from_dict(stated))

        is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert read_config(stated).tied is is_tied, (outer, inner)
