"""W&B: the run is open in the training process, so this sink writes nothing in the aggregator.

In its place, the training process adds the newest values of the job to its own calls of ``wandb.log``; see
effllm/trainer/trackers.py. A second writer would need W&B's shared mode and a server, and is left out.
"""

from __future__ import annotations

from effllm.sinks import RunInfo, WrittenByTraining


def open_sink(_run: RunInfo) -> WrittenByTraining:
    return WrittenByTraining()
