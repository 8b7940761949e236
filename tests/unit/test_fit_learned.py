"""Corrections by the measured peaks of earlier runs: the statistics, the plans of runs, and the command."""

import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from effllm.commands.app import app
from effllm.hooks._megatron_plan import plan_of_arguments
from effllm.memory.config_json import read_config
from effllm.memory.estimate import estimate
from effllm.memory.known_models import find_model
from effllm.memory.learned import MeasuredPeak, corrected, learn, student_95
from effllm.memory.plan import INFERENCE, MemoryPlan
from effllm.memory.recorded_plan import UnknownPlan, recorded_plan

SHAPE = find_model("smollm2-135m").shape
PARAMETERS = 134_515_008
PLAN = "precision=bf16-mixed optimizer=adamw checkpointing=none micro_batch=1 seq_length="


def peaks(*ratios):
    """Return a peak for each ratio, of plans with different lengths."""
    found = [estimate(SHAPE, MemoryPlan(seq_length=256 * (index + 1))) for index in range(len(ratios))]
    return [MeasuredPeak(one, one.allocated.expected * ratio) for one, ratio in zip(found, ratios, strict=True)]


def test_allocated_memory_is_the_total_without_context_and_fragmentation():
    found = estimate(SHAPE, MemoryPlan())
    rest = found.part("CUDA context").bytes.expected + found.part("fragmentation").bytes.expected

    assert found.allocated.expected == pytest.approx(found.total.expected - rest)
    assert found.reserved.expected == pytest.approx(found.total.expected - found.part("CUDA context").bytes.expected)


def test_allocated_memory_has_the_buckets_but_not_the_buffers_of_nccl():
    found = estimate(SHAPE, MemoryPlan(dp=2))
    outside = ("CUDA context", "fragmentation", "communication buffers")
    inside = sum(part.bytes.expected for part in found.parts if part.name not in outside)

    # The buckets of DDP are as large as the gradients, which are in 32 bits.
    assert found.allocated.expected == pytest.approx(inside + 4 * PARAMETERS)


def test_correction_is_calculated_by_hand():
    """Ratios 1, 1.1 and 1.21: the median is 1.1; each one from the median of the other two, in steps of log 1.1."""
    step = math.log(1.1)
    found = learn(peaks(1.0, 1.1, 1.21))

    assert found.ratio == pytest.approx(1.1)
    assert found.errors == pytest.approx((-1.5 * step, 0.0, 1.5 * step))
    assert found.half_width == pytest.approx(2.920 * step * math.sqrt((2.25 + 0 + 2.25) / 3))


def test_corrected_total_has_the_ratio_and_the_interval():
    before = estimate(SHAPE, MemoryPlan())
    found = learn(peaks(1.0, 1.1, 1.21))

    after = corrected(before, found)

    assert after.allocated.expected == pytest.approx(1.1 * before.allocated.expected)
    assert after.allocated.high == pytest.approx(after.allocated.expected * math.exp(found.half_width))
    rest = before.total.expected - before.allocated.expected
    assert after.total.expected == pytest.approx(after.allocated.expected + rest)
    assert after.total.low < after.total.expected < after.total.high


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_than_three_plans_change_nothing(count):
    before = estimate(SHAPE, MemoryPlan())
    found = learn(peaks(*[1.2] * count))

    assert (found.runs, len(found.ratios), found.ratio) == (count, count, None)
    assert corrected(before, found) is before


def test_runs_of_the_same_plan_count_once_with_their_largest_peak():
    [one] = peaks(1.0)

    found = learn([one, replace(one, measured=1.3 * one.measured), one])

    assert (found.runs, found.ratio) == (3, None)
    assert found.ratios == pytest.approx((1.3,))


def test_equal_ratios_keep_an_interval_of_two_percent():
    assert learn(peaks(1.05, 1.05, 1.05, 1.05)).half_width == pytest.approx(math.log(1.02))


def test_one_outlier_moves_the_interval_and_not_the_ratio():
    found = learn(peaks(1.0, 1.0, 1.0, 1.0, 3.0))

    assert found.ratio == pytest.approx(1.0)
    assert found.half_width == pytest.approx(student_95(4) * math.log(3) / math.sqrt(5))


