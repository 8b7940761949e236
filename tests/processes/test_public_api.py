"""The public names of the original project are unchanged; their import has no effect.

These tests start almost no processes; end-to-end tests cover the calls in a job.
"""

import inspect
import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from builders import hello
from cases import cases

import effllm
from effllm import efficientllm_metrics as original
from effllm.network.transport import decode_from_agent, encode
from effllm.records.facts import DeclaredParameters, RankFacts, to_document
from effllm.trainer import collector as module
from effllm.trainer.collector import MetricsCollector

TAGS = {
    "efficientllm/amu_gb",
    "efficientllm/pcu_ratio",
    "efficientllm/al_seconds",
    "efficientllm/tt_tokens_per_param_per_sec",
    "efficientllm/st_samples_per_param_per_sec",
    "efficientllm/aec_watts",
}
CALCULATED = ("amu", "pcu", "al", "tt", "st", "aec")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Reset the collector of the process and change to an empty folder, in which tests see written files."""
    monkeypatch.setattr(module, "_collector", None)
    monkeypatch.chdir(tmp_path)


def parameters(function):
    """Return the parameters of a function as {name: default}; a parameter without a default has the value ``...``."""
    found = inspect.signature(function).parameters.values()
    return {
        one.name: ... if one.default is one.empty else one.default
        for one in found
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name != "self"
    }


METHODS = {
    "start_collection": {},
    "stop_collection": {},
    "record_iteration_start": {},
    "record_iteration_end": {"tokens_processed": 0, "samples_processed": 0},
    "record_step_start": {},
    "record_step_end": {"tokens_processed": None, "samples_processed": None},
    "set_model_parameters": {"model_parameters": None, "num_parameters": None},
    "set_batch_config": {"sequence_length": ..., "batch_size": ...},
    "calculate_amu": {},
    "calculate_pcu": {},
    "calculate_al": {},
    "calculate_tt": {},
    "calculate_st": {},
    "calculate_aec": {},
    "calculate_it": {"tokens_generated": ..., "total_inference_time": ...},
    "get_all_metrics": {},
    "reset": {},
}


@cases(("name", "expected"), METHODS.items())
def test_methods_of_the_original_collector_are_unchanged(name, expected):
    found = parameters(getattr(MetricsCollector, name))

    assert {key: found[key] for key in expected} == expected
    assert all(default is not ... for key, default in found.items() if key not in expected), (
        "new parameters are optional"
    )


def test_arguments_of_the_original_collector_are_unchanged():
    assert list(parameters(MetricsCollector)) == ["collection_interval", "history_size"]
    assert list(parameters(MetricsCollector.log_metrics))[:3] == ["iteration", "loss", "writer"]
    MetricsCollector(1.0, 1000)
    MetricsCollector(collection_interval=0.5, history_size=100)


def test_functions_and_names_of_the_original_module_are_unchanged():
    for name in ("get_metrics_collector", "get_efficientllm_collector", "finalize_efficientllm_metrics"):
        assert parameters(getattr(original, name)) == {}
    assert parameters(original.should_log_metrics) == {"iteration": None, "step": None}
    assert original.EfficientLLMCollector is original.MetricsCollector
    collector = original.get_metrics_collector()
    assert collector is effllm.get_metrics_collector() is original.get_efficientllm_collector()
    assert list(vars(effllm.EfficientLLMMetrics())) == ["amu", "pcu", "al", "tt", "st", "it", "aec"]


def test_keywords_of_llama_factory_are_accepted(launch):
    job = launch.code(
        "import effllm\n"
        "collector = effllm.initialize_efficientllm_metrics(1000)\n"
        "collector.set_model_parameters(num_parameters=2000)\n"
        "class Writer:\n"
        "    def add_scalar(self, *_): pass\n"
        "for step in range(1, 11):\n"
        "    collector.record_step_start()\n"
        "    collector.record_step_end(10, 1)\n"
        "    if effllm.should_log_metrics(step=step):\n"
        "        print('logged', step, sorted(collector.log_metrics(step=step, loss=step / 2, tb_writer=Writer())))\n"
        "assert effllm.should_log_metrics() is False\n"
        "effllm.finalize_efficientllm_metrics()\n",
        log_interval=5,
    ).done()

    assert job.stderr == ""
    assert [line.split()[1] for line in job.stdout.splitlines() if line.startswith("logged")] == ["5", "10"]
    assert [(block["iteration"], block["loss"]) for block in job.blocks] == [("5", "2.500000"), ("10", "5.000000")]
    assert job.ledger.summary.parameters == 2000


def test_calls_before_initialize_do_nothing(capfd, tmp_path):
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    collector = effllm.get_metrics_collector()
    for number in range(100):
        collector.record_iteration_start()
        collector.record_iteration_end(512, 4)
        collector.record_step_start()
        collector.record_step_end()
        assert not effllm.should_log_metrics(number)
    with collector.phase("evaluation"), effllm.phase("checkpoint"):
        collector.reset()
    collector.log_metrics(10, 3.25)
    effllm.finalize_efficientllm_metrics()
    collector.stop_collection()

    assert not collector.is_collecting
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/fd").iterdir())) <= files
    assert_silent(capfd, tmp_path)


def assert_silent(capfd, folder):
    """Check that nothing was printed and no file was written."""
    assert list(folder.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_every_value_is_nan_before_initialize():
    collector = effllm.get_metrics_collector()

    assert all(math.isnan(getattr(collector, f"calculate_{name}")()) for name in CALCULATED)
    assert all(math.isnan(value) for value in vars(collector.get_all_metrics()).values())
    for logged in (collector.log_metrics(10, 3.25), collector.log_metrics(10, 3.25, None)):
        assert set(logged) == TAGS
        assert all(math.isnan(value) for value in logged.values())
        assert f"{logged['efficientllm/aec_watts']:.2f}" == "nan", "users format the values in their loops"


def test_disabled_metrics_do_nothing(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("EFFICIENTLLM_METRICS_ENABLED", "false")
    monkeypatch.setenv("EFFICIENTLLM_LOG_INTERVAL", "not even looked at")
    collector = effllm.initialize_efficientllm_metrics(7_000_000_000, 0.5)
    collector.start_collection()

    assert not collector.is_collecting
    assert not effllm.should_log_metrics(10)
    with effllm.monitor(parameters=5) as m:
        assert set(m.iteration(tokens=1)) == TAGS
    effllm.finalize_efficientllm_metrics()
    assert_silent(capfd, tmp_path)


@pytest.fixture
def off(monkeypatch):
    monkeypatch.setenv("EFFICIENTLLM_METRICS_ENABLED", "off")


def test_initialize_accepts_arguments_in_both_original_orders(off):
    megatron = effllm.initialize_efficientllm_metrics(1000, 0.25)
    assert megatron.lifecycle.overrides["collection_interval_s"] == 0.25
    assert megatron.declared.facts.parameters == DeclaredParameters(total=1000)

    llama_factory = effllm.initialize_efficientllm_metrics(2000, 4096, 8, 0.5)
    assert llama_factory is megatron
    assert llama_factory.lifecycle.overrides["collection_interval_s"] == 0.5
    assert llama_factory.declared.facts.run == {"sequence_length": 4096, "batch_size": 8}
    assert llama_factory._batch == (4096 * 8, 8)

    effllm.initialize_efficientllm_metrics(model_parameters=1, sequence_length=2, batch_size=3, collection_interval=4.0)
    assert (llama_factory._batch, llama_factory.lifecycle.overrides["collection_interval_s"]) == ((6, 3), 4.0)

    effllm.initialize_efficientllm_metrics(parameter_share={"total": 5, "trainable": 0})
    assert megatron.declared.facts.parameters == DeclaredParameters(total=5, trainable=0, is_share=True)


class Hostile:
    def __str__(self):
        raise RuntimeError

    __repr__ = __int__ = __float__ = __str__


def carried(facts):
    return msgspec.convert(json.loads(json.dumps(to_document(facts))), RankFacts)


ODD = [Path("/data"), {"layers": 12}, 2**70, [1, "a", None], float("nan"), b"x", "\udc80", Hostile(), print, {1, 2}]


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_facts_of_any_type_can_be_written(off, value):
    collector = effllm.initialize_efficientllm_metrics(
        1000, facts={"a": value, 7: value}, total_iterations=value, flops_per_token=value
    )
    collector.record_facts(b=value)
    collector.set_model_parameters(value)

    facts = carried(collector.declared.facts)
    frame = hello(facts=facts.run, flops_per_token=facts.flops_per_token)
    assert set(decode_from_agent(encode(frame)).facts) == {"a", "7", "b"}


FACTS_LIMIT = "at most 450 facts with 40,000 bytes and names of 255 characters are stored"


@pytest.mark.parametrize(
    ("given", "stored", "warning"),
    [
        ({f"arg_{i}": i for i in range(700)}, 450, f"facts: 250 left out of run.json: {FACTS_LIMIT}"),
        ({"a": 1, "b" * 256: 2}, 1, f"facts: 1 left out of run.json: {FACTS_LIMIT}"),
        ({"a": 1, "long": "x" * 100_000, "b": 2}, 2, f"facts: 1 left out of run.json: {FACTS_LIMIT}"),
        (5, 0, "facts: an object of type int is no dictionary"),
    ],
)
def test_facts_are_limited_and_the_rest_is_counted_in_one_line(off, given, stored, warning):
    collector = effllm.initialize_efficientllm_metrics(1000, facts=given)
    for number in range(1000):
        collector.record_facts(**{f"{'c' * 256}{number}": 1})
    collector.set_batch_config(8, 2)

    facts = carried(collector.declared.facts)
    assert len(facts.run) == stored + 2
    assert facts.run["sequence_length"] == 8
    assert facts.warnings == (warning,)
    decode_from_agent(encode(hello(facts=facts.run)))


def test_fact_of_half_of_the_limit_can_be_replaced(off):
    collector = effllm.initialize_efficientllm_metrics(1000, facts={"notes": "a" * 30_000})
    collector.record_facts(notes="b" * 30_000)

    assert collector.declared.facts.run["notes"] == "b" * 30_000
    assert collector.declared.facts.warnings == ()


def test_wrong_batch_configuration_at_the_start_is_a_warning(off):
    collector = effllm.initialize_efficientllm_metrics(1000, sequence_length="long", batch_size=8)

    assert collector.declared.facts.warnings == (
        "set_batch_config: two counts of at least 0 are needed; a call is ignored",
    )


def test_throughput_of_wrong_arguments_is_nan_and_not_zero(off):
    collector = effllm.initialize_efficientllm_metrics(1000)

    assert (collector.calculate_it(10.5, 2.0), collector.calculate_it(0, 2.0)) == (5.25, 0.0)
    assert math.isnan(collector.calculate_it("many", 2.0)) and math.isnan(collector.calculate_it(1, 0))


@cases("given, total", [(0, None), (-5, None), ("many", None), (float("nan"), None), (2**70, None), (1.5e3, 1500)])
def test_invalid_parameter_count_is_unknown(off, given, total):
    collector = effllm.initialize_efficientllm_metrics(1000)
    collector.set_model_parameters(given)

    assert carried(collector.declared.facts).parameters.total == total


def test_exceptions_of_the_loop_are_not_suppressed(off):
    for error in (ZeroDivisionError, KeyboardInterrupt):
        for block in (effllm.monitor(5), effllm.phase("evaluation"), effllm.get_metrics_collector().phase("other")):
            with pytest.raises(error), block:
                raise error


@cases("name", [name for name in effllm.__all__ if name != "__version__"])
def test_every_public_name_has_a_docstring(name):
    found = getattr(effllm, name)
    methods = inspect.getmembers(found, lambda one: inspect.isroutine(one) or isinstance(one, property))
    documented = {name: found} | ({of: one for of, one in methods if of[0] != "_"} if inspect.isclass(found) else {})

    assert [of for of, one in documented.items() if not inspect.getdoc(one)] == []


@pytest.mark.parametrize("code", ["from effllm import *", "help(effllm)", "inspect.getmembers(effllm)"])
def test_package_can_be_inspected_without_transformers(code):
    without = "sys.modules['transformers'] = None"  # the import of transformers fails, as if not installed

    done = subprocess.run(
        [sys.executable, "-c", f"import sys, inspect; {without}; import effllm; {code}"],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=200,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
