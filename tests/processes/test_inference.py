"""effllm/trainer/inference.py and the hooks of generate and vLLM; without training, each request is an iteration."""

import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from cases import cases

from effllm.hooks import Unknown
from effllm.hooks.generate import _counts_of_call, _num_padding_in_row, attach_vllm
from effllm.hooks.generate import attach as attach_generate


class Tensor:
    """A fake tensor with only the parts that effllm may read; on a GPU only the shape."""

    def __init__(self, rows, device="cpu"):
        self.rows, self.device = rows, SimpleNamespace(type=device)

    @property
    def shape(self):
        return len(self.rows), len(self.rows[0])

    def __getitem__(self, place):
        return Tensor([row[place[1]] for row in self.rows], self.device.type)

    def tolist(self):
        assert self.device.type == "cpu", "this would synchronize"
        return [list(row) for row in self.rows]


def model(is_encoder_decoder=False, ends=2, pad=0):
    return SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=is_encoder_decoder),
        generation_config=SimpleNamespace(eos_token_id=ends, pad_token_id=pad),
    )


def counted(result, *args, **kwargs):
    return _counts_of_call(SimpleNamespace(args=args, kwargs=kwargs), result)


PROMPT = Tensor([[1, 5, 6], [1, 5, 7]])


ANSWER = [[1, 5, 6, 9, 9, 9, 9], [1, 5, 7, 9, 2, 0, 0]]


ANSWERS = {
    "4 + 2 with the end token": (Tensor(ANSWER), [model()], {"input_ids": PROMPT}, (6, 6, 2)),
    "positional prompt": (Tensor(ANSWER), [model(), PROMPT], {}, (6, 6, 2)),
    "only the shape on a GPU": (Tensor(ANSWER, "cuda"), [model()], {"input_ids": PROMPT}, (8, 6, 2)),
    "without the start": (Tensor([[0, 9, 9, 2], [0, 9, 2, 0]]), [model(True)], {"input_ids": PROMPT}, (5, 6, 2)),
    "embeddings are no part of the result": (
        Tensor([[9, 9, 2]]),
        [model()],
        {"inputs_embeds": SimpleNamespace(shape=(1, 7, 64))},
        (3, 7, 1),
    ),
    "three answers": (Tensor([[1, 5, 9, 9]] * 3), [model()], {"input_ids": Tensor([[1, 5]])}, (6, 2, 1)),
}


