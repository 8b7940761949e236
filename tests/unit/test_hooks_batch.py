"""Counts of a batch, checked by hand: rows of 3 and 5 tokens, padded to 5."""

import pytest
from cases import cases

torch = pytest.importorskip("torch", reason="needs PyTorch")

from effllm.trainer.batch import read_batch  # noqa: E402

pytestmark = pytest.mark.torch

IDS = torch.tensor([[7, 8, 9, 0, 0], [1, 2, 3, 4, 5]])
MASK = (IDS != 0).long()
LABELS = torch.where(MASK == 1, IDS, -100)


def held(inputs, **named):
    batch = read_batch(inputs, **named)
    return batch.tokens_processed, int(batch.samples), int(batch.tokens), int(batch.tokens_loss)


def test_masks_give_the_padding_and_labels_the_learned_tokens():
    assert held({"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}) == (10, 2, 8, 8)


def test_missing_mask_gives_unknown_padding_and_a_warning():
    batch = read_batch({"input_ids": IDS, "labels": LABELS})

    assert int(batch.tokens) == 10
    assert batch.source == "all positions, because padding is unknown"


def test_mask_of_sequence_numbers_is_counted_not_summed():
    assert held({"input_ids": IDS, "attention_mask": MASK * 3})[2] == 8


def test_mask_of_four_dimensions_is_read_by_its_diagonal():
    """On the diagonal, a mask is true except for padding; an additive mask has 0 in place of true."""
    causal = torch.tril(torch.ones(5, 5, dtype=torch.bool)) & MASK[:, None, :].bool() & MASK[:, :, None].bool()
    added = torch.where(causal, 0.0, torch.finfo(torch.float32).min)

    assert held({"input_ids": IDS, "attention_mask": causal[:, None]})[2] == 8
    assert held({"input_ids": IDS, "attention_mask": added[:, None]})[2] == 8


def test_each_packed_sequence_is_a_sample_without_padding():
    flat = torch.arange(8)[None]
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])

    assert held({"input_ids": flat, "position_ids": places, "labels": flat}) == (8, 2, 8, 8)
    assert held({"input_ids": flat, "cu_seq_lens_q": torch.tensor([0, 3, 8])}) == (8, 2, 8, 0)
    assert read_batch({"input_ids": flat, "position_ids": places}).source == "packed, without padding"


def test_prompt_of_a_pair_is_counted_with_each_answer():
    """TRL's DPO has these names up to version 0.24; prompts have 2 x 10 positions, and each kind of answer has 10."""
    pair = {"prompt": IDS, "chosen": IDS, "rejected": IDS}
    batch = {f"{name}_input_ids": ids for name, ids in pair.items()}
    batch |= {f"{name}_attention_mask": MASK for name in pair}

    assert held(batch) == (40, 4, 32, 16)


def test_a_pair_of_sentence_transformers_is_one_sample():
    columns = {f"{name}_input_ids": IDS for name in ("sentence1", "sentence2")}
    triplet = {f"{name}_input_ids": IDS for name in ("anchor", "positive", "negative")}

    assert held(columns)[:2] == (20, 2)
    assert held(triplet)[:2] == (30, 2)


def test_labels_count_as_decoder_tokens_of_an_encoder_decoder():
    labels = torch.tensor([[3, 4, -100], [3, 4, 5]])
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": labels}

    assert held(batch, is_encoder_decoder=True) == (16, 2, 13, 5)
    assert held({**batch, "decoder_input_ids": labels.clamp(min=0)}, is_encoder_decoder=True) == (16, 2, 13, 5)


def test_labelled_pictures_are_counted_as_samples_without_tokens():
    assert held({"pixel_values": torch.zeros(6, 3, 4, 4), "labels": torch.zeros(6, dtype=torch.long)}) == (0, 6, 0, 0)


def test_one_label_per_row_gives_no_learned_tokens():
    assert held({"input_ids": IDS, "attention_mask": MASK, "labels": torch.tensor([1, 0])}) == (10, 2, 8, 0)


def test_positions_of_embeddings_are_counted_if_there_are_no_tokens():
    assert held({"inputs_embeds": torch.zeros(2, 5, 4), "attention_mask": MASK}) == (10, 2, 8, 0)


@cases("inputs", [["a prompt"], {}, {"text": ["a"]}, None])
def test_batch_without_tensors_has_no_counts(inputs):
    assert read_batch(inputs) is None
