"""Loops of plain torch, attached only by environment variables: counts of iterations, also after unusual starts."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import jobs
import pytest

pytestmark = [*jobs.needs_torch, pytest.mark.long, pytest.mark.system("torchrun", how="ran")]

MODEL = """
import time, torch, effllm
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 4)  # 36 parameters
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def backward(model=model):
    loss = model(torch.ones(2, 8)).square().mean()
    loss.backward()
    return loss.item()
"""
TORCHRUN = Path(__file__).parents[2] / "integration" / "torchrun" / "train.py"
ON = {"EFFICIENTLLM_ATTACH": "1", "EFFICIENTLLM_SINKS": "none"}
OFF = {"EFFICIENTLLM_METRICS_ENABLED": "false"}


def train(launch, code, environ=None, **settings):
    return launch.code(dedent(MODEL) + dedent(code), environ={**ON, **(environ or {})}, **settings).done(300)


def test_iterations_of_an_unmodified_loop_are_counted(launch):
    job = train(
        launch,
        """
        for _ in range(12):
            optimizer.zero_grad()
            backward()
            optimizer.step()
        """,
    )
    summary = job.ledger.summary
    # The first step starts the metrics and is not measured.
    assert (summary.iterations, summary.parameters, summary.status) == (11, 36, "completed")
    assert job.ledger.facts["framework"] == "torch"
    assert job.ledger.facts["parameters_from"] == "optimizer"
    assert job.ledger.facts["style"] == "Iteration"
    assert job.ledger.facts["iterations_not_measured"] == 1
    assert job.ledger.facts["evaluation_in_iterations"] is True
    assert summary.tokens is None
    assert [line for line in summary.not_measured if line.startswith("first iteration: ")]
    assert job.our_errors == []


GRAPHS = """
from effllm.trainer.cuda_graphs import GRAPHS

class Graph:
    is_capturing = False
    def capture_begin(self):
        Graph.is_capturing = True
    def capture_end(self):
        Graph.is_capturing = False
    def replay(self):
        time.sleep(0.01)

torch.cuda.is_current_stream_capturing = lambda: Graph.is_capturing
GRAPHS.watch_class(Graph)
"""


TWO = """
critic = torch.nn.Linear(8, 2)  # 18 parameters
other = torch.optim.Adam(critic.parameters())
"""
STEPS = "for _ in range(4):\n    backward()\n    optimizer.step()\n"
#: Loops and values of the summaries of their runs. The first step starts the metrics and is not measured.
LOOPS = {
    "two optimizers in each step": (
        TWO + "for _ in range(9): backward(); backward(critic); optimizer.step(); other.step()",
        {"iterations": 8, "parameters": 36 + 18},
    ),
    "two optimizers in turn": (
        TWO + "for i in range(18): backward(); backward(critic); (optimizer, other)[i % 2].step()",
        {"iterations": 8, "parameters": 36 + 18},
    ),
    "one of two optimizers five times as often": (
        TWO + "for i in range(9): backward(); backward(critic); optimizer.step(); [other.step() for _ in range(5)]",
        {"iterations": 8, "parameters": 36 + 18},
    ),
    # Two of the first three steps, one long iteration of 17 steps, and 13 steps of the second optimizer.
    "the first of two optimizers stops": (
        TWO
        + """
for _ in range(3): backward(); optimizer.step()
for _ in range(30): backward(critic); other.step()
""",
        {"iterations": 2 + 1 + 13},
    ),
    "a new optimizer in each epoch": (
        """
