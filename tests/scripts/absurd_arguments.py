"""Calls every public function of a training script with arguments of wrong types, before, in and after a run.

Writes the calls that raised an exception to raised.json.
"""

import inspect
import json
from pathlib import Path

import effllm


class Hostile:
    """An object of which every use raises an exception."""

    def _fail(self, *_):
        raise RuntimeError("hostile")

    __str__ = __repr__ = __int__ = __float__ = __bool__ = __index__ = __iter__ = __len__ = __eq__ = __lt__ = __gt__ = (
        _fail
    )
    __le__ = __ge__ = __mod__ = __add__ = __radd__ = __mul__ = __truediv__ = __getitem__ = __getattr__ = _fail
    __hash__ = object.__hash__


ABSURD = [
    *(None, -1, 0, 2**70, 1.5, float("nan"), float("inf"), 1e308, True, "x", "", b"x", "\udc80"),
    *([1], {}, {"a": 1}, (1, 2), object(), print, Hostile()),
]
#: They end the run, or are not for a training script; a wrong `collection_interval` or `place` has an error line.
SKIPPED = {"finalize_efficientllm_metrics", "load", "stop_collection", "collection_interval", "place"}
STARTS = {"initialize_efficientllm_metrics", "monitor", "request", "record_request", "start_collection"}
raised = []


def use(found, value):
    """Enter a context, and call its methods, as a script does."""
    if hasattr(type(found), "__enter__"):
        with found as inside:
            for name in ("generated", "prompt", "iteration"):
                if hasattr(inside, name):
                    getattr(inside, name)(value)


def call_with_each(name, function):
    parameters = inspect.signature(function).parameters.values()
    plain = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    needed = {one.name: 1 for one in plain if one.default is one.empty}
    for one in plain:
        for value in ABSURD if one.name not in SKIPPED else ():
            try:
                use(function(**{**needed, one.name: value}), value)
            except Exception as error:  # noqa: BLE001 - this is what the test looks for
                raised.append(f"{name}({one.name}: {type(value).__name__}): {type(error).__name__}: {error}")


def call_all(skipped):
    collector = effllm.get_metrics_collector()
    methods = inspect.getmembers(type(collector), inspect.isfunction)
    functions = {name: getattr(effllm, name) for name in effllm.__all__ if inspect.isfunction(getattr(effllm, name))}
    functions |= {f"collector.{name}": getattr(collector, name) for name, _ in methods if name[0] != "_"}
    for name, function in functions.items():
        if name.rpartition(".")[2] not in skipped:
            call_with_each(name, function)


call_all(SKIPPED | STARTS)
collector = effllm.initialize_efficientllm_metrics(1000)
for _ in range(100):
    collector.record_iteration_start()
    collector.record_iteration_end(100, 1)
call_all(SKIPPED | {"monitor", "end_requests"})  # these two end the run
effllm.finalize_efficientllm_metrics()
call_all(SKIPPED | STARTS)
Path("raised.json").write_text(json.dumps(raised))
