"""Megatron's training loop, attached only by environment variables; expected counts are computed by hand.

The loops are fakes with the arguments and results of ``megatron.training.training`` in five eras (ranges of
versions). The process groups, the micro-batch calculator and the iterators are megatron-core's own.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from megatron_eras.eras import CHANGES, NEW, OLD, text

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("megatron") is None:
    pytest.skip("torch and megatron-core are not installed", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.system("megatron-lm", how="stand-in")]

ERAS = Path(__file__).parents[1] / "megatron_eras"
MODEL, LENGTH = 144, 32
FIRST_LINES = "from {module} import pretrain\npretrain({arguments})\n"


@pytest.fixture
def train(launch, tmp_path, monkeypatch):
    """Return a function that starts the fake of an era with a script like a user's script."""

    def start(era, *, module="megatron.training", edit=str, script=FIRST_LINES, ranks=1, attach=1, **arguments):
        settings = {name: arguments.pop(name) for name in ("log_interval", "peak_tflops") if name in arguments}
        package = tmp_path / "tree" / module.replace(".", "/")
        package.mkdir(parents=True)
        code = edit(text(era))
        if module == "megatron.training":
            (package / "__init__.py").write_text("from .training import pretrain\n")
            (package / "training.py").write_text(code)
        else:
            package.with_suffix(".py").write_text(code)
            (package.parent / "__init__.py").touch()
            package.rmdir()
        given = "None, None, 'model type', None" if era != NEW else "'container', None, 'model type', None"
        job = tmp_path / "pretrain.py"
        job.write_text(script.format(module=module, arguments=given))
        environ = {"PYTHONPATH": f"{package.parents[len(module.split('.')) - 1]}:{ERAS}"}
        if ranks > 1:
            torchrun = ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", str(ranks)]
            monkeypatch.setenv("PYTHONPATH", environ["PYTHONPATH"])
            return launch.torchrun(torchrun, job, json.dumps(arguments), attach=attach, log_interval=4)
        return launch.python(
            job, json.dumps(arguments), environ=environ, attach=attach, **{"log_interval": 4, **settings}
        )

    return start


def losses(job):
    return [line for line in job.stdout.splitlines() if line.startswith("loss ")]


@pytest.mark.parametrize("era", CHANGES)
def test_counts_of_every_megatron_version_agree_with_known_counts(train, era):
    job = train(era, eval_interval=6, save_interval=8).done()

    summary, facts = job.ledger.summary, job.ledger.facts
    assert (summary.status, summary.iterations, summary.parameters) == ("completed", 12, MODEL)
    assert (summary.samples, summary.tokens) == (12 * 8, 12 * 8 * LENGTH)
    assert summary.time_by_class["evaluation"] > 0
    assert summary.time_by_class["checkpoint"] > 0
    assert facts["framework"] == "megatron"
    assert (facts["precision"], facts["parallel_layout"]) == ("bf16", "single")
    assert (facts["tensor_parallel"], facts["data_parallel"], facts["sequence_length"]) == (1, 1, LENGTH)
    assert "num_floating_point_operations" in facts["flops_convention"]
    assert not [fact for fact in facts if "expert" in fact], "the model is dense"
    assert not [line for line in job.our_errors if "training goes on" in line]
    shown = {block["iteration"]: block["loss"] for block in job.blocks}
    printed = {line.split()[1]: float.fromhex(line.split()[2]) for line in losses(job)}
    assert shown == {number: f"{printed[number]:.6f}" for number in ("4", "8", "12")}


@pytest.mark.parametrize("era", [OLD, NEW])
def test_losses_are_equal_to_a_run_without_effllm(train, tmp_path, era):
    with_it = losses(train(era).done())
    (tmp_path / "tree").rename(tmp_path / "tree of the first")

    without = losses(train(era, attach=0).done())

    assert len(without) == 12
    assert with_it == without


def test_model_of_two_replicas_is_counted_once_and_each_sample_once(train):
    job = train("0_16", ranks=2).done()

    summary = job.ledger.summary
    assert (summary.parameters, summary.samples, summary.tokens) == (MODEL, 12 * 8, 12 * 8 * LENGTH)
    assert [sum(row.samples for row in job.ledger.ranks if row.rank == rank) for rank in (0, 1)] == [48, 48]
    assert [block["loss"] is not None for block in job.blocks] == [True] * 3


PAI = pytest.mark.system("pai-megatron", how="stand-in")


