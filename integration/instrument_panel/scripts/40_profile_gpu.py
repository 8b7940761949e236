"""Print what this GPU is, what it holds, what models need, how fast a small model trains, and which models fit.

    python scripts/40_profile_gpu.py [--device N] [--output FILE] [--skip-throughput]

The requirements and the compatibility come from one model of memory (`effllm fit`). The throughput is that of a real
small transformer, on the GPU, or on the CPU if there is no GPU.
"""

import argparse
import json
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import nn

from effllm.devices.known.hardware import find_by_typed_words, usable_bytes
from effllm.memory.changes import verdict
from effllm.memory.config_json import find_model
from effllm.memory.estimate import estimate
from effllm.memory.plan import INFERENCE, MemoryPlan
from effllm.views.fit_text import GpuMemory, ModelFit, compatibility_lines, requirement_lines

GIB = 2**30
MODELS = ("deepseek-math-7b", "deepseek-math-70b", "deepseek-v3")
#: The figures of the document that this script comes from: model, use, its two tables, and how they come about.
DOCUMENT = (
    ("deepseek-math-7b", "inference", "13.0, 14.0", "7e9 x 2 bytes, in GiB and in GB; weights alone"),
    ("deepseek-math-7b", "training", "78.2, 60.0", "7e9 x 12 bytes in GiB; 60.0 follows no formula (8 bytes: 56.0)"),
    ("deepseek-math-70b", "inference", "130.4", "70e9 x 2 bytes in GiB; no model of this name exists"),
    ("deepseek-math-70b", "training", "782.3", "70e9 x 12 bytes in GiB; no activations"),
    ("deepseek-v3", "inference", "68.9", "37e9 x 2 bytes in GiB: active parameters, but memory needs all"),
    ("deepseek-v3", "training", "413.5, 296.0", "37e9 x 12 bytes in GiB, x 8 bytes in GB: active parameters alone"),
)
SMALL = {"layers": 4, "hidden": 256, "heads": 4, "vocabulary": 8000, "batch": 4, "length": 128}
SECONDS = 3.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", type=int, default=0, help="index of the GPU; 0 by default, or the CPU without a GPU"
    )
    parser.add_argument("--output", type=Path, help="write the results to this file, as JSON")
    parser.add_argument("--skip-throughput", action="store_true", help="do not train the small model")
    given = parser.parse_args()
    count = torch.cuda.device_count()
    if given.device < 0 or given.device >= max(count, 1):  # without a GPU, the default is the CPU
        parser.error(f"--device {given.device}: torch finds {count} GPUs on this machine")
    if given.output and (given.output.is_dir() or not given.output.parent.is_dir()):
        parser.error(f"--output {given.output}: give a file in a folder that exists")
    device = given.device if count else None
    results = {"timestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"), "device": device}
    results["gpus"] = section("GPU Information", gpus())
    results["memory"] = section("Memory Profiling", memory(device))
    fits = [fit(name) for name in MODELS]
    heading("Model Memory Requirements")
    print(*requirement_lines(fits), sep="\n")
    print(*(f"note: {one.main_estimate.shape.name}: {note}" for one in fits for note in one.notes), sep="\n")
    results["requirements"] = requirements(fits)
    print_document(results["requirements"])
    if not given.skip_throughput:
        results["throughput"] = section("Throughput Benchmark", throughput(device))
    heading("Model Compatibility Check")
    gpu = capacity(device)
    print(*compatibility_lines(fits, gpu), sep="\n")
    results["compatibility"] = compatibility(fits, gpu)
    if given.output:
        given.output.write_text(json.dumps(results, indent=2) + "\n")
        print(f"\nwritten: {given.output}")


def heading(title):
    print(f"\n{'=' * 60}\n{title}\n{'=' * 60}\n")


def section(title, found):
    """Print names and values, and return them."""
    heading(title)
    for one in found if isinstance(found, list) else [found]:
        for name, value in one.items():
            print(f"{name:<28} {value:,.1f}" if isinstance(value, float) else f"{name:<28} {value}")
    if not found:
        print("no GPU of torch")
    return found


def gpus():
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": facts.name,
                "memory_gib": facts.total_memory / GIB,
                "multiprocessors": facts.multi_processor_count,
                "compute_capability": f"{facts.major}.{facts.minor}",
            }
        )
    return found


