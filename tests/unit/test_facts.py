"""Facts of a rank and values of a job as JSON in shared memory, also from another version or a hostile writer."""

import json
from dataclasses import fields, replace

import msgspec
import pytest
from cases import cases

from effllm.agent.trainer import Trainer
from effllm.config.place import Place
from effllm.config.settings import Config
from effllm.records.board import Board, JobState
from effllm.records.facts import DeclaredParameters, FoundAddress, RankFacts, to_document
from effllm.records.ring import RingReader, RingWriter

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


@pytest.fixture
def writer():
    one = RingWriter(16)
    one.write_facts(FULL)
    yield one
    one.close()


@pytest.fixture
def trainer(writer):
    board = Board()
    reader = RingReader(writer.descriptor)
    yield Trainer(reader, board, -1)
    reader.close()
    board.close()


@cases("record", [RankFacts(), FULL, FoundAddress("tcp://127.0.0.1:1", "a")])
def test_record_round_trips(record):
    assert msgspec.convert(json.loads(json.dumps(to_document(record))), type(record)) == record


def test_missing_fields_get_defaults_and_new_fields_are_ignored(writer, trainer):
    writer._facts.write({"host": "a", "colour": "red", "total_iterations": None})

    assert trainer.take_facts() == ()
    assert trainer.facts == RankFacts(host="a")


WRONG = [None, "text", "7", -1.5, True, 2**63, [], ["a", None], [1.5], {}, {"a": "b"}, {"total": "many", "is_share": 1}]


@cases("name", [one.name for one in fields(RankFacts)])
@cases("value", WRONG)
def test_facts_with_a_value_of_a_wrong_type_are_dropped_with_a_line(writer, trainer, name, value):
    before = trainer.facts
    writer._facts.write({"host": "a", name: value})

    lines = trainer.take_facts()
    if trainer.facts is before:
        assert lines is None if value == 2**63 else "cannot be read: Expected" in lines[0]
    else:
        found = getattr(trainer.facts, name)
        assert lines == ()
        assert trainer.facts == replace(RankFacts(), **{"host": "a", name: found})
        assert msgspec.convert(to_document(trainer.facts), RankFacts) == trainer.facts


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
        ("run", {"a": {}}),
        ("run", {"b": 2**63}),
        ("run", {"c": ["d", 1]}),
        ("config", {"log_interval": "10"}),
        ("parameters", 7),
        ("parameters", {"total": "many", "is_share": "yes"}),
    ],
)
def test_facts_with_a_wrong_value_change_nothing(writer, trainer, name, value):
    writer._facts.write({name: value})

    trainer.take_facts()
    assert trainer.facts == FULL


def test_address_of_a_wrong_type_is_a_reason_of_missing_metrics(writer, trainer):
    writer._address.write({"endpoint": 7})

    assert trainer.take_address().failed.endswith("cannot be read: Expected `str`, got `int` - at `$.endpoint`")
    assert trainer.facts == FULL


@cases(
    "document",
    [
        {"report": 2, "values": {"al": "fast"}},
        {"report": 2, "values": {"al": None}},
        {"report": 2, "values": {"al": 10**400}},
        {"report": 2, "values": [1.0]},
        {"report": "two"},
        {"report": None},
        {"colour": "red"},
    ],
)
def test_forged_state_of_a_job_changes_nothing(document):
    board = Board()
    board.write(JobState(1, 10, {"al": 2.5}))
    board.read()
    board._document.write(document)

    assert board.read() == JobState(1, 10, {"al": 2.5})
    board.close()