@pytest.mark.parametrize("count", [3, 5, 9, 20])
def test_interval_covers_about_nine_of_ten_new_runs(count):
    """Ratios with a spread of 10 %: 2,000 draws of runs and one new run each."""
    chance, draws = random.Random(count), 2000
    base = peaks(*[1.0] * count)
    covered = 0
    for _ in range(draws):
        found = learn([replace(one, measured=one.measured * math.exp(chance.gauss(0, 0.1))) for one in base])
        covered += abs(chance.gauss(0, 0.1) - math.log(found.ratio)) <= found.half_width

    assert 0.85 <= covered / draws <= 0.96


def test_inference_and_upper_bounds_are_not_corrected():
    found = learn(peaks(1.2, 1.2, 1.2))
    serving = estimate(SHAPE, MemoryPlan(mode=INFERENCE, precision="bf16"))
    unknown = estimate(replace(SHAPE, is_upper_bound=True), MemoryPlan())

    assert corrected(serving, found) is serving
    assert corrected(unknown, found) is unknown


# --- plans of runs -------------------------------------------------------------------------------


def test_declared_plan_is_read():
    plan = recorded_plan({"memory_plan": PLAN + "4096 dp=8 zero=3 sequence_parallel=false"})

    assert plan == MemoryPlan(seq_length=4096, dp=8, zero=3)


def test_script_changes_words_of_the_framework_plan():
    facts = {"framework_plan": PLAN + "512 dp=2", "memory_plan": "checkpointing=full dp=4"}

    assert recorded_plan(facts) == MemoryPlan(checkpointing="full", seq_length=512, dp=4)


def test_length_is_that_of_the_largest_micro_batch():
    words = PLAN.replace("micro_batch=1 seq_length=", "micro_batch=3")

    assert recorded_plan({"framework_plan": words}, positions=1000.0).seq_length == 334
    assert recorded_plan({"framework_plan": words, "memory_plan": "seq_length=9"}, positions=1000.0).seq_length == 9
    for positions in (None, 0.0):
        with pytest.raises(UnknownPlan, match="no seq_length"):
            recorded_plan({"framework_plan": words}, positions)


ARGUMENTS = {
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "data_parallel_size": 4, "sequence_parallel": True, "use_distributed_optimizer": True, "micro_batch_size": 2,
    "global_batch_size": 64, "seq_length": 4096, "bf16": True, "optimizer": "adam", "recompute_granularity": "full",
    "recompute_method": "uniform", "recompute_num_layers": 1, "expert_model_parallel_size": 2, "num_experts": None,
}  # fmt: skip


def of_megatron(**changes):
    return recorded_plan({"framework_plan": plan_of_arguments(SimpleNamespace(**{**ARGUMENTS, **changes}))})


def test_plan_of_megatron_follows_from_its_arguments():
    plan = MemoryPlan(
        implementation="megatron", precision="bf16-master", checkpointing="full", seq_length=4096, micro_batch=2,
        accumulation=8, tp=2, dp=4, zero=1, sequence_parallel=True, attention="flash",
    )  # fmt: skip

    assert of_megatron() == plan
    assert of_megatron(recompute_granularity="selective") == replace(plan, checkpointing="selective")
    assert of_megatron(num_experts=8) == replace(plan, ep=2)
    assert of_megatron(transformer_impl="local") == replace(plan, attention="eager")


@pytest.mark.parametrize(
    "changes",
    [
        {"fp8": "hybrid"}, {"optimizer": "dist_muon"}, {"virtual_pipeline_model_parallel_size": 2},
        {"accumulate_allreduce_grads_in_fp32": False}, {"recompute_method": "block"}, {"recompute_num_layers": 4},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, {"optimizer_cpu_offload": True},
    ],
)  # fmt: skip
def test_settings_of_megatron_without_a_formula_are_unknown(changes):
    with pytest.raises(UnknownPlan):
        of_megatron(**changes)


@pytest.mark.parametrize(
    "text", ["", "precision=bf16", PLAN, PLAN + "4k", PLAN + "²", PLAN + "9 mode=inference", PLAN + "9 zero=-1", "x=1"]
)
def test_incomplete_and_wrong_plans_are_unknown(text):
    with pytest.raises(UnknownPlan):
        recorded_plan({"memory_plan": text})


