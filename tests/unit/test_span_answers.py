"""Spans: answers in shared memory, and the samples that chains keep in the agent."""

import mmap
from types import SimpleNamespace

import pytest
from builders import NS

from effllm.agent.series import Series
from effllm.agent.spans import Spans
from effllm.records.board import Board
from effllm.records.rank import COUNTER, Device, Sample
from effllm.records.ring import SPAN
from effllm.records.spans import ANSWERS_BYTES, NUM_ANSWERS, SpanAnswers, SpanPart

START_S = 1000
HOUR_S = 3600


@pytest.fixture
def memory():
    with mmap.mmap(-1, ANSWERS_BYTES) as memory:
        yield memory


def test_answers_are_read_once_and_in_order(memory):
    answers = SpanAnswers(memory, 0)
    written = [SpanPart(number, 0, 1, number * 10, number * 10 + 5, joules=number / 3) for number in (1, 2, 3)]
    for part in written:
        answers.write_part(part)

    assert repr(answers.read_parts(0)) == repr((written, 3))  # nan is not equal to nan
    assert answers.read_parts(3) == ([], 3)


def test_overwritten_answers_are_left_out(memory):
    answers = SpanAnswers(memory, 0)
    for number in range(1, NUM_ANSWERS + 8):
        answers.write_part(SpanPart(number, 0, 1, number, number + 1))
    parts, newest = answers.read_parts(0)

    assert (len(parts), newest) == (NUM_ANSWERS, NUM_ANSWERS + 7)
    assert parts[0].number == 8


def test_half_written_answer_is_read_again(memory):
    answers = SpanAnswers(memory, 0)
    for number in (1, 2):
        answers.write_part(SpanPart(number, 0, 1, number, number + 1))
    at = answers._slot_offset(2) + 20
    whole = memory[at]
    memory[at] = whole ^ 1

    assert [part.number for part in answers.read_parts(0)[0]] == [1]
    memory[at] = whole
    assert [part.number for part in answers.read_parts(1)[0]] == [2]


class Agent:
    """An agent whose GPU draws N watts in second N; its samples follow the clock of the test."""

    def __init__(self):
        self.board = Board()
        self.spans = Spans(self.board)
        self.series = [Series(Device("GPU-0", "fake", name="Fake", energy_method=COUNTER), 5.0)]
        self.second = START_S

    @property
    def devices(self):
        return SimpleNamespace(
            series=self.series,
            is_calibrating=False,
            patience_s=1.0,
            is_settled=lambda _edge_ns: True,
            torch_indices={"GPU-0": 3},
            unavailable=["no library"],
        )

    def ask(self, number, start_s, end_s, chain=1):
        self.spans.pending.append(
            SimpleNamespace(kind=SPAN, what=chain, number=number, start_ns=start_s * NS, end_ns=end_s * NS)
        )

    def run_to(self, second, has_windows=True):
        """Take samples each second, answer requests, and fold samples; with windows, drop those that none needs."""
        while self.second <= second:
            power_w, at = float(self.second - START_S), self.second
            joules = (power_w**2) / 2
            gauges = {"temperature_c": power_w}
            self.series[0].add_sample(Sample(at * NS, 1e9, 0.5, power_w, joules, gauges=gauges))
            self.spans.answer_requests(self.devices, float(at))
            if has_windows:
                self.series[0].forget_before(at * NS)
            if at % 30 == 0:
                self.series[0].compact([START_S * NS, *self.spans.possible_bounds_ns], at * NS)
            self.second += 1

    def answers(self):
        return self.board.spans.read_parts(0)[0]


@pytest.fixture
def agent():
    agent = Agent()
    yield agent
    agent.board.close()


def test_samples_of_chained_spans_are_kept_after_the_end_of_a_window(agent):
    agent.ask(0, START_S, START_S)
    agent.run_to(START_S + 20)
    agent.ask(1, START_S, START_S + 20)
    agent.run_to(START_S + 21)
    (part,) = agent.answers()

    assert (part.number, part.num_devices, part.covered_s) == (1, 1, 20.0)
    assert part.joules == pytest.approx(20**2 / 2)
    assert (part.power_min_w, part.power_max_w) == (0.0, 20.0)
    assert part.temperature_max_c == 20.0


def test_long_span_has_all_of_its_energy_and_few_samples(agent):
    agent.ask(0, START_S, START_S)
    agent.run_to(START_S + 1000)
    assert len(agent.series[0].samples) < 100
    agent.ask(1, START_S, START_S + 1000)
    agent.run_to(START_S + 1001)
    (part,) = agent.answers()

    assert part.covered_s == pytest.approx(1000.0)
    assert part.joules == pytest.approx(1000**2 / 2)
    assert part.temperature_c_seconds == pytest.approx(1000**2 / 2)
    assert (part.power_min_w, part.power_max_w) == (0.0, 1000.0)
    assert part.memory_byte_seconds == pytest.approx(1000 * 1e9)
    assert part.num_readings == 1001


def test_memory_is_constant_if_spans_end_and_no_window_ends(agent):
    """A monitor in a script without iterations: one span of two seconds after the other."""
    agent.ask(0, START_S, START_S)
    energy, joules, held = agent.series[0].energy, 0.0, []
    for number in range(1, HOUR_S // 2 + 1):
        end_s = START_S + 2 * number
        agent.run_to(end_s, has_windows=False)
        agent.ask(number, end_s - 2, end_s)
        agent.run_to(end_s + 1, has_windows=False)
        ((part,), _) = agent.board.spans.read_parts(number - 1)
        joules += part.joules
        held.append(len(agent.series[0].samples) + len(energy.readings) + len(energy._edge_levels.edges_ns))

    assert max(held) < 200
    assert joules == pytest.approx(HOUR_S**2 / 2, rel=1e-9)
    assert energy.energy(START_S * NS, (START_S + HOUR_S) * NS).joules == pytest.approx(joules)


def test_late_request_of_a_span_covers_only_the_remaining_samples(agent):
    agent.run_to(START_S + 100)
    agent.ask(1, START_S, START_S + 100, chain=0)
    agent.run_to(START_S + 101)
    (part,) = agent.answers()

    assert part.covered_s < 10.0
    assert part.joules == pytest.approx(part.covered_s * 100, rel=0.1)


def test_answer_to_a_rank_without_a_device_has_no_energy(agent):
    agent.series.clear()
    agent.ask(1, START_S, START_S + 5)
    agent.spans.answer_requests(agent.devices, START_S + 6.0)
    (part,) = agent.answers()

    assert (part.device, part.num_devices) == (-1, 0)
    assert part.joules != part.joules
    assert agent.board.devices.read_document() == {"devices": [], "unavailable": ["no library"]}


def test_facts_of_a_device_have_its_index_in_torch(agent):
    agent.ask(1, START_S, START_S + 5)
    agent.run_to(START_S + 6)

    assert agent.board.devices.read_document()["devices"][0]["torch_index"] == 3


def test_samples_are_dropped_if_no_span_was_requested(agent):
    agent.run_to(START_S + 100)

    assert len(agent.series[0].samples) <= 2
