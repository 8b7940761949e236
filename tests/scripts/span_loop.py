"""A loop whose iterations are the spans of a chain; it writes the answers of its agent."""

import json
import math
import sys
import time
from pathlib import Path

import effllm
from effllm.trainer import session
from effllm.trainer.spans import SpanChain

session.READY_S = 60.0  # long timeout: the first span must have a device, even on a busy machine
iterations, step_s = int(sys.argv[1]), float(sys.argv[2])


def fields(part):
    """Return the fields of a part; a value that was not measured is null."""
    return {name: None if math.isnan(value) else value for name, value in part._asdict().items()}


effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
chain = SpanChain(collector.lifecycle)
assert chain.begin()
asked, held_s, spans = [], [], []
for _ in range(iterations):
    collector.record_iteration_start()
    time.sleep(step_s)
    collector.record_iteration_end(100, 1)
    began_s = time.monotonic()
    asked.append(chain.end_span())
    spans += chain.take_answers()
    held_s.append(time.monotonic() - began_s)
alone = chain.request_past_span(chain.last_end_ns - 400_000_000, chain.last_end_ns)
effllm.finalize_efficientllm_metrics()
spans += chain.take_answers()
found = [{"number": span.number, "parts": [fields(part) for part in span.parts]} for span in spans]
truth = {"spans": found, "asked": asked, "alone": alone, "held_s": held_s, "devices": chain.devices}
Path("truth.json").write_text(json.dumps({**truth, "lost": chain.num_lost, "waiting": chain.num_unanswered}))
