"""Report sizes and old words of the code: ``python tests/code_report.py [FOLDER OF A CLONE]``.

The report fails if a package of effllm/ has more lines than its budget in BUDGETS, or a class, a module or a function
more than its limit in LIMITS. It also counts old words: docs/words.md has the new ones.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

# Lines of the Python files of each package. A budget is raised only in a line with a comment: the reason, which a user
# must be able to accept. When a package becomes smaller, its budget follows.
BUDGETS = {
    "agent": 3_872,  # lines of code of the host, of long iterations and workers; readings between windows
    "analysis": 2_901,  # one table of configurations with intervals; runs by their names; times of ranks by window
    "commands": 6_282,  # the plan of a campaign, before in analysis; all running jobs; files of fit; columns in explain
    "config": 915,  # building a model: limits of time and memory, no network; a process without memory ends in a line
    "devices": 3_417,  # a GPU in MIG mode is never measured as a whole; open files in /proc cost a third of psutil
    "energy": 1_665,  # a calibration has a budget, and its few reads are made where they help most
    "hooks": 4_855,  # own times, the loss and tokens of any loop, under FSDP too; batches by loader and backward pass
    "instruments": 2_459,  # no event and no read on a GPU that the process does not use
    "job": 8_739,  # the foretold end; losses iteration by iteration; lines of code; readings are added at receipt
    "memory": 3_096,  # the step of any model is measured, before in commands; five systems of YAML; settings left out
    "metrics": 927,  # the metrics that a gap in the counts changes; AMU in GiB; a peak is not below its mean
    "network": 1_531,  # a link sends the reports of an outbox, before in agent and in commands
    "records": 3_329,  # the foretold end; times of single iterations; the GPU of a rank; what is avoidable
    "sensor_profile": 1_159,  # rates of a matrix product and a copy under load
    "server": 1_264,  # the line of the start: ranks, GPUs and how to look; an end without memory or threads
    "sinks": 1_527,  # one line a window, never glued to a progress bar; slow connections do not block the metrics page
    "store": 1_959,  # lines of a run folder have one reader; room for the last summary
    "top level": 202,  # a closed pipe ends a command silently
    "trainer": 3_909,  # own time between several waits for other ranks; the GPU of a process; pauses
    "views": 4_106,  # the texts that were in store; curves, bars and maps in top; an icicle, a heat map
}
UNUSED_LINES = 50  # a budget with more unused lines is to be lowered
LIMITS = {"class": 250, "module": 400, "function": 60}
# Old words, also as parts of names; docs/words.md has their replacements.
OLD_WORD = re.compile(
    r"(?<![a-z])(?:told|tells?|who(?:m|so)?ever|(?:no|some|any)body|stands|stood|manieth|strangers?|keeper|shelf|chronicle"
    r"|forgetful|seldom|farewell|whatever|wherever|whichever|believe[sd]?|forgets|shall|lest|thereof|of whom)(?![a-z])"
    r"|\b(?:is|are|was|were|in|has|have|of) (?-i:none)\b|\bat all\b(?= *[.,;:)]|$)"
    r"|\b(?:it|effllm|agent|aggregator|process|module|sink|sensor|rank|device)s? (?:know|say|want|ask|hear|speak)s?\b"
    r"|\b_?(?-i:MOST|LEAST|LONGEST)_",
    re.IGNORECASE,
)
PROSE = (
    "effllm",
    "launch",
    "integration",
    "configs",
    "benchmarks",
    "tests",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)


def sizes(root: Path) -> Counter[str]:
    """Return the lines of the Python files of each package; the modules outside a package are "top level"."""
    lines: Counter[str] = Counter()
    for path in (root / "effllm").rglob("*.py"):
        package, *inner = path.relative_to(root / "effllm").parts
        lines[package if inner else "top level"] += len(path.read_text().splitlines())
    return lines


def above_budgets(lines: Mapping[str, int]) -> list[str]:
    """Return a line for each package that is larger than its budget; a package without a budget may have no lines."""
    excess = {package: count - BUDGETS.get(package, 0) for package, count in sorted(lines.items())}
    return [
        f"effllm/{package}: {lines[package]:,} lines are {count:,} above the budget of {BUDGETS.get(package, 0):,}"
        for package, count in excess.items()
        if count > 0
    ]


def above_limits(root: Path) -> list[str]:
    """Return a line for each class, module and function with more lines than its limit."""
    lengths: list[tuple[str, str, int]] = []
    for path in sorted((root / "effllm").rglob("*.py")):
        text = path.read_text()
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        lengths.append(("module", name, len(text.splitlines())))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                lengths.append((kind, f"{name}.{node.name}", (node.end_lineno or 0) - node.lineno + 1))
    return [
        f"{kind} {name}: {length} lines are {length - LIMITS[kind]} above the limit of {LIMITS[kind]}"
        for kind, name, length in lengths
        if length > LIMITS[kind]
    ]


def below_budgets(lines: Mapping[str, int]) -> list[str]:
    """Return a line for each package that is much smaller than its budget."""
    return [
        f"effllm/{package}: lower the budget to {lines.get(package, 0):,}"
        for package, budget in BUDGETS.items()
        if budget - lines.get(package, 0) > UNUSED_LINES
    ]


def report(root: Path) -> Iterator[str]:
    """Yield the lines of the report; `root` is the folder of a clone."""
    lines = sizes(root)
    yield f"effllm/: {sum(lines.values()):,} lines (budgets: {sum(BUDGETS.values()):,})"
    yield "  " + ", ".join(f"{package} {count:,}" for package, count in lines.most_common())
    words = {name: old_words(root / name) for name in PROSE}
    yield f"old words (goal 0): {sum(words.values()):,}; " + ", ".join(
        f"{name} {count}" for name, count in words.items() if count
    )


def old_words(path: Path) -> int:
    """Return the number of old words in the files below a path; docs/words.md lists them."""
    files = (
        [path]
        if path.is_file()
        else [one for one in path.rglob("*") if one.suffix in {".py", ".md", ".sh", ".toml", ".yaml"}]
    )
    return sum(
        len(OLD_WORD.findall(one.read_text(errors="replace")))
        for one in files
        if one.name not in {Path(__file__).name, "words.md"}
    )


def main(root: Path) -> int:
    """Print the report; return 1 if a package is larger than its budget, or a class, module or function too long."""
    lines = sizes(root)
    too_large, too_long = above_budgets(lines), above_limits(root)
    print(*report(root), *below_budgets(lines), *too_long, *too_large, sep="\n")
    if too_large:
        print(
            "Make the package smaller, or raise its budget in BUDGETS of tests/code_report.py, with a comment in its "
            "line: the reason, which a user must be able to accept."
        )
    return 1 if too_large or too_long else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent))