kept = []
for epoch in range(3):
    kept.append(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        backward()
        kept[-1].step()
""",
        {"iterations": 11, "parameters": 36},
    ),
    "a gradient scaler skips 4 of 12 steps": (
        """
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
for step in range(12):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 8)).sum() * (float("inf") if step % 3 == 2 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        {"iterations": 7},
    ),
    "closures, pickled optimizers and compiled steps": (
        """
import copy, pickle, warnings
warnings.simplefilter("ignore")
lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=4)
def closure():
    lbfgs.zero_grad()
    loss = model(torch.ones(2, 8)).square().mean()
    loss.backward()
    return loss
for _ in range(4):
    lbfgs.step(closure)
pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)
compiled = torch.compile(lambda: optimizer.step(), backend="eager")
for _ in range(4):
    backward()
    compiled()
""",
        {"iterations": 7},
    ),
    "graphs of two optimizers, without a step before": (
        GRAPHS
        + """
other = torch.optim.SGD(torch.nn.Linear(8, 4).parameters(), lr=0.1)
for parameter in other.param_groups[0]["params"]:
    parameter.grad = torch.zeros_like(parameter)
graphs = [Graph(), Graph()]
backward()
for graph, one in zip(graphs, (optimizer, other)):
    graph.capture_begin()
    one.step()
    graph.capture_end()
for _ in range(30):
    for graph in graphs:
        graph.replay()
""",
        {"iterations": 29},
    ),
    "iteration calls of the script replace the hook": (
        """
for _ in range(3): backward(); optimizer.step()
collector = effllm.get_metrics_collector()
for _ in range(5):
    collector.record_iteration_start()
    backward()
    optimizer.step()
    collector.record_iteration_end(100, 1)
effllm.finalize_efficientllm_metrics()
""",
        {"iterations": 2 + 5, "tokens": 500},
    ),
    "tokens of effllm.count where an iteration gets none": (
        """
with effllm.monitor(parameters=36) as m:
    for step in range(4):
        effllm.count(tokens=10)
        backward()
        optimizer.step()
        m.iteration(tokens=3) if step == 3 else m.iteration()
""",
        {"iterations": 4, "tokens": 3 * 10 + 3},
    ),
    "cells of a notebook": (
        f"""
import code
interpreter = code.InteractiveInterpreter()
for cell in {[MODEL, STEPS, STEPS]!r}:
    interpreter.runcode(compile(cell, "<cell>", "exec"))
""",
        {"iterations": 7},
    ),
    "a script from standard input": (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-'], input={MODEL + STEPS!r}.encode(), check=True)",
        {"iterations": 3},
    ),
}


@pytest.mark.parametrize(("code", "expected"), LOOPS.values(), ids=LOOPS)
def test_iterations_are_optimizer_steps(launch, code, expected):
    summary = train(launch, code).ledger.summary

    assert {name: getattr(summary, name) for name in expected} == expected
    assert summary.status == "completed"


