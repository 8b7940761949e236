"""Reads the history in the .wandb file of an offline run, with the records of W&B, whose package has no reader now."""

from __future__ import annotations

import json
import struct

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_DISABLE_CODE": "true",
}


#: Keys of the energy callback in its logs, also as names of charts.
STEP = ("power_avg_w", "energy_per_step_wh", "energy_efficiency", "temperature_avg_c", "step")
INTERVAL = (
    "power_avg_w", "energy_consumed_wh", "efficiency_wh_per_step", "temperature_avg_c", "gpu_utilization_avg_percent",
    "step",
)  # fmt: skip
FINAL = (
    "total_energy_consumed_kwh", "energy_per_step_wh", "energy_per_epoch_kwh", "energy_efficiency_score",
    "carbon_footprint_estimate_kg",
)  # fmt: skip
KEYS = {
    *(f"energy_step/{name}" for name in STEP),
    *(f"energy_interval/{name}" for name in INTERVAL),
    *(f"final_energy/{name}" for name in FINAL),
}


def records(data):
    """Yield the records of a .wandb file: LevelDB's log in blocks of 32 KiB, after a header of seven bytes."""
    assert data[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the only part, or the last part
            yield whole
            whole = b""


def history(job):
    """Return the rows of the history of the only run, without the keys of wandb itself."""
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows(job)]


def rows(job):
    """Return the rows of the history of the only run, with the keys of wandb itself."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (job.folder / "wandb").glob("offline-run-*/run-*.wandb")
    found = []
    for data in records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            found.append({key: json.loads(value) for key, value in items.items()})
    return found
