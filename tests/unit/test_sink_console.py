"""The console sink: golden text, the terminal, events and the last table."""

from __future__ import annotations

import io
import math
import os
import pty
import re
from pathlib import Path

import msgspec
import pyte
import pytest
from cases import cases
from sink_examples import complete_totals, make_report, make_run, make_summary, totals, values_of, with_keys

from effllm import metrics
from effllm.config.settings import Config
from effllm.records.events import KINDS
from effllm.records.job import Coverage, EnergySummary, GoodputSummary, Value
from effllm.records.rank import Event, Profile
from effllm.records.verdict import HIGH, Audit, LastRanks, StragglerVerdict, Verdict
from effllm.sinks import open_sink
from effllm.views.text import window as window_text
from effllm.views.text.closing import closing_text, facts_of, how_to_open
from effllm.views.text.numbers import duration, errors_text, readable, rounded_up
from effllm.views.text.summary import summary_text

GOLDEN = Path(__file__).parents[1] / "golden"


class Stream(io.StringIO):
    """A stream that counts its writes and flushes, and may be a terminal."""

    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self.terminal, self.writes, self.flushes = terminal, 0, 0

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)

    def flush(self) -> None:
        self.flushes += 1


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def printed(*shown, terminal=False, form="auto", closed=False):
    """Return what the sink prints for reports and events."""
    stream = Stream(terminal)
    config = Config(sinks=(f"console:format={form}",))
    sink = open_sink("console", make_run(Path("/runs/one"), stdout=stream, config=config, summary=make_summary))
    for one in shown:
        (sink.event if isinstance(one, Event) else sink.write)(one)
    for _ in range(2 if closed else 0):
        sink.close()
    return stream.getvalue()


def golden(name):
    return (GOLDEN / f"console_{name}.txt").read_text()


def test_a_report_prints_the_golden_block():
    assert printed(make_report(100)) == golden("block")


def test_job_on_hosts_with_missing_values_prints_the_golden_block():
    last = with_keys(
        totals(10), gpus=0, energy_j=None, energy_measured_j=None, energy_gpus_j=None, flops_per_token=None
    )
    coverage = Coverage(40, 30, 0, 0, 3, 1, missing_ranks=tuple(range(3, 13)))
    report = make_report(
        70, run=with_keys(last, parameters=None, utilization_mean=None), last=last, style="Step", loss=None,
        coverage=coverage, straggler=None, total_iterations=None, forecast={}, simulated=True,
    )  # fmt: skip

    assert printed(report) == golden("holes")


def test_a_job_that_warms_up_prints_its_window_but_no_block():
    assert printed(make_report(10, warming_up=True)) == golden("warming_up")


def test_value_that_is_not_finite_has_no_line_in_the_block():
    broken = dict.fromkeys(make_report().values, math.nan) | {"al_seconds": math.inf, "pcu_ratio": 0.5}
    text = printed(make_report(100, values=broken, loss=math.nan))

    block = text[text.index("[EfficientLLM Metrics]") :].splitlines()
    assert [line.split(":")[0] for line in block] == [
        "[EfficientLLM Metrics] Iteration 100",
        "  PCU (Ratio)",
        "  Ranks",
    ]
    assert "loss is not finite" in text.splitlines()[-1]
    assert not re.search(r"\b(nan|inf|N/A|None)\b", text)


def test_third_field_of_a_block_line_is_its_number():
    whole = complete_totals(10, 10_000)
    lines = printed(make_report(100, run=whole), make_report(200, run=whole), closed=True).splitlines()

    for entry in metrics.contract_metrics():
        hits = [line for line in lines if entry.console.split("{")[0] in line]
        assert len(hits) == 2
        assert re.fullmatch(r"[0-9.e+-]+", hits[-1].split()[2])


def test_coverage_names_the_scope_and_the_estimated_share():
    run = with_keys(totals(100), energy_estimated_j=0.0201 * totals(100).energy.joules)
    line = printed(make_report(100, run=run, power_scope="gpu+cpu")).splitlines()[-1]

    assert line == "  Ranks: 8/8  GPUs: 8/8  lost 0  late 0  scope gpu+cpu  estimated 2.1 %"


def on_screen(*shown, form="auto"):
    """Return the text sent to a terminal, without control codes."""
    return re.sub(r" {80}\r\x1b\[K|\x1b\[[0-9;]*m", "", printed(*shown, terminal=True, form=form))


