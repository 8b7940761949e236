"""CPU time per tick of Zeus's `PowerMonitor` process, on one GPU with one kind of power; argument: ``INTERVAL_S``.

`ZeusMonitor` has no ticks, because it does not sample GPUs with an energy counter.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

from zeus.monitor.power import PowerDomain, PowerMonitor

MEASURE_S = 10.0


def main(interval_s: float) -> None:
    domain = PowerDomain.DEVICE_INSTANT
    monitor = PowerMonitor(gpu_indices=[0], update_period=interval_s, power_domains=[domain])
    time.sleep(2.0)
    pid = monitor.processes[domain].pid
    began_ns, began_s = _cpu_ns(pid), time.monotonic()
    time.sleep(MEASURE_S)
    spent_ns, wall_s = _cpu_ns(pid) - began_ns, time.monotonic() - began_s
    monitor.stop()
    # No missed tick is assumed: ticks cannot be counted, because only samples with a new value are stored.
    ticks = wall_s / interval_s
    what = f"Zeus {version('zeus')} PowerMonitor"
    print(json.dumps({"what": what, "cpu_us": spent_ns / ticks / 1e3, "ticks_per_s": ticks / wall_s}))


def _cpu_ns(pid: int) -> int:
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


if __name__ == "__main__":
    main(float(sys.argv[1]))
