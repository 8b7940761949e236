"""The steps of a hooked framework: facts that a hook declares for consecutive trainings in one process."""

import sys

import pytest

SCRIPT = """
import sys
import effllm
from effllm.hooks._steps import Steps
from effllm.trainer.collector import get_metrics_collector

def train(model):
    steps = Steps(1, "framework")
    steps.begin_training(parameter_share={{"total": 10}}, facts={{"model": model}} if model else {{}})
    steps.start_step()
    steps.end_step(1, 1)
    print(get_metrics_collector().declared.facts.run.get("model"))
    effllm.finalize_efficientllm_metrics()

{lines}
"""


@pytest.mark.parametrize(
    ("lines", "models"),
    [
        ("train('teacher'); train('student'); train(None)", ["teacher", "student", "None"]),
        ("get_metrics_collector().record_facts(model='mine'); train('theirs'); train('other')", ["mine", "mine"]),
        (
            "get_metrics_collector().lifecycle.start_for_requests({'model': 'judge'}); train('student')",
            ["student"],
        ),
    ],
    ids=["consecutive trainings", "name from the script", "requests before the training"],
)
def test_run_has_the_model_name_of_its_own_training(launch, lines, models):
    job = launch._job()
    job.start([sys.executable, "-c", SCRIPT.format(lines=lines)], launch.environ({"sinks": "none"})).done(60.0)

    assert [line for line in job.stdout.splitlines() if not line.startswith("[")] == models


def test_evaluation_that_a_hook_sees_is_marked_beside_a_loop_that_calls_effllm(launch):
    script = """
import sys, time
import effllm
from effllm.hooks._steps import Steps
from effllm.hooks._wrap import Guard
from effllm.trainer.collector import get_metrics_collector

class Trainer:
    def evaluate(self):
        time.sleep(0.5)

assert Steps(1, "framework").wrap_as_phase(Trainer, "evaluate", "evaluation", Guard("framework"))
effllm.initialize_efficientllm_metrics(10)
for i in range(20):
    get_metrics_collector().record_iteration_start()
    time.sleep(0.01)
    get_metrics_collector().record_iteration_end(1, 1)
    if i == 9:
        Trainer().evaluate()
effllm.finalize_efficientllm_metrics()
"""
    job = launch._job()
    job.start([sys.executable, "-c", script], launch.environ({})).done(60.0)

    assert job.ledger.summary.time_by_class["evaluation"] >= 0.5
    assert job.ledger.summary.metrics["al_seconds"].value < 0.05
