"""Train a small verifier with plain torch, with memory, times, throughput, metrics and scores of each step in JSON."""

import os
from pathlib import Path

import torch
from torch.nn import functional

from effllm.instruments.metrics import TrainingLogger
from effllm.instruments.profiling import ComprehensiveProfiler

EPOCHS, STEPS, BATCH, LENGTH = 3, 100, 32, 8
OUT = Path(os.environ.get("OUT", "out/instrument_panel"))


def batches(seed):
    """Yield sums of eight digits with a grade: 0 is wrong, 1 is off by one, 2 is right."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        digits = torch.randint(0, 10, (BATCH, LENGTH), generator=random)
        grade = torch.randint(0, 3, (BATCH,), generator=random)
        claimed = digits.sum(1) + torch.tensor([5, 1, 0])[grade]
        yield torch.cat([digits, claimed[:, None]], 1).float(), grade


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(LENGTH + 1, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    profiler = ComprehensiveProfiler(device=None)  # the device that torch uses now
    logger = TrainingLogger(OUT / "logs", "verifier_iter1")
    profiler.memory.set_baseline()
    step = 0
    for epoch in range(EPOCHS):
        for rows, grades in batches(epoch):
            profiler.start_iteration()
            with profiler.timer.time("forward"):
                logits = model(rows.to(device))
                loss = functional.cross_entropy(logits, grades.to(device))
            with profiler.timer.time("backward"):
                loss.backward()
            with profiler.timer.time("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.end_iteration(num_samples=len(rows), num_tokens=rows.numel())
            if step % 10 == 0:  # item() waits for a GPU, so it is not called in every step
                given = logits.detach().argmax(1).cpu()
                reward = (given == grades).float().mean()
                scores = (given / 2).tolist()  # 0, 0.5 or 1
                logger.log_step(step, {"loss": loss.item(), "reward": reward.item()}, scores)
            step += 1
        profiler.export_to_json(OUT / f"profiling_epoch{epoch}.json")
        logger.save_checkpoint_metrics(f"epoch{epoch}")
        if profiler.memory.detect_leak(threshold_gb=0.1):
            print(f"epoch {epoch}: memory grows")
        newest, rates = logger.metrics.get_mean("loss", window=5), profiler.throughput.get_current_throughput()
        print(f"epoch {epoch}: loss {newest:.4f}, {rates['samples_per_sec']:.0f} samples/s")
    print(f"written: {logger.export_all()}")


if __name__ == "__main__":
    main()