@pytest.mark.parametrize(("result", "arguments", "named", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_tokens_of_the_answer_of_the_prompt_and_samples_are_counted(result, arguments, named, expected):
    assert counted(result, *arguments, **named) == expected


@cases(
    ("row", "ends", "pad", "padding"),
    [
        ([5, 6, 2, 0, 0], {2}, 0, 2),
        ([5, 6, 2, 2], {2}, 2, 1),
        ([5, 0, 0], {2}, 0, 2),
        ([5, 6], {2}, 0, 0),
        ([], {2}, 0, 0),
    ],
)
def test_positions_after_the_end_token_are_counted_as_padding(row, ends, pad, padding):
    assert _num_padding_in_row(row, ends, pad) == padding


def test_module_without_the_hooked_functions_is_rejected():
    for attach in (attach_generate, attach_vllm):
        with pytest.raises(Unknown):
            attach(ModuleType("of.another.version"))


# --- the calls, in their own process ----------------------------------------------------------


def run(tmp_path, script, **environment):
    """Run a script with a simulated device; return the finished process and its runs."""
    path = tmp_path / "job.py"
    path.write_text(script)
    names = {"RUN_DIR": str(tmp_path / "runs"), "DEVICE": "simulated", "SINKS": "none", "LOG_INTERVAL": "2"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EFFICIENTLLM_")}
    done = subprocess.run(
        [sys.executable, str(path)],
        env={**kept, "OMP_NUM_THREADS": "1", **{f"EFFICIENTLLM_{n}": v for n, v in names.items()}, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return done, [Run(folder) for folder in sorted((tmp_path / "runs").glob("*"))]


class Run:
    def __init__(self, folder):
        self.summary = json.loads((folder / "summary.json").read_text())
        self.facts = json.loads((folder / "run.json").read_text())
        lines = [line for path in sorted(folder.glob("ranks-*.jsonl")) for line in path.read_text().splitlines()]
        self.rows = [json.loads(line) for line in lines]
        self.values = {name: value["value"] for name, value in self.summary["metrics"].items()}

    def sum(self, name):
        return sum(row.get(name, 0) for row in self.rows)


@pytest.mark.alone
def test_requests_of_an_inference_process_count_as_iterations(tmp_path):
    _, (run_,) = run(
        tmp_path,
        """
import time, effllm
for tokens in (10, 20, 30, 40):
    with effllm.request(samples=2) as r:
        time.sleep(0.05)
        r.prompt(7)
        r.generated(tokens)
    time.sleep(0.05)
""",
    )

    assert (run_.summary["status"], run_.summary["iterations"], run_.summary["samples"]) == ("completed", 4, 8)
    assert (run_.sum("generated_tokens"), run_.sum("prompt_tokens"), run_.summary["tokens"]) == (100, 28, None)
    assert run_.values["it_tokens_per_sec"] == pytest.approx(100 / run_.sum("generation_s"))
    assert run_.values["al_seconds"] == pytest.approx(run_.sum("busy_s") / 4)
    assert 0.05 <= run_.values["al_seconds"] < 0.09, "time between requests is not part of requests"
    assert "tt_tokens_per_param_per_sec" not in run_.values


@pytest.mark.alone
def test_overlapping_times_of_recorded_requests_are_counted_once(tmp_path):
    _, (run_,) = run(
        tmp_path,
        """
import time, effllm
effllm.initialize_efficientllm_metrics(1000)
time.sleep(0.3)
effllm.record_request(5, 50, computation_time_s=0.08, communication_time_s=0.02)
effllm.record_request(5, 50, 1000.0)  # since the one before: no second counts twice
time.sleep(0.2)
effllm.record_request(generated_tokens=20, time_s=0.1)
effllm.record_request(generated_tokens="many", time_s=float("nan"))
""",
    )

    assert (run_.summary["iterations"], run_.sum("generated_tokens"), run_.sum("prompt_tokens")) == (4, 120, 10)
    assert run_.sum("generation_s") == pytest.approx(0.2, abs=0.02)
    assert run_.sum("busy_s") == pytest.approx(0.2, abs=0.02)  # 0.1, nearly 0, 0.1, nearly 0
    assert run_.values["st_samples_per_param_per_sec"] > 0


def test_request_before_the_start_of_metrics_is_reported_as_uncounted(tmp_path):
    done, (run_,) = run(tmp_path, "import effllm\nfor _ in range(3):\n    effllm.record_request(1, 10, 0.001)\n")

    assert (run_.summary["iterations"], run_.sum("generated_tokens")) == (2, 20)
    (events,) = tmp_path.glob("runs/*/events.jsonl")
    assert "the first request" in events.read_text() + done.stderr


def test_disabled_metrics_record_nothing(tmp_path):
    done, runs = run(
        tmp_path,
        "import effllm\nwith effllm.request() as r: r.generated(1)\neffllm.record_request(1, 1, 1.0)\n",
        EFFICIENTLLM_METRICS_ENABLED="off",
    )

    assert (done.stdout, done.stderr, runs) == ("", "", [])


RAISES = """
import effllm
for bad in (True, False):
    try:
        with effllm.request() as r:
            r.generated(5)
            if bad:
                raise ValueError
    except ValueError:
        pass
"""
ENGINE = """
import sys, time, types
from types import SimpleNamespace as N
import effllm
from effllm.hooks.generate import attach_vllm

class LLM:
    def generate(self, prompts):
        time.sleep(0.02)
        return [N(prompt_token_ids=[1] * 3, outputs=[N(token_ids=(5,) * 8), N(token_ids=[6] * 4)]) for _ in prompts]
    def chat(self, prompts):
        return self.generate(prompts)

attach_vllm(N(LLM=LLM))
llm = LLM()
"""
LOOP = """
with effllm.monitor(1000) as m:
    for _ in range(4):
        llm.chat(['a'])
        m.iteration(tokens=100, samples=1)
"""
#: Scripts, iterations, generated tokens and tokens of prompts; each prompt has 3 tokens and 8 + 4 generated ones.
REQUESTS = {
    "calls of generate and chat": (ENGINE + "llm.generate(['a', 'b']); llm.chat(['c']); llm.chat(['d'])", 3, 48, 12),
    "in a request": (ENGINE + "for _ in range(2):\n    with effllm.request(): llm.chat(['a', 'b'])", 2, 48, 12),
    "in a manual loop": (ENGINE + LOOP, 4, 48, 12),
    "a request that raises": (RAISES, 2, 10, 0),
}


@pytest.mark.system("vllm", how="stand-in")
@pytest.mark.parametrize(("script", "iterations", "generated", "prompt"), REQUESTS.values(), ids=REQUESTS)
def test_each_request_is_counted_once(tmp_path, script, iterations, generated, prompt):
    _, (run_,) = run(tmp_path, script)

    assert run_.summary["iterations"] == iterations
    assert (run_.sum("generated_tokens"), run_.sum("prompt_tokens")) == (generated, prompt)
    if script.endswith(LOOP):
        assert run_.values["al_seconds"] >= 0.02, "generation is part of an iteration"
        assert "generation" not in run_.summary["time_by_class"]
    elif "chat(['c'])" in script:
        assert (run_.facts["framework"], run_.summary["samples"]) == ("vllm", 4)


@pytest.mark.alone
@pytest.mark.system("vllm", how="stand-in")
def test_step_time_excludes_generation_in_a_training_step(tmp_path):
    _, (run_,) = run(
        tmp_path,
        ENGINE
        + """
from effllm.hooks._steps import Steps
steps = Steps(1, "a framework")
steps.begin_training(parameter_share={"total": 1000})
for _ in range(4):
    steps.start_step()
    llm.chat(['a'])
    time.sleep(0.01)
    steps.end_step(100, 1)
steps.finish()
""",
    )

    assert (run_.summary["iterations"], run_.summary["tokens"], run_.sum("generated_tokens")) == (4, 400, 48)
    assert 0.08 <= run_.sum("generation_s") < 0.3
    assert 0.01 <= run_.values["al_seconds"] < 0.02, "a step must not include 0.02 s of generation"
    assert run_.summary["time_by_class"]["generation"] == pytest.approx(run_.sum("generation_s"), rel=0.05)


def test_training_after_a_trial_generation_is_a_separate_run(tmp_path):
    _, runs = run(
        tmp_path,
        ENGINE
        + """
llm.generate(['a trial'])
from effllm.hooks._steps import Steps
steps = Steps(1, "a framework")
steps.begin_training(parameter_share={"total": 1000})
for _ in range(3):
    steps.start_step()
    time.sleep(0.01)
    steps.end_step(100, 1)
steps.finish()
""",
    )

    by_iterations = {one.summary["iterations"]: one for one in runs}
    assert sorted(by_iterations) == [1, 3]
    assert (by_iterations[1].sum("generated_tokens"), by_iterations[3].sum("generated_tokens")) == (12, 0)
    assert by_iterations[3].facts["framework"] == "a framework"


def test_generation_with_several_ranks_starts_no_metrics(tmp_path):
    _, runs = run(tmp_path, ENGINE + "llm.generate(['a'])\n", RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")

    assert runs == []


def test_unknown_engine_result_stops_counting_and_logs_one_warning(tmp_path):
    done, (run_,) = run(
        tmp_path,
        ENGINE
        + """
LLM.generate.__wrapped__  # it is wrapped
class Odd(LLM): pass
found = []
def odd(self, prompts):
    return [N(text="no tokens")]
odd_holder = type("LLM", (), {"generate": odd, "chat": LLM.chat})
attach_vllm(N(LLM=odd_holder))
print(len(odd_holder().generate(["a"])), len(odd_holder().generate(["a"])))
""",
    )

    assert done.stdout == "1 1\n"
    assert "vLLM is not measured any more, training goes on: AttributeError" in done.stderr
    assert (run_.summary["iterations"], run_.sum("generated_tokens")) == (1, 0)
