"""Train with a data-parallel loop of plain torch. The only call of effllm counts tokens and is optional."""

import os

import torch
from torch import distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import effllm

VOCABULARY, LENGTH, STEPS = 64, 32, int(os.environ.get("STEPS", "100"))


def main() -> None:
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 64), torch.nn.Linear(64, VOCABULARY)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = [(torch.arange(LENGTH) + row) % VOCABULARY for row in range(STEPS * 8 * distributed.get_world_size())]
    for batch in DataLoader(rows, batch_size=8, sampler=DistributedSampler(rows)):
        effllm.count(tokens=batch.numel(), samples=len(batch))
        ids = batch.to(device)
        loss = functional.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if distributed.get_rank() == 0:
        print(f"loss {loss.item():.6f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