@pytest.mark.parametrize(
    ("era", "arguments", "expected"),
    [
        # 4 samples per step for the first 8 samples, 6 per step until 20 samples, then 8 per step: 2 x 4, 2 x 6, 8 x 8
        pytest.param(NEW, {"rampup_batch_size": [4, 2, 16]}, (12, 84, 84 * LENGTH), id="batch size ramp-up"),
        pytest.param(NEW, {"real_tokens": 200}, (12, 12 * 8, 12 * 200), id="packed sequences"),
        pytest.param("0_14", {"exits_at": 7}, (7, 7 * 8, 7 * 8 * LENGTH), id="exit at an iteration is no failure"),
        pytest.param(OLD, {"module": "megatron_patch.training"}, (12, 96, 96 * LENGTH), id="Pai-Megatron", marks=PAI),
        # The iterators of this version are not Megatron's own, so AL includes the time of the data.
        pytest.param(OLD, {"data_s": 0.02, "train_iters": 4}, (4, 32, 32 * LENGTH), id="plain iterators"),
    ],
)
def test_counts_of_a_training_are_known(train, era, arguments, expected):
    summary = train(era, **arguments).done().ledger.summary

    assert summary.status == "completed"
    assert (summary.iterations, summary.samples, summary.tokens) == expected
    if "data_s" in arguments:
        assert summary.metrics["al_seconds"].value >= 4 * 0.02


def test_resumed_run_continues_the_counts_of_its_checkpoint(train):
    job = train("0_16", iteration=100, train_iters=108).done()

    assert [block["iteration"] for block in job.blocks] == ["104", "108"]
    assert job.ledger.summary.samples == 8 * 8


def test_skipped_iteration_is_counted_without_a_loss(train):
    job = train("0_16", skipped=[4, 5]).done()

    assert job.ledger.summary.iterations == 12
    assert job.ledger.facts["skipped_iterations"] == 2
    assert [block["loss"] is None for block in job.blocks] == [True, False, False]


@pytest.mark.alone
def test_al_excludes_data_loading_evaluation_and_checkpoints(train):
    # An iteration computes for 20 ms, loads data 4 times for 20 ms, and logs for 10 ms.  There are 2 + 1 evaluations
    # and 3 + 1 checkpoints; one of each is at the end.
    job = train(
        "0_16",
        compute_s=0.02,
        data_s=0.02,
        between_s=0.01,
        evaluation_s=0.1,
        checkpoint_s=0.15,
        eval_interval=6,
        save_interval=4,
    ).done()

    summary, rows = job.ledger.summary, job.ledger.ranks
    assert 0.02 <= summary.metrics["al_seconds"].value < 0.02 + 4 * 0.02  # not the fetches
    assert 3 * 0.1 <= summary.time_by_class["evaluation"] < 3 * 0.1 + 0.15  # not a checkpoint
    assert 4 * 0.15 <= summary.time_by_class["checkpoint"] < 4 * 0.15 + 0.1  # not an evaluation
    waited_s = sum(row.wait_s for row in rows)
    assert waited_s >= 11 * (4 * 0.02 + 0.01)  # the time before the first iteration is startup, not data wait
    trained_s = sum(row.busy_s for row in rows) + waited_s
    assert summary.metrics["tt_tokens_per_param_per_sec"].value == pytest.approx(12 * 8 * LENGTH / MODEL / trained_s)


def test_mfu_is_computed_from_the_operation_count_of_megatron(train):
    # 6 operations per parameter (144) and token, divided by a peak of 1e12 operations per second
    values = train("0_16", peak_tflops=1).done().ledger.summary.metrics

    tokens_per_s = values["tt_tokens_per_param_per_sec"].value * MODEL
    assert values["run_throughput/mfu_ratio"].value == pytest.approx(6 * MODEL * tokens_per_s / 1e12)


def test_event_file_is_written_below_the_folder_of_megatron(train, tmp_path):
    folder = tmp_path / "tensorboard"

    job = train("0_16", tensorboard_dir=str(folder)).done()

    assert list((folder / "efficientllm").glob("events.out.tfevents.*"))
    assert job.ledger.facts["tensorboard_dir"] == str(folder)


def test_status_of_a_run_with_an_exception_in_a_step_is_failed(train):
    job = train(NEW, fails_at=6).wait()

    assert job.code == 1
    assert "RuntimeError: the loss is not finite" in job.stderr
    assert not job.left(within_s=8.0)
    assert (job.ledger.summary.status, job.ledger.summary.iterations) == ("failed", 5)


def test_run_without_training_writes_no_metrics(train):
    job = train("0_16", skip_train=True, train_iters=0).done()

    assert job.runs() == []


def test_missing_train_step_is_reported_and_training_continues(train):
    job = train("0_14", edit=lambda code: code.replace("train_step(", "train_one(")).done()

    (line,) = job.our_errors
    assert line == (
        "[EfficientLLM] this version of megatron.training.training is unknown, "
        "training goes on without its metrics: it has no train_step"
    )
    assert len(losses(job)) == 12