def test_unused_world_size_variable_causes_no_wait_for_ranks(launch):
    left = {"WORLD_SIZE": "8", "RANK": "0", "MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
    summary = train(launch, STEPS, left).ledger.summary

    assert (summary.coverage.ranks_expected, summary.iterations) == (1, 3)


def test_replays_of_a_captured_step_are_iterations_and_no_stall(launch):
    """A build of torch for CPUs has no graphs: the stand-in replays nothing, and no hook of torch runs in a replay."""
    job = train(
        launch,
        GRAPHS
        + dedent("""
        step, forward = Graph(), Graph()
        for _ in range(3):
            backward(), optimizer.step()
        for graph in (step, forward):
            graph.capture_begin()
            backward(), graph is step and optimizer.step()
            graph.capture_end()
        for _ in range(40):
            step.replay()
        for _ in range(200):
            forward.replay()
        """),
        stall_seconds=1,
    )
    summary = job.ledger.summary
    assert (summary.iterations, summary.status) == (2 + 40, "completed")
    assert "stalled" not in summary.events


def test_count_adds_tokens_and_samples_of_each_micro_batch(launch):
    job = train(
        launch,
        """
        for step in range(12):
            effllm.count(tokens=5, samples=2, tokens_processed=8, tokens_loss=4, loss=backward())
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        """,
        log_interval=1,
    )
    summary = job.ledger.summary
    # Six steps of two micro-batches, without the first step: 5 x 2 x 5 tokens, 5 x 2 x 2 samples.
    assert (summary.iterations, summary.tokens, summary.samples) == (5, 50, 20)
    assert summary.loss is not None
    assert [window.iteration for window in job.ledger.windows][:5] == [2, 3, 4, 5, 6]


def lines_of(job, *words):
    return [line for line in job.stdout.splitlines() if line.startswith(words)]


@pytest.mark.alone
def test_al_excludes_data_wait_between_iterations(launch):
    job = train(
        launch,
        """
        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return 33
            def __getitem__(self, index):
                time.sleep(0.02)
                return torch.ones(8)
        backward(); optimizer.step()  # begins the metrics
        for step, batch in enumerate(torch.utils.data.DataLoader(Slow(), batch_size=3)):  # 0.06 s for a batch
            optimizer.zero_grad()
            backward()
            time.sleep(0.03)
            optimizer.step()
            if step % 5 == 4:
                with effllm.phase("evaluation"):
                    time.sleep(0.1)
                with effllm.phase("checkpoint"):
                    time.sleep(0.05)
        """,
    )
    summary = job.ledger.summary
    assert summary.iterations == 11
    assert summary.metrics["al_seconds"].value == pytest.approx(0.03, abs=0.008)
    assert summary.time_by_class["evaluation"] == pytest.approx(0.2, abs=0.03)
    assert summary.time_by_class["checkpoint"] == pytest.approx(0.1, abs=0.03)
    # Two thirds of the iteration time (11 x 0.09 s) are data wait.
    assert summary.metrics["run_throughput/data_wait_ratio"].value == pytest.approx(0.66, abs=0.05)


@pytest.mark.alone
def test_prefetch_inside_an_iteration_is_counted_as_data_wait(launch):
    job = train(
        launch,
        """
        class Slow(torch.utils.data.IterableDataset):
            def __iter__(self):
                while True:
                    time.sleep(0.04)
                    yield torch.ones(8)
        batches = iter(torch.utils.data.DataLoader(Slow(), batch_size=1))
        next(batches)
        for step in range(9):
            backward()
            time.sleep(0.02)
            next(batches)  # of the next iteration
            optimizer.step()
        """,
    )
    assert job.ledger.summary.metrics["al_seconds"].value == pytest.approx(0.02, abs=0.008)


def test_pause_before_a_second_training_is_no_iteration(launch):
    job = train(
        launch,
        """
        def stage():
            model = torch.nn.Linear(8, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(20):
                backward(model)
                effllm.count(tokens=7)
                time.sleep(0.01)
                optimizer.step()

        stage()
        time.sleep(2)
        stage()
        """,
    )
    summary = job.ledger.summary
    assert (summary.iterations, summary.tokens) == (19 + 19, 39 * 7), "the first step begins the metrics"
    assert summary.metrics["al_seconds"].value < 0.04
    assert summary.time_by_class["other"] >= 2.0


def test_optimizer_steps_of_plain_tensors_start_no_run(launch):
    job = train(
        launch,
        """
        optimizer.step()  # no gradient: done to silence a warning of schedulers
        image = torch.ones(4, requires_grad=True)
        art = torch.optim.Adam([image])
        for _ in range(5):
            image.square().sum().backward()
            art.step()
        """,
    )
    assert job.runs() == []
    (line,) = job.our_errors
    assert "ran without metrics: the optimizer updates plain tensors" in line
    assert "effllm.monitor(parameters=n)" in line


def test_batches_without_an_optimizer_step_are_reported_at_the_end(launch):
    loop = "for batch in torch.utils.data.DataLoader(torch.ones({}, 8)): model(batch)"

    (line,) = train(launch, loop.format(20)).our_errors

    assert "no step of a torch optimizer was detected" in line
    assert train(launch, loop.format(5)).our_errors == []


@pytest.mark.parametrize(("how", "times"), [("torch.no_grad()", 1), ("effllm.phase('evaluation')", 0)])
def test_undeclared_evaluation_is_reported_as_part_of_al(launch, how, times):
    loop = """
    for _ in range(6):
        backward()
        optimizer.step()
        with {}:
            model(torch.ones(2, 8))
    """

    summary = train(launch, dedent(loop).format(how)).ledger.summary

    named = [line for line in summary.not_measured if line.startswith("evaluation: ")]
    assert len(named) == times
    assert all("between steps is counted in AL" in line for line in named)


NET = """
    net = torch.nn.Sequential(model, torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    """


def test_time_between_calls_of_eval_and_train_is_evaluation(launch):
    loop = """
        for step in range(12):
            backward(net)
            optimizer.step()
            if step % 3 == 2:  # after the last step too, which is not between two steps
                net.eval()
                for batch in torch.utils.data.DataLoader(torch.ones(4, 8)):
                    time.sleep(0.03)
                net.train()
        """
    job = train(launch, dedent(NET) + dedent(loop))

    summary = job.ledger.summary
    assert summary.iterations == 11
    assert summary.time_by_class["evaluation"] >= 3 * 4 * 0.03
    assert not [line for line in summary.not_measured if line.startswith("evaluation")]
    assert job.our_errors == []


NO_EVALUATIONS = """
    teacher = torch.nn.Linear(8, 4)
    for step in range(16):
        backward(net)
        optimizer.step()
        if step == 3:
            net[1].eval()  # a part of the model
            net[1].train()
        if step == 5:
            teacher.eval()
            teacher.train()
        if step == 7:
            net.eval()  # the loop trains in this mode
        if step == 9:
            net.train()
            net.eval()
            backward(net)
            optimizer.step()
            net.train()
        if step == 13:
            net.eval()
            with effllm.phase("checkpoint"):  # time that the loop marks is not marked again
                time.sleep(0.01)
            net.train()
    """
EACH_ITERATION = """
    for step in range(8):
        net.eval()  # as around a rollout
        time.sleep(0.01)
        net.train()
        backward(net)
        optimizer.step()
    """


@pytest.mark.parametrize("loop", [NO_EVALUATIONS, EACH_ITERATION], ids=["other reasons", "each iteration"])
def test_eval_mode_during_training_is_not_counted_as_evaluation(launch, loop):
    summary = train(launch, dedent(NET) + dedent(loop)).ledger.summary

    assert "evaluation" not in summary.time_by_class
    assert [line for line in summary.not_measured if "other evaluation between steps is counted in AL" in line]


def test_eval_detection_does_not_change_training(launch, tmp_path):
    """Compare losses, numbers of graphs, warnings and a saved model, which must not contain the word effllm."""
    code = f"""
        import pathlib, warnings
        graphs = []
        def backend(graph, _):
            graphs.append(graph)
            return graph.forward
        net = torch.nn.Sequential(model, torch.nn.Dropout(0.5))
        compiled = torch.compile(net, backend=backend, fullgraph=True)
        @torch.compile(backend=backend, fullgraph=True)
        def toggled(x):
            net.eval()
            y = net(x).sum()
            net.train()
            return y
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for step in range(8):
                effllm.count(tokens=8)
                print("loss", backward(compiled).hex())
                optimizer.step()
                optimizer.zero_grad()
                if step % 2:
                    compiled.eval()
                    with torch.no_grad():
                        print("evaluated", compiled(torch.ones(2, 8)).sum().item().hex())
                        torch.save(net, {str(tmp_path / "model.pt")!r})
                    compiled.train()
                print("toggled", toggled(torch.ones(2, 8)).item().hex())
        print("graphs", len(graphs), [len(graph.graph.nodes) for graph in graphs])
        print("warnings", sorted(str(one.message) for one in seen))
        saved = pathlib.Path({str(tmp_path / "model.pt")!r}).read_bytes()
        print("saved", b"torch" in saved, "names effllm", b"effllm" in saved)
        """
    on, off = [train(launch, code, switch) for switch in ({}, OFF)]

    words = ("loss", "evaluated", "toggled", "graphs", "warnings", "saved")
    lines = lines_of(on, *words)
    assert len(lines) == 8 + 4 + 8 + 3
    assert lines == lines_of(off, *words)
    assert "saved True names effllm False" in lines
    assert on.ledger.summary.time_by_class["evaluation"] > 0


def test_optimizer_hook_stops_if_a_framework_or_script_counts_steps(launch):
    job = train(
        launch,
        """
        from effllm.trainer import ownership
        from effllm.hooks._steps import Steps
        from effllm.trainer.collector import get_metrics_collector
        for _ in range(3):
            backward()
            optimizer.step()
        framework = Steps(ownership.FRAMEWORK, "a framework")
        framework.begin_training(parameter_share={"total": 100, "trainable": 36})
        for _ in range(5):
            framework.start_step()
            backward()
            optimizer.step()
            framework.end_step(10, 1)
        framework.finish()
        effllm.initialize_efficientllm_metrics(1000)
        for _ in range(4):
            backward()
            optimizer.step()
        """,
    )
    first, second = sorted((jobs.Ledger(one) for one in job.runs()), key=lambda one: -one.summary.iterations)
    assert (first.summary.iterations, first.summary.parameters, first.summary.tokens) == (2 + 5, 100, 50)
    assert (second.summary.iterations, second.summary.parameters) == (3, 1000)


# --- unusual launches ---

SPAWNED = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
def work(rank, world_size, address):
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=address)
    torch.set_num_threads(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    import effllm
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).mean().backward()
        effllm.count(tokens=16)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    effllm.finalize_efficientllm_metrics()
