"""effllm/agent/host_stacks.py: the lines of code of a recording of py-spy."""

import itertools
import json
import re
import sysconfig
from pathlib import Path

import msgspec
import pytest

from effllm.agent import host_stacks
from effllm.agent.host_stacks import (
    MAX_FRAMES,
    MAX_STACK,
    RATE_HZ,
    Frame,
    LineNames,
    LongIterations,
    _frame_rows,
    is_library,
    kind_of,
    script_folder,
    stacks_of,
)

LOOP, OTHER = 77, 88
SITE = "/venv/lib/python3.11/site-packages"


def recording(*spells, thread=LOOP):
    """Return a recording; a spell is a stack of (function, path, line), outermost first, and its seconds."""
    events, now_us, before = [], 10_000, ()
    for stack, seconds in (*spells, ((), 0.0)):
        same = next(
            (i for i, (a, b) in enumerate(zip(before, stack, strict=False)) if a != b), min(len(before), len(stack))
        )
        for kind, frames in (("E", reversed(before[same:])), ("B", stack[same:])):
            events += [
                {"ph": kind, "tid": thread, "ts": now_us, "name": name, "args": {"filename": path, "line": line}}
                for name, path, line in frames
            ]
        now_us, before = now_us + round(seconds * 1e6), stack
    return events


def lines(*spells, folder="/job"):
    stacks = stacks_of(json.dumps(recording(*spells)).encode(), LOOP)
    return [(one.kind, one.line, one.function, one.samples) for one in LineNames(folder).lines_of(stacks)]


MAIN = ("<module>", "/job/train.py", 9)


