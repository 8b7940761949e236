"""The time and the size of a report of a very long run and of a very large job: ``python -m benchmarks.report``.

The long run is a real run of ``effllm demo``, whose windows are repeated with further numbers of iterations; the large
job is one of ``effllm simulate``.  The times are CPU seconds, because other processes may share the machine.  The time
to open the page is measured by a headless Chromium from the start of the navigation to the event `load`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.browser import CHROMIUM, Browser

WINDOW_ITERATIONS = 10
_EFFLLM = (sys.executable, "-m", "effllm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=8192)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure(f"{chosen.iterations:,} iterations", long_run(folder, chosen.iterations), folder / "long.html")
        measure(f"{chosen.ranks:,} ranks", large_job(folder, chosen.ranks), folder / "large.html")


def long_run(folder: Path, iterations: int) -> Path:
    """Return the folder of a run with a window for every ten iterations."""
    _quietly("demo", "--iterations", "200", "--run-dir", str(folder / "demo"))
    [run] = (folder / "demo").iterdir()
    path = run / "windows-0001.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()][:-1]
    with path.open("w") as file:
        for at in range(iterations // WINDOW_ITERATIONS):
            line: dict[str, Any] = lines[at % len(lines)]
            last = (at + 1) * WINDOW_ITERATIONS
            line |= {"window": at + 1, "iteration": last, "iteration_last": last, "iteration_first": last - 9}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    return run


def large_job(folder: Path, ranks: int) -> Path:
    """Return the run folder of simulated ranks."""
    _quietly("simulate", "--ranks", str(ranks), "--minutes", "0.25", "--run-dir", str(folder / "large"))
    return folder / "large"


def measure(name: str, run: Path, page: Path) -> None:
    """Print the cost of the report of a run."""
    size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _quietly("report", str(run), "-o", str(page))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    opened = f"{_open_s(page):.2f} s to open" if CHROMIUM else "no Chromium"
    print(
        f"{name:<22} run folder {size / 1e6:,.0f} MB, report {page.stat().st_size / 1e6:.2f} MB in {cpu_s:.1f} CPU s, "
        f"{opened}"
    )


def _open_s(page: Path) -> float:
    browser = Browser()
    try:
        browser.open(page)
        return float(browser.value("performance.getEntriesByType('navigation')[0].loadEventEnd")) / 1000
    finally:
        browser.close()


def _quietly(*arguments: str) -> None:
    subprocess.run([*_EFFLLM, *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