def test_facts_of_other_frameworks_are_no_plan():
    with pytest.raises(UnknownPlan):
        recorded_plan({"framework": "transformers", "precision": "bf16", "per_device_batch_size": 8})


# --- run folders ---------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    def write(name, length, ratio, *, plan=None, peak=True, **summary):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        most = ratio * estimate(SHAPE, MemoryPlan(seq_length=length)).allocated.expected
        values = {"allocator/steps_peak_bytes": {"count": 3, "most": most}} if peak else {}
        known = {"schema_version": 4, "model": "SmolLM2-135M", "parameters": PARAMETERS, "parameters_kind": "total"}
        (folder / "summary.json").write_text(json.dumps({**known, "instruments": values, **summary}))
        facts = {"memory_plan": f"{PLAN}{length}" if plan is None else plan}
        (folder / "run.json").write_text(json.dumps({"schema_version": 4, "run_id": name, **facts}))
        return folder

    return write


def fit(*arguments):
    """Run the command with a named GPU: without one, it looks for GPUs of this machine."""
    return CliRunner().invoke(app, ["fit", *map(str, arguments), "--gpu", "h100-80gb"])


def test_command_corrects_the_total_and_prints_the_error(run, tmp_path):
    for index, ratio in enumerate((1.0, 1.1, 1.21)):
        run(f"run{index}", 256 * (index + 1), ratio)

    done = fit("smollm2-135m", "--mode", "training", "--runs", tmp_path / "runs")

    assert done.exit_code == 0
    assert (
        "measured peaks: 3 runs of 3 plans of this family, measured / estimated 1.100, 90 % interval 0.782 to 1.547"
        in done.stdout
    )
    assert "leave-one-out error: median 13.3 %, largest 15.4 %" in done.stdout
    assert "total without these peaks: " in done.stdout
    assert "the total is corrected by measured peaks, the parts are not" in done.stdout
    assert "foreach" not in done.stdout


def test_json_has_the_ratios_and_both_totals(run, tmp_path):
    for index, ratio in enumerate((1.0, 1.1, 1.21)):
        run(f"run{index}", 256 * (index + 1), ratio)
    command = ("smollm2-135m", "--mode", "training", "--json")

    [plain] = json.loads(fit(*command).stdout)["models"]
    [model] = json.loads(fit(*command, "--runs", tmp_path / "runs").stdout)["models"]

    assert plain["learned"] is None
    assert (plain["training"]["is_corrected"], model["training"]["is_corrected"]) == (False, True)
    assert model["learned"]["ratios"] == pytest.approx([1.0, 1.1, 1.21])
    assert model["learned"]["total_before"] == plain["training"]["total"]
    assert model["training"]["total"]["expected"] > plain["training"]["total"]["expected"]


def test_left_out_runs_are_counted_by_reason(run, tmp_path):
    run("good", 512, 1.2)
    run("unknown", 512, 1.2, plan="")
    run("impossible", 512, 1.2, plan=PLAN + "512 tp=7")
    run("other", 512, 1.2, parameters=7_000_000)
    run("cpu", 512, 1.2, peak=False)
    run("simulated", 512, 1.2, simulated=True)

    lines = fit("smollm2-135m", "--mode", "training", "--runs", tmp_path / "runs").stdout.splitlines()

    [found] = [line for line in lines if line.startswith("measured peaks: ")]
    assert found.endswith("1 run of 1 plan of this family: measured / estimated 1.200; at least 3 plans are needed, "
                          "nothing is corrected")  # fmt: skip
    assert [line for line in lines if line.startswith("runs left out")] == [
        "runs left out: 1 with an impossible plan, 1 with no known model, 1 with no known plan, "
        "1 with no peak of torch's allocator, 1 with simulated GPUs"
    ]


