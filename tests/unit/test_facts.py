"""effllm/records/facts.py: facts of a rank as JSON, also from another version or a hostile writer."""

import json
from dataclasses import fields

from cases import cases

from effllm.config.place import Place
from effllm.config.settings import Config
from effllm.records.board import JobState
from effllm.records.facts import DeclaredParameters, FoundAddress, RankFacts, from_document, to_document

FULL = RankFacts(
    config=Config(sinks=("console",), peak_tflops=989.0),
    place=Place(rank=3, restart_id="a"),
    parameters=DeclaredParameters(total=7, is_share=True),
    gpus=(0, 2),
    baseline_ns=(1, 2),
    run={"model": "small", "layers": 12, "none": None},
    flops_per_token=6e9,
    warnings=("a", "b"),
)


def carried(record):
    return from_document(type(record), json.loads(json.dumps(to_document(record))))


@cases("record", [RankFacts(), FULL, FoundAddress("tcp://127.0.0.1:1", "a"), JobState(3, 4, {"al": 1})])
def test_record_round_trips(record):
    assert carried(record) == record


def test_missing_fields_get_defaults_and_new_fields_are_ignored():
    assert from_document(RankFacts, {"host": "a", "colour": "red", "total_iterations": None}) == RankFacts(host="a")


WRONG = [None, "text", "7", -1.5, True, 2**63, [], ["a", None], [1.5], {}, {"a": "b"}, {"total": "many", "is_share": 1}]


@cases("name", [one.name for one in fields(RankFacts)])
@cases("value", WRONG)
def test_value_of_a_wrong_type_is_replaced_by_the_default(name, value):
    facts = from_document(RankFacts, {"host": "a", "trainer_pid": 7, name: value})

    default, found = getattr(RankFacts(), name), getattr(facts, name)
    assert default is None or type(found) is type(default) or name == "run"
    assert carried(facts) == facts
    assert facts.host == "a" or name == "host"
    assert facts.trainer_pid == 7 or name == "trainer_pid"


@cases(
    ("name", "value"),
    [
        ("first_iteration", True),
        ("first_iteration", 2**63),
        ("secured", 1),
        ("flops_per_token", "6e9"),
        ("flops_per_token", 10**400),
        ("gpus", [0, "1"]),
        ("warnings", "text"),
        ("run", [["a", 1]]),
        ("run", {"a": {}, "b": 2**63, "c": ["d", 1]}),
        ("config", {"log_interval": "10"}),
        ("parameters", 7),
        ("parameters", {"total": "many", "is_share": "yes"}),
    ],
)
def test_wrong_value_of_a_fact_is_treated_as_missing(name, value):
    assert from_document(RankFacts, {name: value}) == RankFacts()


def test_values_of_a_job_that_are_not_numbers_are_ignored():
    assert from_document(JobState, {"report": 2, "values": {"al": "fast"}}) == JobState(report=2)
