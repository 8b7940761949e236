"""Statistics of values of instruments: merged over parts, by window of a rank, and after a restart."""

import bisect
import math
import random
import statistics

import pytest
from cases import cases, repeats
from sink_examples import make_summary

from effllm.agent import measuring
from effllm.agent.measuring import InstrumentValues
from effllm.job.ledger import Ledger, restore
from effllm.records import ring, values
from effllm.records.values import merge_by_name, merge_statistics, summaries
from effllm.trainer.declared import Declared
from effllm.views.text.summary import summary_text


def slot(value, index=0, ordinal=1, number=0):
    return ring.Slot(1, ring.VALUES, 1, ordinal, number, 0, 0, 0.0, 0, 0, (), 0, (), ((index, value),))


def taken_of(*slots):
    """Return the values of these records, each with its window."""
    taken = InstrumentValues()
    for record, window in slots:
        taken.add_record(record, window)
    return taken


def statistics_of(numbers):
    return taken_of(*((slot(number), 1) for number in numbers)).take_values(1, ["loss"], 0.0, is_last=False)["loss"]


def test_merged_statistics_of_parts_equal_statistics_of_all_values():
    randoms = random.Random(7)
    parts = [[randoms.gauss(5, 2) for _ in range(size)] for size in (500, 1, 3000)]
    everything = [number for part in parts for number in part]
    whole = summaries({"loss": merge_statistics([statistics_of(part) for part in parts])})["loss"]

    assert (whole.count, whole.least, whole.most) == (3501, min(everything), max(everything))
    assert whole.mean == pytest.approx(statistics.fmean(everything))
    assert whole.std == pytest.approx(statistics.stdev(everything))
    cuts = statistics.quantiles(everything, n=100)
    assert whole.percentiles == pytest.approx({f"p{n}": cuts[n - 1] for n in values.PERCENTILES}, abs=0.2)


def test_nan_and_infinite_values_are_counted_and_not_averaged():
    numbers = [1.0, math.nan, math.inf, -math.inf, 1e31, 3.0]
    found = summaries({"loss": statistics_of(numbers), "none": statistics_of([math.nan])})
    loss, none = found["loss"], found["none"]

    assert (loss.count, loss.mean, loss.not_finite) == (2, 2.0, {"nan": 1, "inf": 2, "-inf": 1})
    assert (none.count, none.mean, none.percentiles, none.not_finite) == (0, None, {}, {"nan": 1})


def test_unit_is_read_from_the_end_of_the_name():
    one = statistics_of([1.0])
    found = summaries({"timing/forward_seconds": one, "memory/peak_bytes": one, "loss": one})

    assert {name: value.unit for name, value in found.items()} == {
        "loss": "", "memory/peak_bytes": "bytes", "timing/forward_seconds": "s",
    }  # fmt: skip


def test_values_are_in_the_report_of_their_window():
    taken = taken_of((slot(1.0), 1), (slot(2.0), 2), (slot(3.0, index=1), 2))

    assert taken.take_values(1, ["loss"], 0.0, is_last=False)["loss"].total == 1.0
    second = taken.take_values(5, ["loss"], 0.0, is_last=False)  # the name of the second index is not known
    assert {name: one.total for name, one in second.items()} == {"loss": 2.0}
    assert taken.take_values(5, ["loss"], 0.0, is_last=True) == {}


def test_missing_percentile_library_is_reported_once(monkeypatch):
    monkeypatch.setattr(measuring, "digest_type", lambda: None)
    taken = taken_of((slot(1.0), 1), (slot(2.0), 1))
    found = summaries(taken.take_values(1, ["loss"], 0.0, is_last=False))["loss"]

    assert (found.count, found.total, found.percentiles) == (2, 3.0, {})
    assert "pip install 'effllm[instruments]'" in taken.take_notice()
    assert taken.take_notice() == ""


def test_overwritten_values_are_counted_in_one_line():
    taken = taken_of(*((slot(1.0, number=number), 1) for number in (1, 2, 6)))

    assert taken.take_notice().startswith("3 values of instruments are missing")
    assert taken.take_notice() == ""


