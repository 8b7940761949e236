"""Count the storages of tiny trainings, and compare estimates with them: ``python -m benchmarks.memory``.

Needs the environment with transformers, accelerate and PEFT: ``make bench-memory``.  Every configuration trains two
steps on the CPU; the second one is counted.  With ``--gpu``, forty models of real size train on the first GPU instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.memory import on_gpu, peers
from benchmarks.memory.configurations import Configuration, configurations
from benchmarks.memory.judged import Judged, judge, peak_errors, shape_and_plan, summary

RESULTS = Path(__file__).parent.parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--count", type=int, default=360, help="number of configurations")
    parser.add_argument("--seed", type=int, default=15, help="seed of the drawn configurations")
    parser.add_argument("--selective", action="store_true", help="recompute the attention of all configurations")
    parser.add_argument("--keep", action="store_true", help="write the results to benchmarks/results/")
    parser.add_argument("--again", metavar="FILE", help="judge the counted configurations of a kept file")
    parser.add_argument("--gpu", action="store_true", help="compare the peaks of forty models on a GPU")
    given = parser.parse_args()
    if given.gpu:
        return on_gpu.main(RESULTS, keep=given.keep)
    refused: list[str] = []
    if given.again:
        rows = json.loads(Path(given.again).read_text())["counted"]
        found = [judge(Configuration(**one["configuration"]), one["bytes"]) for one in rows]
    else:
        drawn = configurations(given.count, given.seed)
        if given.selective:
            drawn = [replace(one, checkpointing="selective", attention="eager") for one in drawn]
        found = list(_count(drawn, refused))
    figures = summary(found)
    compared = _compare(found)
    print(json.dumps(figures, indent=2))
    for name, errors in compared.items():
        print(f"{name:<36} " + "  ".join(f"{key} {value:.3f}" for key, value in errors.items()))
    for line in refused:
        print(f"not counted: {line}")
    if given.keep:
        options = f"--seed {given.seed} --count {len(found) + len(refused)}" + " --selective" * given.selective
        print(f"kept in {_keep(options, found, figures, compared, refused)}")
    return 0


def _count(wanted: Sequence[Configuration], refused: list[str]) -> Any:
    from benchmarks.memory.built import measure

    for at, one in enumerate(wanted):
        try:
            counted = measure(one)
        except RuntimeError as error:  # an operation that the CPU does not have
            refused.append(f"{one.name}: {error}")
            continue
        if sys.stderr.isatty():
            print(f"{at + 1} of {len(wanted)}", end="\r", file=sys.stderr)
        yield judge(one, asdict(counted))


def _compare(found: Sequence[Judged]) -> dict[str, dict[str, float]]:
    """Return the errors of the peak, by estimator."""
    pairs = [shape_and_plan(one.configuration) for one in found]
    counts = [round(one.estimated["parameters"]) for one in found]
    estimators = {
        peers.MEGATRON: lambda shape, plan, count: peers.megatron(shape, count, plan),
        peers.DEEPSPEED: lambda _shape, _plan, count: peers.deepspeed(count),
        peers.DEEPSPEED_3: lambda shape, _plan, count: peers.deepspeed_3(shape, count),
        peers.ACCELERATE: lambda _shape, plan, count: peers.accelerate(count, plan),
    }
    estimates = {"effllm": [one.estimated["peak"] for one in found]}
    for name, of in estimators.items():
        try:
            estimates[name] = [of(*pair, count) for pair, count in zip(pairs, counts, strict=True)]
        except ImportError as error:
            print(f"{name} is left out: {error}")
    return {name: peak_errors(values, found) for name, values in estimates.items()}


def _keep(options: str, found: Sequence[Judged], figures: Any, compared: Any, refused: list[str]) -> Path:
    about = machine(gpu="none: counted on a CPU")
    words = [word.strip("-") for word in options.split() if word not in ("--count", str(len(found) + len(refused)))]
    path = RESULTS / f"{about['date']}-memory-{'-'.join(words)}.json"
    rows = [
        {"configuration": asdict(one.configuration), "bytes": one.counted, "estimated": one.estimated} for one in found
    ]
    body = {
        "command": f"make bench-memory ARGUMENTS='{options} --keep'",
        "machine": about,
        "figures": figures,
    }
    text = json.dumps({**body, "peaks": compared, "not_counted": refused, "counted": None}, indent=2)
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    path.write_text(text.replace('"counted": null', f'"counted": [\n{lines}\n  ]') + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