def test_samples_of_a_stack_are_its_time():
    found = lines(
        ((MAIN, ("load", "/job/data.py", 4)), 1.0), ((MAIN,), 0.5), ((MAIN, ("load", "/job/data.py", 4)), 2.0)
    )

    assert found == [
        ("other", "load (data.py:4)", "", 3 * RATE_HZ),
        ("other", "<module> (train.py:9)", "", RATE_HZ // 2),
    ]


def test_folded_stacks_begin_with_their_kind_and_keep_the_innermost_functions():
    long = [("f" * 150, f"/job/{'d' * 150}.py", 1)] * MAX_FRAMES
    events = recording(((MAIN,), 1.0), ((MAIN, ("f0", "/job/a;b.py", 0)), 2.0), (tuple(long), 3.0))
    stacks = stacks_of(json.dumps(events).encode(), LOOP)

    *short, whole = sorted(LineNames("/job").stack_texts(stacks).items(), key=lambda one: one[1])
    assert short == [("other;<module> (train.py:9)", 50), ("other;<module> (train.py:9);f0 (a b.py:0)", 100)]
    assert whole[1] == 150
    assert len(whole[0]) <= MAX_STACK + len("other;")
    assert re.fullmatch(r"other(;f{150} \(d{150}.py:1\))+", whole[0])


def test_stacks_of_a_recording_have_a_limited_size(monkeypatch):
    monkeypatch.setattr(host_stacks, "MAX_STACKS_BYTES", 60)
    stacks = {((Frame("f", f"/job/{i}.py", 1)),): i for i in range(1, 10)}

    assert LineNames("/job").stack_texts(stacks) == {
        "other;f (9.py:1)": 9,
        "other;f (8.py:1)": 8,
        "other;f (7.py:1)": 7,
    }


def test_only_the_thread_of_the_loop_is_counted():
    events = recording(((MAIN,), 1.0)) + recording(((("run", "/job/worker.py", 3),), 5.0), thread=OTHER)

    assert sum(stacks_of(json.dumps(events).encode(), LOOP).values()) == RATE_HZ


def test_unknown_thread_of_the_loop_is_the_one_that_runs_the_script():
    background = (("Thread._bootstrap", f"{sysconfig.get_path('stdlib')}/threading.py", 1002),)
    events = recording(((MAIN,), 1.0)) + recording((background, 5.0), thread=OTHER)

    assert list(stacks_of(json.dumps(events).encode(), 0)) == [(MAIN,)]


@pytest.mark.parametrize(
    ("innermost", "kind", "function"),
    [
        ((f"{SITE}/torch/utils/data/dataloader.py", "_next_data"), "data", "_next_data"),
        ((f"{SITE}/torch/cuda/__init__.py", "synchronize"), "device", "synchronize"),
        ((f"{SITE}/torch/distributed/distributed_c10d.py", "all_reduce"), "ranks", "all_reduce"),
        ((f"{SITE}/torch/distributed/distributed_c10d.py", "get_rank"), "other", "get_rank"),
        ((f"{SITE}/torch/serialization.py", "_save"), "checkpoint", "_save"),
        ((f"{SITE}/torch/fx/_symbolic_trace.py", "Tracer.trace"), "compilation", "Tracer.trace"),
        ((f"{SITE}/torch/jit/_trace.py", "trace"), "compilation", "trace"),
        ((f"{SITE}/tokenizers/implementations.py", "encode"), "tokenization", "encode"),
        ((f"{SITE}/torch/optim/adamw.py", "AdamW.step"), "compute", "AdamW.step"),
        ((f"{sysconfig.get_path('stdlib')}/logging/__init__.py", "Logger.info"), "logging", "Logger.info"),
        ((f"{SITE}/pandas/io/parsers.py", "read_csv"), "other", "read_csv"),
    ],
)
def test_line_of_the_user_is_named_with_the_function_that_it_is_in(innermost, kind, function):
    path, name = innermost

    assert lines(((MAIN, ("step", "/job/loop.py", 7), (name, path, 1)), 1.0)) == [
        (kind, "step (loop.py:7)", function, RATE_HZ)
    ]


@pytest.mark.parametrize(
    ("innermost", "kind", "function"),
    [
        (f"{SITE}/torch/nn/modules/linear.py", "compute", "f"),
        (f"{sysconfig.get_path('stdlib')}/collections/__init__.py", "forward", "f"),
        ("/job/model.py", "forward", ""),
    ],
)
def test_what_torch_does_in_forward_is_not_python_of_the_user(innermost, kind, function):
    inside = (f"{SITE}/torch/nn/modules/module.py", "Module._call_impl")
    stack = MAIN, (inside[1], inside[0], 9), ("Net.forward", "/job/model.py", 3), ("f", innermost, 5)

    [(found, line, in_function, _)] = lines((stack, 1.0))
    assert (found, line.partition(" ")[0], in_function) == (kind, "Net.forward" if function else "f", function)


@pytest.mark.parametrize("name", ["count.<locals>.<genexpr>", "<listcomp>"])
def test_comprehension_belongs_to_the_line_that_reads_it(name):
    inside = ("count", "/job/data.py", 7), (name, "/job/data.py", 8)
    library = (*inside, ("get", f"{SITE}/pandas/core.py", 9))

    assert lines(((MAIN, *inside), 1.0)) == [("other", "count (data.py:7)", "", RATE_HZ)]
    assert lines(((MAIN, *library), 1.0)) == [("other", "count (data.py:7)", "get", RATE_HZ)]


def test_folder_of_the_script_is_that_of_the_outermost_frame_of_the_user():
    runpy = Frame("_run_code", "<frozen runpy>", 88), Frame("main", f"{SITE}/effllm/commands/run.py", 5)
    script, data = Frame("<module>", "/job/a/../b/train.py", 9), Frame("load", "/data/lib.py", 3)

    assert script_folder({(*runpy, script, data): 5, (data,): 1}) == "/job/b"
    assert script_folder({runpy: 5, (): 3}) == script_folder({}) == ""


def long_ones(durations_ms, began_ms=0.0):
    """Return the long iterations of a loop whose iterations follow each other."""
    edges = [0, *itertools.accumulate(durations_ms)]
    spans = [(round(1e6 * start), round(1e6 * end)) for start, end in itertools.pairwise(edges)]
    return LongIterations.long_among(spans, round(1e6 * began_ms))


def test_long_iterations_are_those_of_several_medians_during_the_recording():
    assert long_ones([10] * 9 + [100]) == ([(90e3, 190e3)], 1 / 9)
    assert long_ones([100] + [10] * 9, began_ms=100) == ([], 0.0)
    assert long_ones([]) == ([], 0.0)


def test_only_more_samples_than_in_other_iterations_count_for_long_ones():
    pause, work = (MAIN, ("pause", "/job/a.py", 2)), (MAIN, ("work", "/job/a.py", 9))
    content = json.dumps(recording((work, 0.9), (pause, 0.5), (work, 0.1))).encode()
    in_long = stacks_of(content, LOOP, [(0.9e6, 1.5e6)])

    found = LineNames("/job").lines_of(stacks_of(content, LOOP), in_long, 1 / 9)
    assert [(one.line, one.samples, one.long) for one in found] == [
        ("work (a.py:9)", RATE_HZ, 0),
        ("pause (a.py:2)", RATE_HZ // 2, RATE_HZ // 2),
    ]


def test_code_of_the_user_inside_a_loader_is_a_wait_for_data():
    inside = ((f"{SITE}/torch/utils/data/_utils/fetch.py", "fetch"), ("/job/data.py", "__getitem__"))
    stack = (MAIN, *((name, path, 5) for path, name in inside))

    assert lines((stack, 1.0)) == [("data", "__getitem__ (data.py:5)", "", RATE_HZ)]


@pytest.mark.parametrize(
    ("text", "kind", "function"),
    [
        ("total += loss.item()", "device", "item (probably)"),
        ("gc.collect()", "garbage collection", "collect (probably)"),
        ("print(step)", "logging", "print (probably)"),
        ("print(loss.item())", "other", ""),  # which of the two is not known
        ("x = y", "other", ""),
    ],
)
def test_call_into_c_is_recognised_from_the_line_if_it_is_the_only_call(tmp_path, text, kind, function):
    (tmp_path / "train.py").write_text(f"import gc\n{text}\n")
    stack = (("<module>", str(tmp_path / "train.py"), 2),)

    assert lines((stack, 1.0), folder=str(tmp_path)) == [(kind, "<module> (train.py:2)", function, RATE_HZ)]


@pytest.mark.parametrize(
    ("function", "path", "name"),
    [
        ("f", "/nowhere/train.py", "f (/nowhere/train.py:3)"),
        ("f", "/dev/zero", "f (/dev/zero:3)"),
        ("f", "<string>", "f (<string>:3)"),
        ("f", "a\0b", "f (a b:3)"),
        ("f", "/job/zipped.zip/pkg/mod.py", "f (zipped.zip/pkg/mod.py:3)"),
        ("slow", "/tmp/ipykernel_4711/1094765309.py", "slow (notebook cell:3)"),
        ("f;\n g", "/job/мой код/a;b.py", "f g (мой код/a b.py:3)"),
    ],
)
def test_line_of_any_file_has_a_name_in_one_line(function, path, name):
    assert lines(((MAIN, (function, path, 3)), 1.0)) == [("other", name, "", RATE_HZ)]


def test_deep_stacks_keep_their_innermost_frames():
    deep = tuple(("recurse", "/job/tree.py", line) for line in range(1000))
    (frames,) = stacks_of(json.dumps(recording((deep, 1.0))).encode(), LOOP)

    assert [one.line for one in frames] == list(range(1000 - MAX_FRAMES, 1000))


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'[{"ph": "B"}]'])
def test_damaged_recording_is_an_error(content):
    with pytest.raises(msgspec.MsgspecError):
        stacks_of(content, LOOP)


def test_effllm_and_made_code_are_libraries():
    assert [is_library(path) for path in (host_stacks.__file__, "<frozen runpy>", "<eval_with_key>.3")] == [True] * 3
    assert not is_library("<string>")


def test_every_row_of_the_table_is_found_and_has_a_source():
    assert all(one.source.startswith("https://") for one in _frame_rows())
    assert kind_of("torch/_dynamo/eval_frame.py", "compile_wrapper") == ""  # a call of compiled code is no compilation
    assert kind_of("torch/_dynamo/convert_frame.py", "compile_inner") == "compilation"


def test_every_file_of_the_package_that_is_no_code_is_installed():
    root = Path(host_stacks.__file__).parents[2]
    settings = msgspec.toml.decode((root / "pyproject.toml").read_bytes())
    package = root / "effllm"
    found = (one for one in package.rglob("*") if one.is_file() and one.suffix not in (".py", ".pyc", ".so"))
    files = {str(one.relative_to(package)) for one in found}

    assert files == set(settings["tool"]["setuptools"]["package-data"]["effllm"])
