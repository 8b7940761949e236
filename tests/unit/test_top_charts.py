"""The curves, charts and the map of ranks of ``effllm top``."""

import time

import pytest
from rich.cells import cell_len

from effllm.commands.top_folder import OwnTimes
from effllm.records.job import Coverage, WindowReport
from effllm.store.line_files import LineFiles
from effllm.views.top.charts import CHART_HEIGHT, braille, chart_lines, rank_map_lines, spark_lines
from effllm.views.top.frame import Head, TopFrame
from effllm.views.top.screen import CHARTS_FROM, render
from effllm.views.top.text import ASCII_BARS, BARS, plain
from effllm.views.top.view_state import TopView


def point(at, seconds, loss=None, **values):
    values = {f"throughput/{name}": value for name, value in {"seconds_per_iteration": seconds, **values}.items()}
    values |= {"energy/watts_per_gpu": 600.0 + at % 5} if loss else {}
    return WindowReport(1, at, 10 * at, 1, 10, 1.79e9 + at, loss, values, Coverage(1, 1, 1, 1, 0, 0))


POINTS = [
    point(at, 0.4, 3.0 - 0.01 * at, tokens_per_second_per_gpu=20_000.0 + at % 7, mfu_ratio=0.4) for at in range(100)
]


def width(line):
    return sum(cell_len(text) for text, _ in line)


def test_curves_are_loss_tokens_power_and_mfu_in_two_columns():
    lines = spark_lines(TopFrame(Head("a"), points=POINTS), 80, BARS)

    assert len(lines) == 2 and max(map(width, lines)) <= 80
    text = plain(lines)
    assert [name in text for name in ("loss", "tok/s/GPU", "W/GPU", "MFU %", "s/it")] == [True] * 4 + [False]
    assert "2.01 to 3.00" in text


def test_iteration_time_is_a_curve_if_others_are_not_measured():
    points = [point(at, 0.4 + 0.1 * (at % 2)) for at in range(20)]

    text = plain(spark_lines(TopFrame(Head("a"), points=points), 80, BARS))
    assert text.startswith("s/it ") and "0.400 to 0.500" in text


@pytest.mark.parametrize("bars", [BARS, ASCII_BARS])
def test_charts_have_values_and_times_at_their_axes(bars):
    lines = chart_lines(TopFrame(Head("a"), points=POINTS), 120, bars)

    assert len(lines) == 2 * CHART_HEIGHT and max(map(width, lines)) <= 120
    text = plain(lines)
    assert "loss: 2.01" in text and " 3.00 " in text
    assert time.strftime("%H:%M:%S", time.localtime(1.79e9 + 99)) in text
    assert text.isascii() == (bars == ASCII_BARS)


def test_braille_draws_a_step_without_a_gap_and_leaves_gaps_out():
    top, bottom = braille([0.0, 0.0, 1.0, 1.0], 2, 2)

    assert (top, bottom) == ("⠀⡏", "⣀⠇")
    assert braille([0.0, None, None, 1.0], 2, 1) == ["⡀⠈"]


def test_map_names_the_slow_rank_in_its_windows():
    windows = [{rank: 1.3 if rank == 3 and at >= 5 else 1.0 for rank in range(8)} for at in range(10)]
    text = plain(rank_map_lines(windows, 60, 4, BARS))

    assert [line.strip() for line in text.splitlines()[1:]] == [
        "rank 0 ··········", "rank 1 ··········", "rank 3 ·····█████"
    ]  # fmt: skip
    assert rank_map_lines([{0: 1.0, 1: 2.0}], 60, 4, BARS) == [], "two ranks have no usual time"


def test_large_screen_has_charts_bars_and_the_map():
    windows = [dict.fromkeys(range(8), 1.0)] * 5
    frame = TopFrame(Head("a"), points=POINTS, rank_times=windows)
    large, small = (plain(render(frame, TopView(), *size)) for size in (CHARTS_FROM, (80, 24)))

    assert "own time of ranks" in large and "loss: 2.01" in large
    assert "own time of ranks" not in small


def test_own_times_are_read_once_and_grow_with_the_file(tmp_path):
    def line(window, rank, **more):
        own = "".join(f',"{name}":{value}' for name, value in more.items())
        times = '"iteration_first":1,"iteration_last":10,"start_time_s":0,"end_time_s":6,"wall_s":6,"wait_s":1'
        return f'{{"attempt":1,"window":{window},"rank":{rank},{times},"busy_s":5.0{own}}}\n'

    path = tmp_path / "ranks-0001.jsonl"
    path.write_text(line(1, 0) + line(1, 1, own_steps=10, own_step_s=2.0) + "{broken\n")
    files = LineFiles(tmp_path, "ranks")
    files.refresh()
    times = OwnTimes(files)

    assert times.refresh() and not times.refresh()
    assert times.times_until(1, 1) == [{0: 0.5, 1: 0.2}]
    with path.open("a") as file:
        file.write(line(2, 0))
    files.refresh()
    assert times.refresh()
    assert times.times_until(1, 1) == [{0: 0.5, 1: 0.2}] and times.times_until(1, 2)[1] == {0: 0.5}