def test_a_terminal_of_eighty_columns_shows_the_golden_screen():
    broken = make_report(110, coverage=Coverage(8, 7, 8, 7, 2, 0, missing_ranks=(3,)), loss=math.nan)

    assert on_screen(make_report(100, straggler=None), broken) == golden("terminal")


def test_full_form_on_a_terminal_prints_the_block_in_80_columns():
    last = with_keys(totals(10), energy_error_j=0.2 * totals(10).energy.joules)

    assert on_screen(make_report(100, last=last, simulated=True), form="block") == golden("full")


def test_line_in_a_file_is_one_line_with_all_values():
    (line,) = printed(make_report(100), form="line").splitlines()

    assert line == (
        "it 100/5000  19.9k tok/s/GPU  412 ms  MFU 41.2%  612 W/GPU  30.8 mJ/tok  data 2%  loss 3.246  eta 34m"
    )


@cases("ranks", [1, 8, 8192, 99_999])
@cases("missing_share", [0, 3])
@cases("iterations", [1, 10_000_000])
def test_window_has_one_line_of_80_columns_for_any_numbers(ranks, missing_share, iterations):
    missing = ranks // missing_share if missing_share else 0
    coverage = Coverage(ranks, ranks - missing, ranks, ranks - missing, missing, 0, tuple(range(missing)))
    base = totals(iterations, ranks)
    report = make_report(12 * iterations, run=base, last=base, job=base, coverage=coverage, simulated=True)

    line = window_text.console_line(report, 80)

    assert len(line) <= 80
    assert " tok/s/GPU" in line and "J/tok" in line
    assert (f"{ranks - missing}/{ranks} ranks" in line) is bool(missing)


@cases(
    ("changes", "text"),
    [
        ({"loss": math.nan}, "loss is not finite"),
        ({"coverage": Coverage(8, 6, 8, 6, 0, 0, missing_ranks=(2, 5))}, "6/8 ranks"),
        ({"coverage": Coverage(8, 8, 8, 7, 0, 0)}, "7/8 GPUs"),
        ({"doubtful": ("throughput/mfu_ratio",)}, "MFU 41.2%!"),
    ],
)
def test_line_says_what_is_wrong_with_its_values(changes, text):
    assert text in window_text.console_line(make_report(100, **changes), 80)
    assert text not in window_text.console_line(make_report(100), 80)


def test_long_wait_for_data_is_before_the_loss():
    waiting = with_keys(totals(10), time_s=totals(10).loop.time_s, wait_s=0.3 * totals(10).loop.time_s)
    narrow = window_text.console_line(make_report(100, last=waiting), 76)

    assert "data 3" in narrow and "eta" not in narrow


BAR = " 10%|#         | 10/100 [00:01<00:09, 6.78it/s]"