@cases(("per_window", "error"), [(200, 1.0), (10, 1.0), (5000, 3.0)][: repeats(1, 3)])
@cases("shape", ["normal", "pareto", "falling", "two peaks"])
def test_rank_of_a_percentile_of_a_run_has_a_bounded_error(shape, per_window, error):
    chance = random.Random(3)
    draw = {
        "normal": lambda _: chance.gauss(0.0, 1.0),
        "pareto": lambda _: chance.paretovariate(1.5),
        "falling": lambda number: 1 / (1 + number / 1000) + 0.05 * chance.random(),
        "two peaks": lambda _: chance.gauss(0.0 if chance.random() < 0.9 else 100.0, 1.0),
    }[shape]
    numbers, published = [draw(number) for number in range(20_000)], []
    taken = InstrumentValues(lambda known: published.append(known) or True)
    for at, number in enumerate(numbers):
        taken.add_record(slot(number), at // per_window)
        if at % per_window == per_window - 1:
            taken.take_values(at // per_window, ["loss"], float(at), is_last=False)
    ordered, (count, *found) = sorted(numbers), published[-1]["loss"]
    ranks = [100 * bisect.bisect(ordered, value) / len(ordered) for value in found]

    assert count == len(numbers)
    assert ranks == pytest.approx(values.PERCENTILES, abs=error)
    assert [ranks[0], *ranks[4:]] == pytest.approx([5, 95, 99], abs=1.0)


def test_published_percentiles_cover_the_whole_run():
    published = []
    taken = InstrumentValues(lambda known: published.append(known) or len(known) < 2)
    for window in (1, 2):
        for index in (0, 1):
            taken.add_record(slot(float(window), index), window)
        taken.take_values(window, ["loss", "reward"], float(window), is_last=False)

    assert [list(known) for known in published] == [["loss", "reward"], ["loss"]] * 2, "without room: half of the names"
    assert published[-1]["loss"][0] == 2
    assert published[-1]["loss"][3] == pytest.approx(1.5)


def test_merged_names_above_the_limit_are_not_kept():
    one = statistics_of([1.0])
    many = merge_by_name({str(number): one} for number in range(values.MAX_NAMES + 5))

    assert list(many) == [str(number) for number in range(values.MAX_NAMES)]


def test_restarted_aggregator_keeps_the_values_of_instruments():
    ledger = Ledger(attempt=1, job="", started_time_s=0.0)
    ledger.values = {"loss": statistics_of([1.0, math.nan, 4.0])}

    assert restore(ledger.encode({})).values == ledger.values


def test_sums_of_the_largest_numbers_stay_finite():
    huge = merge_statistics(
        [values.ValueStatistics(1, number, 0.0, number, number) for number in (1.7e308, -1.7e308, 1.7e308)]
    )

    assert all(map(math.isfinite, (huge.total, huge.squares)))


def test_summary_text_has_a_table_of_the_first_40_instrument_names():
    found = summaries({"loss": statistics_of([1.0, 2.0, 3.0, math.nan]), "a\x1b[2J": statistics_of([5.0])})
    many = {f"metric/{number:02}": found["loss"] for number in range(41)}
    lines = summary_text(make_summary(instruments=found | many)).splitlines()
    table = [line.split() for line in lines]

    assert ["loss", "3", "2", "2", "2.9", "3"] in table
    assert "    not finite: 1 nan" in lines
    assert "  3 more names are in summary.json" in lines
    assert max(map(len, lines)) <= 80
    assert all(line.isprintable() for line in lines)


def test_names_beyond_the_limit_are_left_out_and_give_one_warning():
    sent = []
    declared = Declared(lambda: sent.append(len(declared.facts.value_names)))
    indices = [declared.value_index(f"metric/{number}") for number in range(ring.MAX_VALUE_NAMES + 2)]

    assert indices == [*range(ring.MAX_VALUE_NAMES), -1, -1]
    assert declared.value_index("metric/3") == 3
    (line,) = declared.facts.warnings
    assert "no values of metric/200 and later names" in line
    assert len(sent) == ring.MAX_VALUE_NAMES + 1


def test_largest_number_of_longest_names_fits_into_the_ring():
    declared = Declared()
    for number in range(ring.MAX_VALUE_NAMES):
        declared.value_index(f"{number:03}" + "\N{SNOWMAN}" * 97)
    writer = ring.RingWriter(16)

    assert writer.write_facts(declared.facts)
    assert ring.RingReader(writer.descriptor).take_facts()["value_names"] == list(declared.facts.value_names)
    writer.close()