if __name__ == "__main__":
    if sys.argv[1] == "env":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
    mp.spawn(work, (2, "env://" if sys.argv[1] == "env" else f"tcp://127.0.0.1:{sys.argv[2]}"), 2)
"""


@pytest.mark.parametrize("way", ["env", "tcp"])
def test_spawned_ranks_share_one_run(launch, tmp_path, way):
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    job = launch.python(script, way, jobs.unused_port(), environ=ON).done(300)
    summary = job.ledger.summary
    assert (summary.coverage.ranks_reporting, summary.coverage.ranks_expected) == (2, 2)
    assert (summary.iterations, summary.parameters, summary.tokens) == (5, 36, 2 * 5 * 16)


def test_parameters_are_counted_once_for_all_ranks_of_torchrun(launch):
    options = ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", "2"]
    job = launch.torchrun(options, str(TORCHRUN), attach=1, sinks="none").done(300)
    summary = job.ledger.summary
    assert (summary.coverage.ranks_reporting, summary.coverage.ranks_expected) == (2, 2)
    assert (summary.iterations, summary.parameters) == (99, 2 * 64 * 64 + 64)
    assert (summary.tokens, summary.samples) == (2 * 99 * 8 * 32, 2 * 99 * 8)


@pytest.mark.alone
def test_iterations_do_not_include_time_between_notebook_cells(launch):
    job = train(
        launch,
        """
        import sys, types
        class Events(dict):
            def register(self, name, function):
                self[name] = function
        class Shell:
            events = Events()
        sys.modules["IPython"] = types.SimpleNamespace(get_ipython=Shell)
        for cell in range(3):
            for name in ["pre_run_cell"] if Shell.events else []:
                Shell.events[name]("IPython's information on the cell")
            for _ in range(4):
                backward()
                time.sleep(0.01)
                optimizer.step()
            Shell.events["post_run_cell"]("its result")
            time.sleep(0.2)
        """,
    )
    summary = job.ledger.summary
    assert summary.iterations == 11
    assert summary.metrics["al_seconds"].value == pytest.approx(0.01, abs=0.006)
    assert summary.time_by_class["other"] >= 0.39
    assert job.ledger.event_texts("warning") == []


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_of_a_data_loader_start_no_agent(launch, tmp_path, how):
    script = tmp_path / "loader.py"
    script.write_text(
        dedent(
            """
            import os, sys, torch
            class Rows(torch.utils.data.Dataset):
                def __len__(self):
                    return 32
                def __getitem__(self, index):
                    return torch.ones(8)
            if __name__ == "__main__":
                torch.set_num_threads(1)
                model = torch.nn.Linear(8, 4)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                loader = torch.utils.data.DataLoader(
                    Rows(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1]
                )
                for _ in range(2):
                    for batch in loader:
                        model(batch).mean().backward()
                        optimizer.step()
                sys.path.insert(0, sys.argv[2])
                import jobs
                print("agents", len(jobs.Job.find(Here, "effllm.agent.agent")))
            """
        ).replace("Here", "type('Here', (), {'token': 'TESTS_OF_JOB=' + os.environ['TESTS_OF_JOB']})")
    )
    job = launch.python(script, how, str(jobs.SCRIPTS.parent), environ=ON).done(300)
    assert "agents 1" in job.stdout
    assert job.ledger.summary.iterations == 15
