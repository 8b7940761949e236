"""megatron-core in every layout that runs on a CPU: the sum of the counts of all ranks is the count of the job."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import repeats

from effllm.config.switches import PREFIX

REPOSITORY = Path(__file__).parents[2]
INTEGRATION = REPOSITORY / "integration" / "megatron_core"

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("megatron") is None:
    pytest.skip("torch and megatron-core are not installed", allow_module_level=True)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(400),
]  # four imports of torch take minutes

HIDDEN, VOCABULARY, LENGTH, LAYERS = 32, 256, 16, 2
EMBEDDINGS = VOCABULARY * HIDDEN + LENGTH * HIDDEN  # tokens (tied to the output layer) and positions
ATTENTION, MLP = 4 * HIDDEN**2, 8 * HIDDEN**2
BIASES = 4 * HIDDEN + 5 * HIDDEN  # biases of attention and MLP; the model with experts has no biases
NORMS = 2 * 2 * HIDDEN
ROUTER = 2 * HIDDEN
FINAL_NORM = 2 * HIDDEN
DENSE_MODEL = EMBEDDINGS + LAYERS * (ATTENTION + MLP + BIASES + NORMS) + FINAL_NORM
EXPERTS_MODEL = EMBEDDINGS + LAYERS * (ATTENTION + ROUTER + 2 * MLP + NORMS) + FINAL_NORM

# name:tensor:pipeline:expert:expert_tensor
TWO_RANKS = ["dense:1:1:1:1", "dense:2:1:1:2", "dense:1:2:1:1", "experts:1:1:2:1", "experts:2:1:1:1", "experts:2:1:1:2"]
FOUR_RANKS = ["dense:2:2:1:2", "dense:2:1:1:2"]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """Return (name of the layout, output of each rank) of all layouts; four ranks run only in make test-all."""
    worlds = [(2, TWO_RANKS), (4, FOUR_RANKS)][: repeats(1, 2)]
    return [found for size, names in worlds for found in run_layouts(tmp_path_factory.mktemp("ranks"), size, names)]


def run_layouts(folder, num_ranks, layouts):
    run_job(num_ranks, REPOSITORY / "tests" / "megatron_core_rank.py", folder, *layouts, PYTHONPATH=str(INTEGRATION))
    return [
        (layout, [json.loads((folder / f"{layout}-{rank}.json").read_text()) for rank in range(num_ranks)])
        for layout in layouts
    ]


def run_job(num_ranks, script, *arguments, **variables):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1"]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
    with subprocess.Popen(
        [*torchrun, "--nproc_per_node", str(num_ranks), script, *arguments],
        env={**inherited, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            printed, _ = job.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            job.terminate()  # after SIGTERM, torchrun ends its ranks
            raise
    assert job.returncode == 0, printed[-4000:]
    return printed


def test_sum_of_parameter_shares_of_all_ranks_is_the_model_size(layouts):
    for name, ranks in layouts:
        found = {kind: sum(rank["share"][kind] for rank in ranks) for kind in ("total", "active", "trainable")}
        if name.startswith("dense"):
            assert found == dict.fromkeys(found, DENSE_MODEL), name
        else:  # one of two experts is active, and the table is frozen
            assert found == {
                "total": EXPERTS_MODEL,
                "active": EXPERTS_MODEL - LAYERS * MLP,
                "trainable": EXPERTS_MODEL - VOCABULARY * HIDDEN,
            }, name


def test_sum_of_local_parameters_is_not_the_model_size(layouts):
    held = {(name, len(ranks)): sum(rank["held"] for rank in ranks) for name, ranks in layouts}

    assert held["dense:1:1:1:1", 2] == 2 * DENSE_MODEL  # each replica has the whole model
    assert held["dense:2:1:1:2", 2] > DENSE_MODEL  # norms are on two ranks
    assert held["dense:1:2:1:1", 2] == DENSE_MODEL + VOCABULARY * HIDDEN  # the tied embedding is on two ranks


def test_each_sample_is_reported_by_one_rank(layouts):
    for name, ranks in layouts:
        tensor, pipeline = (int(size) for size in name.split(":")[1:3])
        assert sum(rank["reports_data"] for rank in ranks) == len(ranks) // (tensor * pipeline), name
        if name.startswith("dense"):
            assert sum(rank["samples"] for rank in ranks) == 3 * 8, name


def test_loss_of_the_job_is_reported_by_one_rank_and_does_not_depend_on_the_layout(layouts):
    losses = {}
    for name, ranks in layouts:
        if name.startswith("dense"):
            (losses[name, len(ranks)],) = [rank["losses"] for rank in ranks if rank["losses"][0] is not None]
    replicated = losses["dense:1:1:1:1", 2]

    for layout, (first, _, last) in losses.items():
        assert first == pytest.approx(5.5, abs=0.3), layout  # ln 256 is the loss before training
        assert last < first, layout
        if layout[0] == "dense:2:1:1:2":
            assert losses[layout] == pytest.approx(replicated, rel=1e-3), layout


LONG = {"marks": pytest.mark.long}


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        pytest.param(1, (), **LONG),
        pytest.param(2, (), **LONG),
        (2, ("--tp", "2")),
        pytest.param(2, ("--pp", "2"), **LONG),
        pytest.param(4, ("--tp", "2", "--pp", "2"), **LONG),
    ],
    ids=["1 rank", "DP2", "TP2", "PP2", "TP2xPP2"],
)
def test_parameters_and_counts_of_a_job_are_in_its_run_folder(tmp_path, num_ranks, flags):
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {{hidden_size: {HIDDEN}, num_layers: {LAYERS}}}\n"
        f"data: {{sequence_length: {LENGTH}, micro_batch_size: 2, global_batch_size: 8}}\n"
        "training: {iterations: 12, evaluation_interval: 6, checkpoint_interval: 8}\n"
        "metrics: {facts: {task: a test}}\n"
    )
    runs = {"EFFICIENTLLM_RUN_DIR": str(tmp_path), "EFFICIENTLLM_RUN_NAME": "run", "EFFICIENTLLM_LOG_INTERVAL": "4"}

    printed = run_job(num_ranks, INTEGRATION / "train.py", "--config", job, *flags, **runs)

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["parameters"], summary["iterations"]) == ("completed", DENSE_MODEL, 12)
    assert (summary["samples"], summary["tokens"]) == (12 * 8, 12 * 8 * LENGTH)
    assert summary["time_by_class"]["evaluation"] > 0
    assert summary["time_by_class"]["checkpoint"] > 0
    assert printed.count("[EfficientLLM Metrics] Iteration ") == 3
    assert printed.count("  Loss: ") == 3
    rows = [json.loads(line) for line in (tmp_path / "run" / "ranks-0001.jsonl").read_text().splitlines()]
    times_s = [sum(row["busy_s"] + row["wait_s"] for row in rows if row["rank"] == rank) for rank in range(num_ranks)]
    throughput = sum(row.get("tokens", 0) for row in rows) / DENSE_MODEL / max(times_s)
    assert summary["metrics"]["tt_tokens_per_param_per_sec"]["value"] == pytest.approx(throughput)


@pytest.fixture
def settings(monkeypatch):
    monkeypatch.syspath_prepend(str(INTEGRATION))
    return importlib.import_module("settings")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: {}", "section 'modle' is not known; did you mean 'model'?"),
        ("model: {hiden_size: 8}", "model: 'hiden_size' is not known; did you mean 'hidden_size'?"),
        ("model: {xyzzy: 8}", "model: 'xyzzy' is not known; known: "),
        ("model: {num_layers: two}", "model.num_layers='two' must be of type int"),
        ("model: {num_layers: true}", "model.num_layers=True must be of type int"),
        ("data: {sequence_length: 0}", "data.sequence_length=0 must be at least 1"),
        ("training: {learning_rate: .nan}", "training.learning_rate=nan must be at least"),
        ("model: 3", "model: names with values are expected, not 3"),
        ("[1, 2]", "names with values are expected"),
        ("system: torchtitan", "'system' must be megatron_core"),
        ("model: {", "cannot read"),
        ("parallelism: {tensor: 2}", "processes=3 does not divide by 2"),
        ("model: {num_attention_heads: 4}\nparallelism: {tensor: 3}", "num_attention_heads=4 does not divide by 3"),
        ("parallelism: {pipeline: 3}", "model.num_layers=2 does not divide by 3"),
        ("data: {global_batch_size: 32}", "data.global_batch_size=32 does not divide by 12"),
    ],
)
def test_wrong_run_configuration_of_three_processes_is_rejected_with_the_reason(settings, tmp_path, text, message):
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(settings.SettingsError) as refusal:
        settings.data_parallel_size(settings.read_settings(tmp_path / "job.yaml"), 3)

    assert message in str(refusal.value)


def test_flags_override_the_run_configuration_and_its_defaults(settings, tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text("parallelism: {tensor: 2}\ntraining: {seed: 5, learning_rate: 1}\nmodel:\n")

    given = settings.parse_arguments(["--config", str(path), "--tp", "1", "--pp", "2", "--iterations", "7"])

    assert given == settings.Settings(
        parallelism=settings.Parallelism(tensor=1, pipeline=2),
        training=settings.Training(iterations=7, seed=5, learning_rate=1.0),
    )
    with pytest.raises(SystemExit):
        settings.parse_arguments(["--iterations", "0"])
    assert "--iterations: training.iterations=0 must be at least 1" in capsys.readouterr().err
    demo = settings.read_settings(REPOSITORY / "configs" / "demo.yaml")
    assert (demo.training.iterations, settings.data_parallel_size(demo, 2)) == (60, 2)
