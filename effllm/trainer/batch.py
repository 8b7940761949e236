"""The counts of a Hugging Face batch: sequences, all positions, positions without padding, positions with a label.

Only shapes are read here.  Sums stay tensors, because reading a tensor on a GPU would be a synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MASK, PACKED, LABELS, UNKNOWN = (
    "attention mask",
    "packed, without padding",
    "labels",
    "all positions, because padding is unknown",
)

_IDS = "input_ids"
# A batch with one of these, and without a mask, has rows of packed sequences.
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_lengths", "seq_idx", "position_ids")
_IGNORED = -100  # the label of positions without loss


@dataclass(slots=True)
class Batch:
    """The counts of one micro-batch; each count is a number, or a tensor on a device."""

    tokens_processed: int = 0  # all positions
    samples: Any = 0  # sequences
    tokens: Any = 0  # positions without padding
    tokens_loss: Any = 0  # positions with a label
    source: str = ""  # the source of the count `tokens`, such as the mask; empty for a batch without text
    width: int | None = None  # number of positions of a row, if every row is one sequence


def read_batch(inputs: Any, is_encoder_decoder: bool = False) -> Batch | None:
    """Return the counts of a batch, or ``None`` for a batch without tensors.

    The decoder of an encoder-decoder model reads the labels as its input.
    """
    if not isinstance(inputs, Mapping):
        return None
    tensors = {name: value for name, value in inputs.items() if hasattr(value, "numel") and hasattr(value, "dim")}
    id_names = [name for name in tensors if isinstance(name, str) and name.endswith(_IDS)]
    if not id_names and "inputs_embeds" in tensors:
        tensors[_IDS] = tensors["inputs_embeds"][..., 0]  # one number for each position, as ids
        id_names = [_IDS]
    if not id_names:
        labels_first = sorted(tensors.items(), key=lambda item: item[0] != "labels")
        rows = [len(tensor) for _, tensor in labels_first if tensor.dim()]
        return Batch(samples=rows[0]) if rows else None
    batch = Batch()
    is_pair = {"chosen_input_ids", "rejected_input_ids"} <= set(id_names)
    for name in id_names:
        # The model reads the prompt of a pair twice, once before each answer.
        _add_positions(batch, tensors, inputs, name, times=2 if is_pair and name == "prompt_input_ids" else 1)
    labels = _labels_by_name(tensors, is_encoder_decoder)
    if is_encoder_decoder and "labels" in labels and "decoder_input_ids" not in tensors:
        batch.tokens_processed += labels["labels"].numel()
        batch.tokens = batch.tokens + (labels["labels"] != _IGNORED).sum()
    batch.tokens_loss = _num_with_label(tensors, labels)
    batch.samples = _num_samples(tensors, inputs, id_names)
    # The tensors of which a sequence consists: its ids, or its prompt and its completion.
    parts = [_IDS] if _IDS in tensors else [name for name in id_names if name.startswith(("prompt_", "completion_"))]
    if batch.source != PACKED and parts and all(tensors[name].dim() > 1 for name in parts) and not is_pair:
        batch.width = sum(int(tensors[name].shape[-1]) for name in parts)
    return batch


def _add_positions(batch: Batch, tensors: Mapping[str, Any], inputs: Mapping[str, Any], name: str, times: int) -> None:
    ids, mask = tensors[name], tensors.get(name.removesuffix(_IDS) + "attention_mask")
    labels = tensors.get("labels")
    tokens: Any = ids.numel()
    if mask is not None and mask.shape == ids.shape:
        tokens, source = (mask != 0).sum(), MASK  # the mask of a packed row may contain sequence numbers
    elif mask is not None and mask.dim() == 4 and mask.shape[-2:] == (ids.shape[-1], ids.shape[-1]):
        itself = mask[:, 0].diagonal(dim1=-2, dim2=-1)  # a position without padding attends to itself
        # A mask of numbers is added to the scores: 0 lets a position attend.
        tokens, source = (itself == 0 if itself.is_floating_point() else itself != 0).sum(), MASK
    elif name == "decoder_input_ids" and labels is not None and labels.shape == ids.shape:
        tokens, source = (labels != _IGNORED).sum(), LABELS
    elif any(name in inputs for name in _PACKED):
        source = PACKED
    else:
        source = UNKNOWN
    batch.tokens_processed += times * ids.numel()
    batch.tokens = batch.tokens + times * tokens
    if batch.source != UNKNOWN and source != LABELS:  # ids with unknown padding make the source of the batch unknown
        batch.source = source


def _labels_by_name(tensors: Mapping[str, Any], is_encoder_decoder: bool) -> dict[str, Any]:  # labels of positions
    shapes = [tensor.shape for name, tensor in tensors.items() if isinstance(name, str) and name.endswith(_IDS)]
    labels = {
        name: tensor
        for name, tensor in tensors.items()
        if isinstance(name, str) and name.endswith("labels") and tensor.dim() > 1 and not tensor.is_floating_point()
        if tensor.shape in shapes or is_encoder_decoder
    }
    if "labels" in labels:
        labels.pop("shift_labels", None)  # the same labels
    return labels


def _num_with_label(tensors: Mapping[str, Any], labels: Mapping[str, Any]) -> Any:
    if labels:
        return sum((tensor != _IGNORED).sum() for tensor in labels.values())
    masks = [name for name in ("completion_mask", "completion_attention_mask") if name in tensors]
    answers = masks[:1] or [name for name in ("chosen_attention_mask", "rejected_attention_mask") if name in tensors]
    return sum((tensors[name] != 0).sum() for name in answers)


def _num_samples(tensors: Mapping[str, Any], inputs: Mapping[str, Any], id_names: list[str]) -> Any:
    if _IDS in tensors:
        rows = len(tensors[_IDS]) if tensors[_IDS].dim() > 1 else 1
        boundaries: Any = tensors.get("cu_seq_lens_q")  # of packed sequences: the start of the first, and all ends
        positions: Any = tensors.get("position_ids")  # 0 at the start of each packed sequence
        if rows == 1 and boundaries is not None:
            return boundaries.numel() - 1
        is_packed = positions is not None and positions.shape == tensors[_IDS].shape and "attention_mask" not in inputs
        return (positions == 0).sum() if rows == 1 and is_packed else rows
    others = [name for name in id_names if not name.startswith(("prompt_", "decoder_"))]
    if any(name.startswith(("chosen_", "rejected_")) or "completion_" in name for name in others):
        return sum(len(tensors[name]) for name in others)  # each answer is a separate sequence
    return len(tensors[(others or id_names)[0]])  # the columns of a sentence-transformers pair are one sample
