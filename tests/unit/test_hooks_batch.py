"""Counts of a batch, checked by hand: rows of 3 and 5 tokens, padded to 5."""

import pytest
from cases import cases

torch = pytest.importorskip("torch", reason="needs PyTorch")

from effllm.trainer.batch import read_batch  # noqa: E402

pytestmark = pytest.mark.torch

IDS = torch.tensor([[7, 8, 9, 0, 0], [1, 2, 3, 4, 5]])
MASK = (IDS != 0).long()
LABELS = torch.where(MASK == 1, IDS, -100)


#: On the diagonal, a mask of four dimensions is true except for padding; an additive mask has 0 in place of true.
CAUSAL = torch.tril(torch.ones(5, 5, dtype=torch.bool)) & MASK[:, None, :].bool() & MASK[:, :, None].bool()
ADDED = torch.where(CAUSAL, 0.0, torch.finfo(torch.float32).min)
FLAT, PLACES = torch.arange(8)[None], torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
ANSWERS = torch.tensor([[3, 4, -100], [3, 4, 5]])
DECODER = {"input_ids": IDS, "attention_mask": MASK, "labels": ANSWERS}
UNKNOWN, PACKED = "all positions, because padding is unknown", "packed, without padding"

PAIR = ("prompt", "chosen", "rejected")


def columns(ids, *names):
    return {f"{name}_{ids}": IDS if ids == "input_ids" else MASK for name in names}


#: Inputs, their counts (positions, samples, tokens, tokens with a label), and the source of the tokens.
BATCHES = {
    "masks and labels": ({"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}, (10, 2, 8, 8), "attention mask"),
    "no mask": ({"input_ids": IDS, "labels": LABELS}, (10, 2, 10, 8), UNKNOWN),
    "a mask of sequence numbers": ({"input_ids": IDS, "attention_mask": MASK * 3}, (10, 2, 8, 0), None),
    "a causal mask": ({"input_ids": IDS, "attention_mask": CAUSAL[:, None]}, (10, 2, 8, 0), None),
    "an additive mask": ({"input_ids": IDS, "attention_mask": ADDED[:, None]}, (10, 2, 8, 0), None),
    "packed": ({"input_ids": FLAT, "position_ids": PLACES, "labels": FLAT}, (8, 2, 8, 8), PACKED),
    "packed, by ends": ({"input_ids": FLAT, "cu_seq_lens_q": torch.tensor([0, 3, 8])}, (8, 2, 8, 0), PACKED),
    # The names of TRL's DPO up to version 0.24: the prompt, of 2 x 10 positions, is read with each of two answers.
    "a pair of answers": (
        columns("input_ids", *PAIR) | columns("attention_mask", *PAIR),
        (40, 4, 32, 16),
        None,
    ),
    "a pair of sentences": (columns("input_ids", "sentence1", "sentence2"), (20, 2, 20, 0), None),
    "three sentences": (columns("input_ids", "anchor", "positive", "negative"), (30, 2, 30, 0), None),
    "pictures": (
        {"pixel_values": torch.zeros(6, 3, 4, 4), "labels": torch.zeros(6, dtype=torch.long)}, (0, 6, 0, 0), None
    ),
    "a label per row": (
        {"input_ids": IDS, "attention_mask": MASK, "labels": torch.tensor([1, 0])}, (10, 2, 8, 0), None
    ),
    "embeddings": ({"inputs_embeds": torch.zeros(2, 5, 4), "attention_mask": MASK}, (10, 2, 8, 0), None),
    "encoder and decoder": (DECODER, (16, 2, 13, 5), None),
    "decoder with input": ({**DECODER, "decoder_input_ids": ANSWERS.clamp(min=0)}, (16, 2, 13, 5), None),
}  # fmt: skip


@pytest.mark.parametrize(("inputs", "counts", "source"), BATCHES.values(), ids=BATCHES)
def test_counts_of_a_batch(inputs, counts, source):
    batch = read_batch(inputs, is_encoder_decoder=inputs.get("labels") is ANSWERS)

    assert (batch.tokens_processed, int(batch.samples), int(batch.tokens), int(batch.tokens_loss)) == counts
    assert source in (None, batch.source)


@cases("inputs", [["a prompt"], {}, {"text": ["a"]}, None])
def test_batch_without_tensors_has_no_counts(inputs):
    assert read_batch(inputs) is None
