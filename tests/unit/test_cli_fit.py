"""``effllm fit``: tables, JSON, exit status and wrong use."""

import json

import pytest
from cases import cases
from typer.testing import CliRunner

from effllm.commands import fit_sources
from effllm.commands.app import app


@pytest.fixture(autouse=True)
def _without_transformers(monkeypatch):
    monkeypatch.setattr(fit_sources, "can_count", lambda: False)


def fit(*arguments):
    return CliRunner().invoke(app, ["fit", *arguments])


@pytest.fixture
def config(tmp_path):
    fields = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    fields |= {"intermediate_size": 16, "vocab_size": 10}
    (tmp_path / "tiny").mkdir()
    path = tmp_path / "tiny" / "config.json"

    def write(**changes):
        path.write_text(json.dumps({**fields, **changes}))
        return path

    write()
    write.path = path
    return write


def test_two_tables_and_the_parts_of_the_training_are_printed():
    done = fit("deepseek-math-7b", "deepseek-v3", "--gpu", "t4")

    lines = done.stdout.splitlines()
    assert done.exit_code == 1
    assert "Model Memory Requirements" in lines[0]
    assert [line for line in lines if line.startswith("deepseek-math-7b  ") and "6,910,365,696" in line]
    assert [line for line in lines if "of these active" in line and "memory needs all parameters" in line]
    assert [line for line in lines if line.startswith("deepseek-math-7b (training)") and line.endswith("does not fit")]
    assert [line for line in lines if line.startswith("optimizer states")]
    assert "dominant: " in done.stdout


def test_json_has_exact_parameters_and_ranges_of_all_parts():
    done = fit("llama-3.1-8b", "--gpu", "h100-80gb", "--json")

    [model] = json.loads(done.stdout)["models"]
    assert model["parameters"] == 8_030_261_248
    training = model["training"]
    assert training["verdict"] == "does not fit"
    assert training["parts"]["optimizer_states"]["expected"] == 8 * 8_030_261_248
    for part in (*training["parts"].values(), training["total"]):
        assert part["low"] <= part["expected"] <= part["high"]
    parts = sum(part["expected"] for part in training["parts"].values())
    assert training["total"]["expected"] == pytest.approx(parts, abs=len(training["parts"]))
    assert model["changes"]


@pytest.mark.parametrize("of", ["config.json", "folder"])
def test_a_config_and_its_folder_are_the_same_model(config, of):
    done = fit(str(config.path if of == "config.json" else config.path.parent), "--json")

    [model] = json.loads(done.stdout)["models"]
    assert (done.exit_code, model["name"], model["parameters"]) == (0, "tiny", 2 * 80 + 2 * (256 + 384 + 16) + 8)
    assert model["training"]["verdict"] is None


def test_an_option_of_a_change_makes_the_plan_fit():
    done = fit("llama-3.1-8b", "--gpu", "h100-80gb", "--json")
    [model] = json.loads(done.stdout)["models"]

    again = fit("llama-3.1-8b", "--gpu", "h100-80gb", *model["changes"][0]["options"].split(), "--json")

    [changed] = json.loads(again.stdout)["models"]
    assert again.exit_code == 0
    assert changed["training"]["total"] == model["changes"][0]["total"]


def test_gpus_without_a_layout_are_data_parallel():
    done = fit("llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "8", "--tp", "2", "--fsdp", "--json")

    document = json.loads(done.stdout)
    plan = document["models"][0]["training"]["plan"]
    assert (plan["tp"], plan["dp"], plan["zero"], document["gpu"]["count"]) == (2, 4, 3, 8)


def test_accelerate_yaml_and_script_give_the_plan(tmp_path):
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nnum_processes: 4\nmixed_precision: bf16\n")
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --bf16 "
        "--seq-length 32 --max-position-embeddings 32 --vocab-size 100 --global-batch-size 64 --micro-batch-size 2 "
        "--tensor-model-parallel-size 2"
    )

    sharded = json.loads(fit("qwen3-8b", str(tmp_path / "fsdp.yaml"), "--json").stdout)["models"]
    [script] = json.loads(fit(str(tmp_path / "run.sh"), "--json").stdout)["models"]

    plans = [sharded[0]["training"]["plan"], script["training"]["plan"]]
    assert [(one["zero"], one["dp"], one["tp"], one["accumulation"]) for one in plans] == [(3, 4, 1, 1), (0, 4, 2, 8)]
    assert "has only settings" in fit(str(tmp_path / "fsdp.yaml")).stderr


