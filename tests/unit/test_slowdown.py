"""effllm/job/health/change_point.py: a slower job is reported, but a short load of its host is not."""

import random

import msgspec
import pytest
from cases import cases
from sink_examples import make_row

from effllm.job.health.change_point import Slowdown


def changes(seed, step_s, per_window, seconds, slower_from_s=float("inf")):
    """Return the kinds of events of a job on a host whose load changes every 0.5 to 2 s."""
    noise, slowdown, reported = random.Random(seed), Slowdown(), []
    row, elapsed_s, until_s, load, shown = make_row(0), 0.0, 0.0, 1.0, 0
    while elapsed_s < seconds:
        if elapsed_s >= until_s:
            load, until_s = 1 + abs(noise.gauss(0, 0.08)), elapsed_s + noise.uniform(0.5, 2.0)
        whole_s = step_s * load * noise.gauss(1, 0.01) * (1.2 if elapsed_s >= slower_from_s else 1.0)
        shown += per_window
        event = slowdown.add(
            msgspec.structs.replace(row, iteration_shown=shown, iteration_first=1, iteration_last=per_window),
            whole_s,
            None,
            False,
        )
        reported += [event.kind] if event else []
        elapsed_s += whole_s * per_window
    return reported


@cases("seed", range(5))
@cases("per_window", [10, 1000])
def test_short_load_of_the_host_is_not_reported(seed, per_window):
    assert changes(seed, 0.0013, per_window, seconds=600) == []


@pytest.mark.parametrize("step_s", [0.0013, 0.05])
def test_a_job_that_became_slower_is_reported_once(step_s):
    assert changes(1, step_s, 10, seconds=900, slower_from_s=450) == ["slower"]