def test_adapters_are_parameters_of_the_run(run, tmp_path):
    """Adapters of rank 64 are 15 % of SmolLM2-135M: 30 layers, 64 (m + n) elements for each matrix of m x n."""
    sizes = 2 * (576 + 576) + 2 * (192 + 576) + 3 * (576 + 1536)
    words = f"{PLAN}512 lora_rank=64"
    run("adapters", 512, 1.0, plan=words, parameters=PARAMETERS + 30 * 64 * sizes)
    run("none", 512, 1.0, plan=words)

    lines = fit("smollm2-135m", "--mode", "training", "--lora", 64, "--runs", tmp_path / "runs").stdout.splitlines()

    assert "measured peaks: 1 run of 1 plan of this family" in next(one for one in lines if "measured peaks" in one)
    assert "runs left out: 1 with no known model" in lines


def test_runs_of_another_family_correct_nothing(run, tmp_path):
    for index in range(3):
        run(f"run{index}", 256 * (index + 1), 1.5)

    done = fit("qwen3-0.6b", "--mode", "training", "--runs", tmp_path / "runs")

    assert "measured peaks: 0 runs of 0 plans of this family; at least 3 plans are needed" in done.stdout


def test_lines_of_a_ledger_name_the_run_folders(run, tmp_path):
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    folders = [run(f"run{index}", 256 * (index + 1), 1.1) for index in range(3)]
    lines = [json.dumps({"run_id": one.name, "folder": str(one)}) for one in [*folders, tmp_path / "removed"]]
    (ledger / "alice.jsonl").write_text("\n".join(lines))

    done = fit("smollm2-135m", "--mode", "training", "--runs", ledger)

    assert "3 runs of 3 plans of this family, measured / estimated 1.100" in done.stdout
    assert "runs left out: 1 with no readable summary.json" in done.stdout


def test_lines_of_a_ledger_have_the_peaks_of_removed_folders(run, tmp_path):
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    known = {"model": "SmolLM2-135M", "parameters": PARAMETERS, "memory_plan": PLAN.removesuffix(" seq_length=")}
    lines = [
        {"run_id": "old", "folder": str(tmp_path / "old")},
        {"run_id": "kept", "folder": str(run("kept", 512, 1.1))},
    ]
    for length in (256, 1024):
        peak = 1.1 * estimate(SHAPE, MemoryPlan(seq_length=length)).allocated.expected
        folder = str(tmp_path / "removed") if length == 256 else None
        lines.append(
            {"run_id": f"run{length}", "folder": folder, "peak_bytes": peak, "peak_positions": length, **known}
        )
    lines += [{**lines[-1], "run_id": "simulated", "simulated": True}, {**lines[-1], "run_id": "0", "peak_bytes": 0.0}]
    (ledger / "alice.jsonl").write_text("\n".join(map(json.dumps, lines)))

    done = fit("smollm2-135m", "--mode", "training", "--runs", ledger)

    assert "3 runs of 3 plans of this family, measured / estimated 1.100" in done.stdout
    left_out = "1 with no peak of torch's allocator, 1 with no readable summary.json, 1 with simulated GPUs"
    assert f"runs left out: {left_out}" in done.stdout


def test_path_without_runs_is_an_error(tmp_path):
    done = fit("smollm2-135m", "--runs", tmp_path)

    assert done.exit_code == 2


def test_peaks_of_wrong_types_are_no_peaks(run, tmp_path):
    for index, value in enumerate(("72 GB", True, -1.0, None, [])):
        run(f"run{index}", 512, 1.0, instruments={"allocator/steps_peak_bytes": {"most": value}})

    done = fit("smollm2-135m", "--mode", "training", "--runs", tmp_path / "runs")

    assert "runs left out: 5 with no peak of torch's allocator" in done.stdout


def test_model_of_a_config_is_recognized_by_its_parameters(tmp_path, run):
    fields = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    fields |= {"intermediate_size": 16, "vocab_size": 10}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(fields))
    shape = read_config(fields)
    for index in range(3):
        most = 1.1 * estimate(shape, MemoryPlan(seq_length=256 * (index + 1))).allocated.expected
        values = {"allocator/steps_peak_bytes": {"most": most}}
        parameters = 2 * 10 * 8 + 2 * (4 * 64 + 3 * 128 + 16) + 8
        run(f"run{index}", 256 * (index + 1), 1.0, model="Mine", parameters=parameters, instruments=values)

    done = fit(config, "--mode", "training", "--runs", tmp_path / "runs")

    assert "3 runs of 3 plans of this family, measured / estimated 1.100" in done.stdout