@cases(
    ("arguments", "text"),
    [
        (("llama-3.1-8b", "--gpu", "h300"), "the table has no GPU h300"),
        (("llama-3.1-8b", "--gpus", "6", "--tp", "4"), "does not divide 6 GPUs"),
        (("llama-3.1-8b", "--tp", "2", "--dp", "2", "--gpus", "8"), "but --gpus is 8"),
        (("llama-3.1-8b", "--measure", "--tp", "2"), "--measure is for one rank"),
        (("llama-3.1-8b", "--measure", "--optimizer", "muon"), "--measure has the optimizers adamw"),
        (("llama-3.1-8b", "--mode", "both"), "both is not training or inference"),
        (("llama-3.1-8b", "--fsdp", "--zero", "1"), "--fsdp is --zero 3"),
        (("llama-3.1-8b", "--lora-targets", "qv"), "--lora-targets needs --lora RANK"),
        (("deepseek-v3", "--ep", "16", "--gpus", "8"), "above the 8 ranks of a pipeline stage: give more GPUs"),
        (("llama-3.1-8b", "--measure", "--mode", "inference"), "not with --mode inference"),
    ],
)
def test_wrong_use_is_named_in_one_line(arguments, text):
    done = fit(*arguments)

    assert (done.exit_code, done.stdout) == (2, "")
    assert text in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (("--zero", "3"), "ZeRO 3 divides nothing with one rank of data parallelism: give --gpus N"),
        (("--mode", "inference", "--lora", "8", "--zero", "3"), "no effect on inference: --lora, --zero"),
    ],
)
def test_settings_without_an_effect_have_a_note(arguments, note):
    [model] = json.loads(fit("llama-3.1-8b", *arguments, "--json").stdout)["models"]

    assert model["notes"] == [note]


def test_a_script_without_a_vocabulary_needs_the_option(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32")

    assert "give --vocab-size N" in fit(str(path)).stderr
    assert fit(str(path), "--vocab-size", "100").exit_code == 0


@pytest.mark.parametrize("content", ["", '{"hidden_size": 1e999}', '{"a": ' * 2000])
def test_a_file_that_is_not_a_config_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)

    done = fit(str(path))

    assert (done.exit_code, done.stdout) == (2, "")
    assert str(path) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_without_a_config_is_refused(tmp_path):
    assert "a folder without a config.json" in fit(str(tmp_path)).stderr


def test_an_unknown_architecture_is_refused_with_the_remedy(config):
    done = fit(str(config(model_type="newest")), "--gpu", "b300")

    assert (done.exit_code, done.stdout) == (3, "")
    remedy = "pip install 'effllm[fit]' counts its parameters, or give --params N"
    assert done.stderr == f"effllm fit: unknown architecture (model_type newest): {remedy}\n"


@pytest.mark.parametrize(("gpu", "status", "word"), [("t4", 1, "does not fit"), ("b300", 3, "unclear")])
def test_stated_parameters_never_fit_because_activations_are_unknown(config, gpu, status, word):
    path = str(config(model_type="newest"))

    done = fit(path, "--gpu", gpu, "--params", "7e9", "--active-params", "1B", "--json", "--precision", "bf16")

    [model] = json.loads(done.stdout)["models"]
    assert (done.exit_code, model["training"]["verdict"]) == (status, word)
    assert (model["parameters"], model["active_parameters"]) == (7_000_000_000, 1_000_000_000)
    parts = model["training"]["parts"]
    assert [parts[name]["low"] for name in ("weights", "gradients", "optimizer_states")] == [14e9, 14e9, 28e9]
    assert parts["activations"]["high"] is model["training"]["total"]["expected"] is None
    assert model["training"]["total"]["low"] > 56e9
    assert model["changes"] == []


@pytest.mark.parametrize("text", ["many", "0", "-7B", "1e99", "B"])
def test_wrong_number_of_parameters_is_named(config, text):
    done = fit(str(config.path), "--params", text)

    assert (done.exit_code, f"{text} is not a number of parameters" in done.stderr) == (2, True)


def test_layout_of_an_unknown_architecture_is_refused(config):
    done = fit(str(config(model_type="newest")), "--params", "7B", "--gpus", "8", "--tp", "2")

    assert done.exit_code == 2
    assert "TP: it is not known how newest is divided" in done.stderr


def test_a_model_too_large_for_every_change_has_no_changes(config):
    path = config(num_hidden_layers=100, hidden_size=65536, num_attention_heads=1, intermediate_size=262144)

    done = fit(str(path), "--gpu", "b300")

    assert done.exit_code == 1
    assert "no combination of up to three changes makes it fit" in done.stdout