def memory(device):
    if device is None:
        return {"measured": "nothing: no GPU of torch"}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated_gib": torch.cuda.memory_allocated(device) / GIB,
        "reserved_gib": torch.cuda.memory_reserved(device) / GIB,
        "max_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "free_gib": free / GIB,
        "total_gib": total / GIB,
    }


def fit(name):
    """Return the estimates of a model in fp16, for training with autocast and AdamW."""
    row = find_model(name)
    serving = estimate(row.shape, MemoryPlan(mode=INFERENCE, precision="fp16"))
    training = estimate(row.shape, MemoryPlan(precision="fp16-mixed"))
    return ModelFit(row.source, row.notes, serving, training, ())


def requirements(fits):
    """Return each figure of the document beside the estimate, with the reason of the difference."""
    of = {
        (one.main_estimate.shape.name, found.plan.mode): found
        for one in fits
        for found in (one.inference, one.training)
    }
    return [
        {
            "model": model,
            "use": use,
            "parameters": of[model, use].parameters.total,
            "low_bytes": round(of[model, use].total.low),
            "expected_bytes": round(of[model, use].total.expected),
            "high_bytes": round(of[model, use].total.high),
            "document": figures,
            "reason": reason,
        }
        for model, use, figures, reason in DOCUMENT
    ]


def print_document(rows):
    print("\nThe document's figures beside these (GB = 10^9 bytes here; 16 bytes a parameter in training)\n")
    print(f"{'Model':<28} {'Here, GB':>9} {'Document':>13}  How the document's figure comes about")
    for row in rows:
        name = f"{row['model']} ({row['use'][:5]})"
        print(f"{name:<28} {row['expected_bytes'] / 1e9:>9.1f} {row['document']:>13}  {row['reason']}")


def capacity(device):
    """Return the memory of the GPU; without a GPU, that of the document's Tesla T4."""
    if device is not None:
        facts = torch.cuda.get_device_properties(device)
        return GpuMemory(facts.name, 1, facts.total_memory, facts.total_memory, "found here")
    row = find_by_typed_words("t4")
    return GpuMemory(row.names[0], 1, row.memory_bytes, usable_bytes(row), "no GPU here; the document's GPU")


def compatibility(fits, gpu):
    return [
        {
            "model": one.main_estimate.shape.name,
            "use": found.plan.mode,
            "required_bytes": round(found.total.expected),
            "status": verdict(found.total, gpu.usable_bytes),
        }
        for one in fits
        for found in (one.inference, one.training)
    ]


def throughput(device):
    """Train a small transformer for some seconds, and return its measured throughput."""
    place = "cpu" if device is None else f"cuda:{device}"
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        SMALL["hidden"], SMALL["heads"], 4 * SMALL["hidden"], dropout=0.0, batch_first=True, norm_first=True
    )
    model = nn.Sequential(
        nn.Embedding(SMALL["vocabulary"], SMALL["hidden"]),
        nn.TransformerEncoder(layer, SMALL["layers"], enable_nested_tensor=False),
        nn.Linear(SMALL["hidden"], SMALL["vocabulary"]),
    ).to(place)
    optimizer = torch.optim.AdamW(model.parameters())
    words = torch.randint(SMALL["vocabulary"], (SMALL["batch"], SMALL["length"] + 1), device=place)

    def step():
        logits = model(words[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def forward():
        with torch.no_grad():
            model(words[:, :-1])

    found = {"on": place, "parameters": sum(one.numel() for one in model.parameters())}
    for name, work in (("training", step), ("forward", forward)):
        iterations, seconds = timed(work, device)
        found[f"{name}_tokens_per_s"] = iterations * SMALL["batch"] * SMALL["length"] / seconds
        found[f"{name}_iterations"] = iterations
    return found


def timed(work, device):
    """Return the number of iterations in some seconds, and their time; the first two are warm-up."""
    for _ in range(2):
        work()
    wait = (lambda: None) if device is None else (lambda: torch.cuda.synchronize(device))
    wait()
    iterations, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        work()
        iterations += 1
    wait()
    return iterations, time.perf_counter() - start


if __name__ == "__main__":
    main()