def test_steps_are_counted_if_other_functions_are_missing(train):
    def rename(code):
        for name in ("setup_model_and_optimizer", "save_checkpoint_and_time", "training_log"):
            code = code.replace(f"{name}(", f"{name}_by_another_name(")
        return code

    job = train("0_16", edit=rename, save_interval=4).done()

    assert "has no setup_model_and_optimizer, training_log, save_checkpoint_and_time" in job.stderr
    assert (job.ledger.summary.iterations, job.ledger.summary.tokens) == (12, 12 * 8 * LENGTH)
    assert job.ledger.summary.parameters == MODEL


def test_calls_of_the_loop_replace_the_megatron_hook(train):
    def count(code):
        return code.replace(
            "        iteration += 1\n", "        collector.record_iteration_end(1, 1)\n        iteration += 1\n"
        ).replace(
            "        args.curr_iteration = iteration\n",
            "        args.curr_iteration = iteration\n        collector.record_iteration_start()\n",
        )

    script = (
        "import effllm, megatron.training.training as training\n"
        "training.collector = effllm.initialize_efficientllm_metrics(7)\n" + FIRST_LINES
    )
    summary = train("0_16", edit=count, script=script).done().ledger.summary

    assert (summary.iterations, summary.tokens, summary.parameters) == (12, 12, 7)


class Parameter:
    """A fake parameter with the marks of parallel layers."""

    def __init__(self, count, requires_grad=True, **marks):
        self.count, self.requires_grad = count, requires_grad
        vars(self).update(marks)

    def numel(self):
        return self.count


class Experts:
    """A fake model chunk: a router of 10 parameters, 4 experts of 100 parameters, and a shared expert of 50."""

    def __init__(self, **config):
        self.config = ModuleType("config")
        vars(self.config).update({"hidden_size": 4, **config})

    def named_parameters(self):
        yield "layer.mlp.router.weight", Parameter(10)
        yield "layer.mlp.shared_experts.weight", Parameter(50)
        for number in range(4):
            yield f"layer.mlp.experts.{number}.weight", Parameter(100, allreduce=False)


@pytest.fixture
def alone(monkeypatch):
    """Replace megatron-core, whose import is slow and warns, by a fake with this process as the first of every
    group."""
    groups, layers = ModuleType("parallel_state"), ModuleType("layers")
    for name in ("data_parallel", "expert_data_parallel", "expert_tensor_parallel", "tensor_model_parallel"):
        setattr(groups, f"get_{name}_rank", lambda: 0)
    layers.param_is_not_tensor_parallel_duplicate = lambda _: True
    core = ModuleType("megatron.core")
    core.parallel_state = groups
    for name, module in (
        ("megatron", ModuleType("megatron")),
        ("megatron.core", core),
        ("megatron.core.tensor_parallel", ModuleType("megatron.core.tensor_parallel")),
        ("megatron.core.tensor_parallel.layers", layers),
    ):
        monkeypatch.setitem(sys.modules, name, module)


def test_active_parameters_include_only_the_experts_per_token(alone):
    from effllm.hooks.megatron import parameter_share

    share = parameter_share([Experts(num_moe_experts=4, moe_router_topk=2)])

    assert share == {"total": 460, "trainable": 460, "active": 10 + 50 + 2 * 100}


def test_active_parameters_are_unknown_without_a_number_of_experts(alone):
    from effllm.hooks.megatron import parameter_share

    assert parameter_share([Experts()]) == {"total": 460, "trainable": 460}


LOGS_THROUGHPUT = """
    stand_in.log(loss_dict, iteration)
    global logged_s
    if iteration % 4 == 0:
        now_s = time.perf_counter()
        elapsed_s, logged_s = (now_s - logged_s) / 4, now_s
        flops = num_floating_point_operations(get_args(), get_args().global_batch_size) * {factor}
        tflops = flops / elapsed_s / 1e12
        print_rank_last(f" iteration {{iteration}} | throughput per GPU (TFLOP/s/GPU): {{tflops:.1f}} |")
    return report_memory_flag

logged_s = 0.0

def print_rank_last(message):
    print(message)
"""


@pytest.mark.parametrize(("factor", "stated"), [("1", None), ("1 / 4", 0.25)])
def test_logged_throughput_is_compared_with_the_counts(train, factor, stated):
    """A step has 4 micro-batches of 2 samples; its FLOPs are multiplied, because Megatron logs one digit."""

    def edit(code):
        code = code.replace(
            "    stand_in.log(loss_dict, iteration)\n    return report_memory_flag\n",
            LOGS_THROUGHPUT.format(factor=factor),
        )
        code = code.replace("stand_in.operations(args, batch_size)", "stand_in.operations(args, batch_size) * 10**7")
        return code.replace("import stand_in\n", "import time\nimport stand_in\n")

    job = train("0_16", edit=edit, train_iters=80, compute_s=0.02).done()

    figures = {one.name: one.factor for one in job.ledger.summary.audit.figures}
    assert figures == ({"framework/tflops_per_gpu": pytest.approx(stated, rel=0.05)} if stated else {})
    assert job.ledger.summary.instruments["framework/tflops_per_gpu"].count > 5
