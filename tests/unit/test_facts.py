"""Facts of a rank, values of a job and text, also from another version or a hostile writer; and the clock."""

import json
from dataclasses import fields, replace
from types import SimpleNamespace

import msgspec
import pytest
from cases import cases

from effllm.agent.trainer import Trainer
from effllm.config.place import Place
from effllm.config.settings import Config
from effllm.records import clock
from effllm.records.board import Board, JobState
from effllm.records.facts import DeclaredParameters, FoundAddress, RankFacts, to_document
from effllm.records.plain_text import MAX_SHOWN, one_line
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
    writer._facts.write_document({"host": "a", "colour": "red", "total_iterations": None})

    assert trainer.take_facts() == ()
    assert trainer.facts == RankFacts(host="a")


WRONG = [None, "text", "7", -1.5, True, 2**63, [], ["a", None], [1.5], {}, {"a": "b"}, {"total": "many", "is_share": 1}]


@cases("name", [one.name for one in fields(RankFacts)])
@cases("value", WRONG)
def test_facts_with_a_value_of_a_wrong_type_are_dropped_with_a_line(writer, trainer, name, value):
    before = trainer.facts
    writer._facts.write_document({"host": "a", name: value})

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
    writer._facts.write_document({name: value})

    trainer.take_facts()
    assert trainer.facts == FULL


def test_address_of_a_wrong_type_is_a_reason_of_missing_metrics(writer, trainer):
    writer._address.write_document({"endpoint": 7})

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
    board.write_state(JobState(1, 10, {"al": 2.5}))
    board.read_state()
    board._document.write_document(document)

    assert board.read_state() == JobState(1, 10, {"al": 2.5})
    board.close()


HOSTILE = [
    "node\x1b[2J\x1b[1;1H7",
    "node\r\n[EfficientLLM] Run completed",
    "a\x00b\x07c\x08\x08\x08",
    "\x9b31mred",
    "\x1b]0;title\x07",
    "safe\u202etxt.exe",
    "a\u2028b\u2029c\u0085d",
    "\ud800 lone",
]


@cases("text", HOSTILE)
def test_hostile_text_becomes_one_printable_line(text):
    assert one_line(text).isprintable()
    assert len(one_line(text).splitlines()) == 1


@pytest.mark.parametrize("text", ["rank 3 joined from node-7", "größer als ±5 % · 中文", ""])
def test_plain_text_is_unchanged(text):
    assert one_line(text) == text


def test_long_text_is_cut():
    assert len(one_line("x" * 10**6)) == MAX_SHOWN
    assert one_line("x" * 10**6).endswith("x…")


def test_pause_between_two_clocks_does_not_change_their_offset(monkeypatch):
    """The unix clock is 1,000 s ahead; in the first two tries the process is stopped for 5 ms after a read."""
    now_ns, pauses_ns = [0], iter([5_000_000, 0, 0, 0, 5_000_000, 0])

    def read(offset_ns):
        at_ns = now_ns[0]
        now_ns[0] += 100 + next(pauses_ns, 0)
        return at_ns + offset_ns

    clocks = SimpleNamespace(monotonic_ns=lambda: read(0), time_ns=lambda: read(10**12))
    monkeypatch.setattr(clock, "time", clocks)

    assert clock.unix_minus_monotonic_ns() == 10**12
