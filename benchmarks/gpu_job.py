"""A training loop as users write it, on a GPU or else on a CPU: ``gpu_job.py MODE STEPS FILE``.

Modes: ``plain``; ``compiled``, in which torch.compile captures CUDA graphs; ``captured``, in which the whole step is
one CUDA graph.  FILE gets the losses and the times of the steps; gpu_training.py judges them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

ON_GPU = torch.cuda.is_available()
LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = (8, 1024, 16, 32000, 1024, 8) if ON_GPU else (2, 64, 4, 256, 32, 4)
LAYERS = min(LAYERS, 2) if "compiled" in sys.argv else LAYERS  # torch.compile takes seconds for each layer
WARM_UP = 10
MEASURED = os.environ.get("EFFICIENTLLM_METRICS_ENABLED") != "0"
DEVICE, TYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)


class Block(nn.Module):
    """A layer of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.heads(self.first(hidden)).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-3, -2)
        attended = functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        hidden = hidden + self.out(attended.transpose(-3, -2).flatten(-2))
        return hidden + self.narrow(functional.gelu(self.wide(self.second(hidden))))


class Model(nn.Module):
    """A decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.words(tokens)))


def main(mode: str, steps: int, path: Path) -> None:
    """Train ``steps`` steps after the warm-up, and write what the loop itself has seen."""
    torch.manual_seed(7)
    model = Model().to(DEVICE, TYPE)
    parameters = sum(one.numel() for one in model.parameters())
    # Two FLOPs per parameter and token forward, four backward; the attention is causal.
    flops = 6 * (parameters - VOCABULARY * WIDTH) + 6 * LAYERS * LENGTH * WIDTH
    count = _measure(parameters, flops) if MEASURED else lambda: None
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, capturable=ON_GPU)
    forward: Any = torch.compile(model, mode="reduce-overhead") if mode == "compiled" else model
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device=DEVICE)

    def step() -> torch.Tensor:
        found = functional.cross_entropy(forward(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        count()
        return found.detach()

    run = _captured(step, optimizer) if mode == "captured" else step
    losses = [run().clone() for _ in range(WARM_UP)]
    times = Times()
    losses += [run().clone() for _ in range(steps)]
    seen = {
        "losses": [float(one) for one in losses],
        "flops_per_step": flops * BATCH * LENGTH,
        "tokens_per_step": BATCH * LENGTH,
        "allocated_peak_bytes": torch.cuda.max_memory_allocated() if ON_GPU else None,
        **times.end(steps),
    }
    path.write_text(json.dumps(seen))


class Times:
    """Time of the steps on the host, and on the device by CUDA events."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if ON_GPU else (None, None)
        if self._begin is not None:
            torch.cuda.synchronize()
            self._begin.record()
        self._began_s = time.perf_counter()

    def end(self, steps: int) -> dict[str, float | None]:
        if self._begin is None or self._end is None:
            return {"step_s": (time.perf_counter() - self._began_s) / steps, "device_step_s": None}
        self._end.record()
        torch.cuda.synchronize()
        host_s = (time.perf_counter() - self._began_s) / steps
        return {"step_s": host_s, "device_step_s": self._begin.elapsed_time(self._end) / 1e3 / steps}


def _measure(parameters: int, flops: float) -> Any:
    import effllm

    effllm.initialize_efficientllm_metrics(parameters, flops_per_token=flops, facts={"precision": str(TYPE)[6:]})
    return lambda: effllm.count(tokens=BATCH * LENGTH, samples=BATCH)


def _captured(step: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return a function that replays one captured step."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
