"""The token counter in a plain loop with a DataLoader of torch: masks, packed rows, workers."""

from __future__ import annotations

import jobs
import pytest
from cases import cases

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.utils.data import DataLoader  # noqa: E402

from effllm.instruments.token_counter import CountingCollator  # noqa: E402

pytestmark = jobs.needs_torch

ROWS = [[1] * (1 + i % 5) for i in range(30)]  # each row has 1 to 5 tokens; all rows together have 90 tokens


def padded(rows):
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.where(ids != 0, ids, -100)}


def packed(rows):
    places = [place for row in rows for place in range(len(row))]
    return {"input_ids": torch.ones(1, len(places), dtype=torch.long), "position_ids": torch.tensor([places])}


@cases("workers", [0, 2])
@cases("collate", [padded, packed])
def test_tokens_without_padding_are_counted_once(collate, workers):
    collator = CountingCollator(collate)
    loader = DataLoader(ROWS, batch_size=4, collate_fn=collator, num_workers=workers)

    batches = list(collator.over(loader))

    assert (collator.batches, collator.samples, collator.tokens) == (len(batches), 30, 90) == (8, 30, 90)
    assert collator.tokens_processed == sum(batch["input_ids"].numel() for batch in batches)


def test_only_batches_that_the_loop_receives_are_counted():
    """Two workers have made more batches than the loop uses."""
    collator = CountingCollator(padded)
    loader = iter(collator.over(DataLoader(ROWS, batch_size=5, collate_fn=collator, num_workers=2)))

    next(loader), next(loader)

    assert (collator.batches, collator.tokens) == (2, 30)


@pytest.mark.parametrize("collate", [lambda rows: tuple(padded(rows).values()), lambda rows: rows, lambda rows: None])
def test_batch_of_an_unknown_kind_is_not_counted_and_warns_once(collate):
    collator = CountingCollator(collate)
    assert str(collator.tokens) == "nan"

    with pytest.warns(UserWarning, match="cannot be counted") as warned:
        batches = list(collator.over(DataLoader(ROWS, batch_size=10, collate_fn=collator)))

    assert (len(batches), len(warned)) == (3, 1)
    assert str(collator.tokens) == str(collator.samples) == "nan"
    with pytest.raises(TypeError, match="not callable"):
        CountingCollator("padded")


def test_batches_without_text_are_counted_as_samples_only():
    collator = CountingCollator(lambda rows: {"pixel_values": torch.zeros(len(rows), 3)})

    list(collator.over(DataLoader(ROWS, batch_size=10, collate_fn=collator)))

    assert (collator.samples, str(collator.tokens)) == (30, "nan")


LOOP = """
import json
import torch
from torch.utils.data import DataLoader
from effllm.instruments.token_counter import CountingCollator
import effllm

rows = [[1] * (1 + i % 5) for i in range(30)]
def padded(rows):
    ids = torch.tensor([row + [0] * (5 - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}

collator = CountingCollator(padded)
effllm.initialize_efficientllm_metrics(1000)
metrics = effllm.get_metrics_collector()
for batch in collator.over(DataLoader(rows, batch_size=5, collate_fn=collator, num_workers=2)):
    metrics.record_iteration_start()
    metrics.record_iteration_end()
effllm.finalize_efficientllm_metrics()
"""


def test_counts_of_a_plain_loop_are_in_the_summary(launch):
    summary = launch.code(LOOP).done().ledger.summary

    assert (summary.iterations, summary.samples, summary.tokens) == (6, 30, 90)
