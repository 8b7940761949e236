"""A sink is one file, its option one line; the effect of a broken or blocked sink.

test_contributing.py extends effllm by a device, a metric and other parts.
"""

import sys
import time
from functools import partial

import pytest
from sink_examples import make_report, make_run

import effllm.devices
import effllm.sinks
from effllm.commands import env
from effllm.config.settings import Config
from effllm.server.outputs import Writer
from effllm.sinks import SinkUnavailable, open_sink, sink_names

SINK = """
class Recording:
    reports = []
    def write(self, report):
        if report.iteration == 13:
            raise RuntimeError("thirteen")
        self.reports.append(report.iteration)
    def close(self): pass

def open_sink(run):
    return Recording()
"""


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """Add a module to a package."""

    def put(package, name, code):
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)

    return put


def run_through(name, *iterations):
    texts = []
    thread = Writer(f"sink {name}", partial(open_sink, name, make_run()), texts.append)
    thread.start()
    for iteration in iterations:
        thread.put(lambda sink, iteration=iteration: sink.write(make_report(iteration)))
    thread.stop()
    assert thread.join(10.0)
    return texts


def test_new_sink_needs_one_file_and_may_raise_an_error(plug_in):
    plug_in(effllm.sinks, "recording", SINK)

    assert "recording" in sink_names()
    assert run_through("recording", 10, 13, 13, 20) == ["sink recording failed: RuntimeError: thirteen"]
    assert sys.modules["effllm.sinks.recording"].Recording.reports == [10, 20]


OPTION = """
from effllm.config.setting_values import whole
from effllm.sinks import Option

OPTIONS = {"every": Option("1", whole(1), "A line is written every Nth window.")}

class Thinned:
    def __init__(self, every): self.every = every
    def write(self, report): pass
    def close(self): pass

def open_sink(run):
    return Thinned(run.options["every"])
"""


def test_new_option_of_a_sink_needs_one_line_in_its_file(plug_in, capsys):
    plug_in(effllm.sinks, "thinned", OPTION)

    def opened(entry):
        return open_sink("thinned", make_run(config=Config(sinks=("console", entry))))

    assert (opened("thinned").every, opened("thinned:every=5").every) == (1, 5)
    with pytest.raises(SinkUnavailable, match="must be a whole number of at least 1"):
        opened("thinned:every=0")
    with pytest.raises(SinkUnavailable, match="sink 'thinned' has no option 'each'; available options: every"):
        opened("thinned:each=5")
    assert env.main(["--markdown"]) == 0
    line = "| `thinned:every=` | `1` | A line is written every Nth window. | a whole number of at least 1 |"
    assert line in capsys.readouterr().out


STALLED = """
from threading import Event
class Stalled:
    go_on, shown = Event(), []
    def write(self, report):
        self.go_on.wait(10)
        self.shown.append(report.iteration)
    def close(self): pass

def open_sink(run):
    return Stalled()
"""


@pytest.mark.fault("stopped-terminal", "slow-disk")
def test_blocked_sink_drops_and_counts_reports(plug_in):
    plug_in(effllm.sinks, "stalled", STALLED)
    texts = []
    thread = Writer("sink stalled", partial(open_sink, "stalled", make_run()), texts.append, max_queued=4)
    thread.start()
    for iteration in range(1, 11):
        thread.put(lambda sink, iteration=iteration: sink.write(make_report(iteration)), num_windows=1)
        while iteration == 1 and thread.unfinished and not thread._num_at_work:
            time.sleep(0.001)
    assert (thread.left_out, thread.unfinished) == (5, 5)  # one report is being written, four reports wait in the queue
    thread.stop()  # stop() adds two items to the queue; these items replace the two oldest reports
    assert not thread.join(0.0)
    assert (thread.left_out, thread.unfinished) == (7, 3)

    sys.modules["effllm.sinks.stalled"].Stalled.go_on.set()
    assert thread.join(10.0)
    assert sys.modules["effllm.sinks.stalled"].Stalled.shown == [1, 4, 5]
    assert texts == ["sink stalled is too slow: reports are dropped"]


def test_broken_sink_file_is_reported_in_one_line(plug_in):
    plug_in(effllm.sinks, "broken", "open_sink = 1 / 0")

    assert run_through("broken", 10) == ["sink broken failed to open: ZeroDivisionError: division by zero"]
