"""CPU time per tick of the thread of nvitop's `ResourceMetricCollector`, on one GPU; argument: ``INTERVAL_S``."""

from __future__ import annotations

import json
import sys
import threading
import time
from importlib.metadata import version

from nvitop import Device, ResourceMetricCollector

MEASURE_S = 10.0


def main(interval_s: float) -> None:
    collector = ResourceMetricCollector(Device.all()[:1], interval=interval_s)
    collector.activate("run")
    time.sleep(2.0)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "metrics-collector-daemon")
    clock = time.pthread_getcpuclockid(thread.ident)
    buffer = collector._metric_buffer
    before, began_ns, began_s = len(buffer), time.clock_gettime_ns(clock), time.monotonic()
    time.sleep(MEASURE_S)
    ticks, spent_ns, wall_s = len(buffer) - before, time.clock_gettime_ns(clock) - began_ns, time.monotonic() - began_s
    what = f"nvitop {version('nvitop')} collector"
    print(json.dumps({"what": what, "cpu_us": spent_ns / ticks / 1e3, "ticks_per_s": ticks / wall_s}))


if __name__ == "__main__":
    main(float(sys.argv[1]))
