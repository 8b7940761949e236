"""Compare the estimates of effllm fit with what is counted and published: ``python -m benchmarks.memory``.

Tiny trainings make two steps on the CPU, of which the second one is counted; the classes of transformers are built;
published peaks are compared, with other estimators beside.  Needs the environment with transformers, accelerate and
PEFT: ``make bench-memory``.  With ``--gpu``, forty models of real size train on the first GPU instead.
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
from benchmarks.memory import on_gpu
from benchmarks.memory.classes import classes
from benchmarks.memory.configurations import Configuration, configurations
from benchmarks.memory.judged import Judged, judge, summary
from benchmarks.memory.peers import peers
from benchmarks.memory.published import published

RESULTS = Path(__file__).parent.parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--count", type=int, default=360, help="number of configurations")
    parser.add_argument("--seed", type=int, default=15, help="seed of the drawn configurations")
    parser.add_argument("--selective", action="store_true", help="recompute the attention of all configurations")
    parser.add_argument("--keep", action="store_true", help="write the results to benchmarks/results/")
    parser.add_argument("--again", metavar="FILE", help="judge the counted configurations of a kept file")
    parser.add_argument("--megatron", type=Path, default=Path("Megatron-LM"), help="a checkout of Megatron-LM")
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
    drawn_as = f"--seed {given.seed} --count {given.count}" + " --selective" * given.selective
    options = (f"--again {given.again}" if given.again else drawn_as) + " --megatron CHECKOUT" * given.megatron.exists()
    about = machine(gpu="none", command=f"make bench-memory ARGUMENTS='{options} --keep'")
    title, tiny = f"# Estimates of effllm fit, {about['date']}\n", "\n## Tiny trainings, counted on the CPU\n"
    lines = [title, *_text(about), tiny, *_text(summary(found)), *[f"- not counted: {one}" for one in refused], ""]
    report = "\n".join([*lines, *classes(), *published(peers(given.megatron)), ""])
    print(report)
    if given.keep:
        kept = RESULTS / f"{about['date']}-memory.md"
        kept.write_text(report)
        if not given.again:
            _keep(kept.with_name(f"{kept.stem}-seed-{given.seed}{'-selective' * given.selective}.json"), about, found)
        print(f"kept in {kept}", file=sys.stderr)
    return 0


def _count(wanted: Sequence[Configuration], refused: list[str]) -> Any:
    from benchmarks.memory.built import measure

    for at, one in enumerate(wanted):
        try:
            counted = measure(one)
        except RuntimeError as error:  # an operation that the CPU does not have
            refused.append(f"{one.name}: {error}")
            continue
        print(f"training {at + 1} of {len(wanted)}", end="\r", file=sys.stderr)
        yield judge(one, asdict(counted))


def _text(figures: dict[str, Any]) -> list[str]:
    return [f"- {name}: {round(one, 4) if isinstance(one, float) else one}" for name, one in figures.items()]


def _keep(path: Path, about: dict[str, Any], found: Sequence[Judged]) -> None:
    counted = [
        {"configuration": asdict(one.configuration), "bytes": one.counted, "estimated": one.estimated} for one in found
    ]
    rows = ",\n".join("    " + json.dumps(row) for row in counted)
    text = json.dumps({"machine": about, "figures": summary(found), "counted": None}, indent=2)
    path.write_text(text.replace('"counted": null', f'"counted": [\n{rows}\n  ]') + "\n")


if __name__ == "__main__":
    sys.exit(main())