@pytest.mark.parametrize("is_pipe", [False, True])
def test_line_after_a_progress_bar_in_a_file_begins_a_new_line(tmp_path, is_pipe):
    read, write = os.pipe() if is_pipe else (-1, os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    before = os.dup(2)
    with os.fdopen(write, "w") as stream:
        try:
            if is_pipe:
                os.dup2(write, 2)
            os.write(write, BAR.encode())
            for _ in range(2):
                open_sink("console", make_run(stdout=stream, fact={"progress_bars": is_pipe}.get)).write(make_report())
        finally:
            os.dup2(before, 2)
            os.close(before)
    text = os.read(read, 2**16).decode() if is_pipe else (tmp_path / "log").read_text()

    assert text.startswith(f"{BAR}\n[EfficientLLM Metrics] Iteration 100:\n")
    assert text.count("\n\n") == (1 if is_pipe else 0)


def test_report_does_not_overwrite_a_progress_bar_of_the_training():
    screen = pyte.Screen(80, 24)  # a full line wraps only at the next character, as in real terminals
    terminal = pyte.Stream(screen)
    window = printed(make_report(100, straggler=None), terminal=True).replace("\n", "\r\n")
    for text in (BAR, window, f"\r{BAR}\r\nloss 2.0\r\n", window):
        terminal.feed(text)

    lines = [line.rstrip() for line in screen.display]
    assert [line.split()[0] for line in lines if line] == ["10%|#", "it", "10%|#", "loss", "it"]
    assert lines[0] == lines[2] == BAR


def test_a_report_is_printed_with_one_write_and_one_flush():
    stream = Stream(terminal=True)
    open_sink("console", make_run(stdout=stream)).write(make_report())

    assert (stream.writes, stream.flushes) == (1, 1)


def test_corrections_and_windows_without_iterations_print_nothing():
    assert printed(make_report(correction=True), make_report(iteration_first=101, iteration_last=100)) == ""
    assert "it 100/5000" in printed(make_report(100, final=True), terminal=True)


def test_no_line_of_a_report_is_wider_than_the_terminal():
    missing = Coverage(9999, 9000, 9999, 9000, 10, 10, missing_ranks=tuple(range(1000, 1999)))
    text = on_screen(make_report(100, coverage=missing), form="block")

    assert max(map(len, text.splitlines())) <= 80
    assert "  missing 1000,1001,1002,1003,1004,1005,1006,1007…" in text


@cases(("term", "terminal"), [("xterm", False), ("dumb", True)])
def test_only_a_terminal_gets_control_characters(monkeypatch, term, terminal):
    monkeypatch.setenv("TERM", term)

    assert not re.search(r"[\x00-\x09\x0b-\x1f]", printed(make_report(100), make_report(110), terminal=terminal))


def test_lines_fit_a_real_terminal_of_60_columns():
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stream, os.fdopen(reader, "rb", 0) as screen:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        open_sink("console", make_run(stdout=stream)).write(make_report(100))
        text = screen.read(65536).decode()

    lines = re.sub(r"\x1b\[[0-9;]*[mK]", "", text).replace("\r", "\n").split("\n")
    assert "it 100/5000" in text
    assert max(map(len, lines)) <= 60


def events(kind, text, number=1):
    return [Event(0.0, kind, text.format(at)) for at in range(number)]


def test_notable_events_print_once_without_control_characters():
    lost = events("rank_lost", "rank 3 \x1b[31mis\ngone", 2)

    assert printed(*lost, *events("joined", "rank 4")) == "[EfficientLLM] rank 3 [31mis gone\n"
    assert printed(*events("brand_new", "not registered")) == "[EfficientLLM] not registered\n"


def test_after_twenty_events_of_a_kind_one_line_names_the_event_file():
    lost, xid = events("rank_lost", "rank {} is gone", 100), events("xid", "GPU 0: Xid 79")

    lines = printed(*lost, *xid).splitlines()
    assert len(lines) == 22
    assert lines[19] == "[EfficientLLM] rank 19 is gone"
    assert "events.jsonl" in lines[20]
    assert lines[21] == "[EfficientLLM] GPU 0: Xid 79"
    warned = printed(*events("not_measured", "quantity {}", 100), *events("warning", "rank 0: loss is a CUDA tensor"))
    assert warned.endswith("\n[EfficientLLM] rank 0: loss is a CUDA tensor\n")


def test_event_of_a_problem_is_coloured_and_shows_its_count():
    text = printed(Event(0.0, "xid", "Xid 79", count=3), *events("resumed", "the job goes on"), terminal=True)

    assert "\x1b[1;31m[EfficientLLM] Xid 79 (3 events)\x1b[0m\n" in text
    assert text.endswith("\x1b[K[EfficientLLM] the job goes on\n")


def test_the_end_of_a_run_prints_the_golden_table():
    assert printed(closed=True) == golden("closing")


def test_full_table_of_a_run_equals_the_golden_table():
    text = golden("summary")
    values = {tag: one for tag, one in make_summary().metrics.items() if f" {metrics.metric_of_tag(tag).name} " in text}
    summary = make_summary(metrics=values)

    assert summary_text(summary, facts_of(summary)) == text
    assert max(map(len, text.splitlines())) <= 80


def crowded(**changes):
    """Return a summary in which everything has much to say."""
    whole = complete_totals(10_000_000, 16_384)
    report = make_report(5000, run=whole, last=whole, job=whole)
    seconds = dict.fromkeys(("kept", "redone", "evaluation", "checkpoint", "startup", "gap", "idle", "unknown"), 1e5)
    summary = {
        "metrics": values_of(report),
        "events": dict.fromkeys(KINDS, 123_456),
        "stragglers": (StragglerVerdict((3,), "node b", "GPU-3", 1200, 0.1, 7, "own time"),),
        "last_ranks": LastRanks(5000.0, {3: 4000.0}),
        "audit": Audit(doubts=("The counts of tokens are wrong.", "MFU is too high.")),
        "not_measured": ("This quantity was not measured, for a reason that takes more than one line of a screen.",)
        * 9,
        "goodput": GoodputSummary(8e5, 0.125, seconds, seconds, {}, redone_iterations=1234),
        "coverage": Coverage(16_384, 16_000, 16_384, 16_000, 1000, 10),
        "peak": "989 TFLOP/s per device, dense BF16, by the table of hardware, for NVIDIA H100 80GB HBM3",
        "verdict": Verdict("data_loading", "data loading: " + 9 * "long ", 40 * "why ", 40 * "next ", 0.1, HIGH),
    }
    return make_summary(**summary | changes)


def test_end_on_a_terminal_is_at_most_14_lines_of_80_columns_with_the_verdict_first():
    lines = closing_text(crowded(), Path("/runs/one"), Path("/runs/one/tb"), is_cut=True).splitlines()

    assert len(lines) <= 14
    assert max(map(len, lines)) <= 80
    names = [line.split()[0] for line in lines[1:] if not line.startswith("   ")]
    assert " ".join(names) == "Verdict Why Next Result Energy Paper Ran Slow Doubt Events Missing Open Open"
    assert lines[-2:] == ["  Open     effllm inspect /runs/one", "  Open     tensorboard --logdir /runs/one/tb"]


def test_end_in_a_file_cuts_nothing():
    summary = crowded()
    text = closing_text(summary, Path("/runs/one"), None)

    assert "…" not in text
    assert f"  Why      {40 * 'why '}".rstrip() in text
    assert text.count(f"  Missing  {summary.not_measured[0]}\n") == 9


def test_most_harmful_gaps_are_on_the_terminal_with_their_whole_remedies():
    tokens = "tokens: the training loop counted none; effllm.count(tokens=...) counts them"
    gaps = ("first iteration: not measured, because the metrics began at its optimizer step",
            "evaluation: no period was seen", tokens)  # fmt: skip
    text = closing_text(make_summary(not_measured=gaps), None, None, is_cut=True)

    blind = " ".join(text[text.index("Missing") :].split())
    assert blind == f"Missing {tokens} Missing {gaps[0]} Missing 1 more in summary.txt, not measured"


@pytest.mark.parametrize(("count", "ranks", "is_shown"), [(26, 8, True), (25, 8, False), (26, 3, True), (50, 2, False)])
def test_a_rank_of_many_that_is_last_in_most_iterations_is_named(count, ranks, is_shown):
    coverage = Coverage(ranks, ranks, ranks, ranks, 0, 0)
    last = LastRanks(50.0, {1: 1.0, 3: float(count)})
    text = closing_text(make_summary(last_ranks=last, coverage=coverage), None, None)

    assert (f"  Slow     rank 3, last in {count} of 50 iterations\n" in text) is is_shown


def energy(**changes):
    return {"energy": msgspec.structs.replace(make_summary().energy, **changes)}


# 10,085,760 J are 2.8016 kWh, 5,000 J 0.00139 kWh, 5 % of it 0.14008 kWh.
@cases(
    ("name", "text", "changes"),
    [
        ("energy", "1,234 J ±13 timing", energy(total_joules=1234.0, error_joules=12.3, gain_error=None)),
        (
            "energy",
            "1.00 kWh (3,600,000 J), measured only in part: no total",
            {"energy": EnergySummary(measured_joules=3.6e6)},
        ),
        ("power", "scope gpu+cpu, from counter+average power", energy(scope="gpu+cpu", method="counter+average power")),
        (
            "estimated",
            "2 % of the energy, computed from power in gaps of the counter",
            energy(estimated_joules=201_715),
        ),
        ("estimated", None, energy(estimated_joules=0.0)),
        ("warm-up", "9.9 % of the energy, left out of run-to-date values", energy(warmup_joules=1e6)),
        ("warm-up", None, energy(warmup_joules=0.0)),
        ("time", "iterations 100.0 %", {"time_by_class": {"iterations": 5.0, "evaluation": 0.0, "shutdown": 0.002}}),
        ("slowest", "rank 3, last in 1,234 of 5,000 iterations", {"last_ranks": LastRanks(5e3, {1: 10.0, 3: 1234.0})}),
        ("slowest", None, {}),
        (
            "profiled",
            "8 iterations, all ranks: communication time 50 %, exposed 25 %",
            {"profile": Profile(8, 2.0, 1.0, 0.5, 1.4, 0.2)},
        ),
        ("profiled", None, {}),
    ],
)
def test_table_has_facts_of_the_run(name, text, changes):
    lines = summary_text(make_summary(**changes)).splitlines()

    facts = [line[16:] for line in lines if line.startswith(f"  {name}") and line[14:16].isspace()]
    assert text in facts if text else not facts


def final_table(last=None, **changes):
    """Return the lines of the final table of a run with all measurements."""
    whole = last or complete_totals(5000)
    report = make_report(5000, run=whole, last=whole, job=whole)
    return summary_text(make_summary(metrics=values_of(report), **changes)).splitlines()


def test_table_has_every_measured_metric_once_with_its_unit():
    lines = final_table()

    for entry in metrics.METRICS.values():
        hits = [line for line in lines if line.split()[:1] == [entry.name]]
        assert len(hits) == 1 and f" {entry.unit} " in hits[0]
    groups = {entry.group for entry in metrics.METRICS.values()}
    headings = [line.strip() for line in lines if line.strip() in groups]
    assert len(headings) == len(set(headings)) > 3


def test_table_names_the_timing_and_sensor_errors_of_energy():
    lines = final_table(complete_totals(100))

    # 24.48 J of 201,715 J are 0.0121 %.
    assert "  aec_watts                           4,896  W ±0.013 % ±5 %            run" in lines
    assert "    peak_watts_per_gpu                  698  W ±5 % sensor              run" in lines
    assert "    gpu_cost                          0.229  money                      job" in lines
    assert "  ± (half-widths, 95 %): the first error is by timing, the second by sensor gain" in lines


@pytest.mark.parametrize(("iterations", "gpus"), [(1, 1), (5000, 8), (10_000_000, 16_384)])
def test_no_line_of_the_table_is_wider_than_eighty_columns(iterations, gpus):
    energy = EnergySummary(total_joules=612.0 * gpus * iterations, error_joules=1234.5, gain_error=0.0512)

    lines = final_table(complete_totals(iterations, gpus), energy=energy)

    assert max(map(len, lines)) <= 80


def test_table_marks_simulated_runs_and_metrics_of_a_later_version():
    values = {"amu_gb": Value(45.0, "GiB", error=0.5), "new/thing": Value(1.0, "things")}
    lines = [
        " ".join(line.split())
        for line in summary_text(make_summary("killed", simulated=True, metrics=values)).splitlines()
    ]

    assert lines[0] == "[EfficientLLM] Run killed"
    assert "SIMULATED" in lines[2]
    assert {"amu_gb 45.0 GiB ±1.2 % sampling run", "new/thing 1.00 things"} <= set(lines)


@cases(
    ("folder", "tensorboard", "here", "commands"),
    [
        ("/a b/c", "/a b/c/tb", None, ["effllm inspect '/a b/c'", "tensorboard --logdir '/a b/c/tb'"]),
        ("{}/runs/one", None, "{}", ["effllm inspect runs/one"]),
        (None, "{}/runs/one", "{}", ["tensorboard --logdir runs"]),
        ("{}/runs/one", None, None, ["effllm inspect {}/runs/one"]),
        (None, "/tb/one", None, ["tensorboard --logdir /tb"]),
    ],
)
def test_commands_that_open_a_run_are_quoted(tmp_path, monkeypatch, folder, tensorboard, here, commands):
    monkeypatch.chdir(tmp_path)
    places = [one and Path(one.format(tmp_path)) for one in (folder, tensorboard, here)]

    assert list(how_to_open(*places)) == [one.format(tmp_path) for one in commands]


def test_end_of_a_run_is_printed_in_a_removed_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()

    assert "  Open     effllm inspect /runs/one\n" in closing_text(make_summary(), Path("/runs/one"), None)


@cases(
    ("form", "texts"),
    [
        (readable, {
            0: "0", 0.412: "0.412", 0.0308: "0.0308", 1.234e-6: "1.23e-06", 71.32: "71.3", 99.97: "100", 612.3: "612",
            999.7: "1,000", 19870.4: "19,870", 2.5e20: "2.50e+20", -5.0: "-5.00", 9_999_999_999: "9,999,999,999",
            12_345_678_901: "1.23e+10",
        }),
        (rounded_up, {
            0.0: "0", 0.1: "0.1", 0.1001: "0.11", 0.1201: "0.13", 0.099: "0.099", 0.0991: "0.1", 5.0: "5", 4.91: "5",
            12.34: "13", 99.1: "100", 101.0: "110", 1234.0: "1,300", 0.00138: "0.0014",
        }),
        (duration, {
            0: "0 s", 119.4: "119 s", 119.6: "2 min", 2019: "34 min", 7200: "2 h 0 min", 200_000: "2 d 7 h",
        }),
    ],
)  # fmt: skip
def test_numbers_are_readable(form, texts):
    assert {value: form(value) for value in texts} == texts


def test_small_error_is_rounded_up_to_a_hundredth_of_a_percent():
    assert errors_text(2.4e-6, 0.05) == "±0.01 % timing ±5 % sensor"
    assert errors_text(None, 0.0) == ""
