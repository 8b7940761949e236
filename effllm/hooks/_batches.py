"""The micro-batches of an iteration, read from the calls of the model; numbers on a GPU are read without a wait."""

from __future__ import annotations

import atexit
import functools
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from effllm.hooks._parameters import Parameters, convention_of, flops_per_token, vocabulary_size_of
from effllm.hooks._steps import Steps
from effllm.hooks._wrap import Guard
from effllm.trainer.batch import MASK, PACKED, UNKNOWN, Batch, read_batch
from effllm.trainer.collector import get_metrics_collector

_DEPTH = 4  # maximal depth of the search for a tensor in a batch of unknown type
_IDS = "input_ids"  # transformers' name of token ids
_OTHER_NAMES_OF_IDS = ("idx", "tokens")  # litgpt and nanoGPT, torchtune

_FLOPS_GUARD = Guard("the number of FLOPs")


def pinned_memory(num_values: int) -> Any:
    """Return host memory that a GPU can write asynchronously."""
    torch: Any = sys.modules["torch"]
    return torch.empty(num_values, dtype=torch.int64, pin_memory=True)


def recorded_event(device: Any) -> Any:
    """Return an event after all work already queued on a GPU's current stream; its ``query()`` does not wait."""
    torch: Any = sys.modules["torch"]
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record()
    return event


class LateSums:
    """Sums of numbers; some of the numbers arrive late from a GPU.

    Each number is copied into pinned memory, and a CUDA event is recorded after the copy.  After this event, usually
    one iteration later, the number is read.  The logic is tested with a fake event and fake memory; its cost on a GPU
    was not measured.
    """

    def __init__(self, num_sums: int) -> None:
        self._num_sums = num_sums
        self._arrived_sums = [0] * num_sums  # of the numbers that have arrived since the last call of `take_sums`
        self._copies: deque[tuple[Any, Any]] = deque()  # event and buffer of each copy, oldest first
        self._free_buffers: list[Any] = []  # pinned memory of finished copies, used again

    def add_numbers(self, values: Sequence[Any]) -> bool:
        """Add a number to each sum, without a wait for a GPU; a number may be a tensor of one element.

        ``False``: nothing is counted, because the tensors are on an accelerator without CUDA's interface.
        """
        types = [value.device.type if hasattr(value, "device") else "cpu" for value in values]
        if not set(types) <= {"cpu", "cuda"}:
            return False
        tensors_by_device: dict[Any, dict[int, Any]] = {}  # device -> index of a sum -> tensor
        for index, (value, device_type) in enumerate(zip(values, types, strict=True)):
            if device_type == "cpu":
                self._arrived_sums[index] += int(value)
            else:
                tensors_by_device.setdefault(value.device, {})[index] = value
        for device, tensors in tensors_by_device.items():
            self._copy_from_device(device, tensors)
        return True

    def _copy_from_device(self, device: Any, tensors: dict[int, Any]) -> None:
        torch: Any = sys.modules["torch"]
        zero = torch.zeros_like(next(iter(tensors.values())))  # for sums whose number is on another device
        row = torch.stack([tensors.get(index, zero) for index in range(self._num_sums)])
        buffer = self._free_buffers.pop() if self._free_buffers else pinned_memory(self._num_sums)
        buffer.copy_(row, non_blocking=True)
        self._copies.append((recorded_event(device), buffer))

    def take_sums(self) -> list[int]:
        """Return the sums of the numbers that have arrived since the last call."""
        while self._copies and self._copies[0][0].query():
            self._add_oldest_copy()
        sums, self._arrived_sums = self._arrived_sums, [0] * self._num_sums
        return sums

    def wait_and_take_sums(self) -> list[int]:
        """Wait for all numbers, and return their sums since the last call; after training, the wait costs nothing."""
        while self._copies:
            self._copies[0][0].synchronize()
            self._add_oldest_copy()
        return self.take_sums()

    def _add_oldest_copy(self) -> None:
        _, buffer = self._copies.popleft()
        for index, value in enumerate(buffer.tolist()):
            self._arrived_sums[index] += value
        self._free_buffers.append(buffer)


class LazyNumber:
    """A number of an iteration, plain or a tensor of one element, read without a wait even if it is on a GPU."""

    def __init__(self, iteration: int, tensor: Any) -> None:
        self.iteration = iteration
        self._value: float | None = None  # the number, after it has arrived
        self._copy: Any = None  # pinned memory, to which the GPU writes the number
        self._event: Any = None  # after the write; None if no write is pending
        if getattr(tensor, "is_cuda", False):
            torch: Any = sys.modules["torch"]
            self._copy = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor.detach().reshape(-1), non_blocking=True)
            self._event = recorded_event(tensor.device)
        elif getattr(getattr(tensor, "device", None), "type", "cpu") == "cpu":
            self._value = float(getattr(tensor, "detach", lambda: tensor)())

    def value_if_ready(self) -> float | None:
        """Return the number; ``None`` before it has arrived, and always on an accelerator without CUDA's interface."""
        if self._event is not None and self._event.query():
            self._value, self._event = float(self._copy), None
        return self._value


class Batches:
    """Sums up micro-batches until their iteration ends."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._late = LateSums(3)  # samples, tokens, tokens with a label
        self._tokens_processed = 0  # all positions in the micro-batches of this iteration
        self._source = ""  # the newest `Batch.source` among the facts of the run; "" before the first batch with text
        self._batch_of_new_source: Batch | None = None  # the newest batch with another source
        self.has_packed = False  # whether the last batch had rows of packed sequences, which are samples
        self._model: Any = None  # a weak reference: the training may delete the model
        self._parameters: Parameters | None = None
        self.vocabulary_size: int | None = None  # of the model, if it is known and a language model
        self._at_exit = functools.partial(Guard("the count of the last iterations"), self._add_arrived_at_exit)

    def set_model(self, model: Any, parameters: Parameters | None) -> None:
        """Set the model whose FLOPs are computed at the first batch with text; called after the metrics have begun."""
        self._model, self._parameters, self._source = weakref.ref(model), parameters, ""
        self.vocabulary_size = _FLOPS_GUARD(vocabulary_size_of, model)
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)  # handlers run in reverse order: this one runs before the session's handler

    def add_batch(self, inputs: Any, counts_samples: bool = True) -> None:
        """Count tokens and samples of a micro-batch, or of a hook's `Batch`; if it has no text, only samples."""
        counts = inputs if isinstance(inputs, Batch) else counts_of_batch(inputs, self.vocabulary_size is not None)
        if counts.source and counts.source != self._source:
            self._batch_of_new_source = counts
        self._tokens_processed += counts.tokens_processed
        self._steps.record_positions(counts.tokens_processed)
        self.has_packed = counts.source == PACKED
        samples = counts.samples if counts_samples else 0
        if not self._late.add_numbers((samples, counts.tokens, counts.tokens_loss)):
            # Counts on this accelerator cannot be read without a wait, so all positions count as tokens.
            self._late.add_numbers((samples if isinstance(samples, int) else 1, counts.tokens_processed, 0))

    def end_iteration(self, at_ns: int | None = None) -> None:
        """End the iteration with the sums; if `effllm.count` was called, its counts are used instead.

        For ``at_ns`` see `Steps.end_step`.
        """
        samples, tokens, tokens_loss = self._late.take_sums()
        tokens_processed, self._tokens_processed = self._tokens_processed, 0
        is_counted_here = not get_metrics_collector().has_counted
        if self._batch_of_new_source is not None and is_counted_here:
            self._declare_batch_facts(self._batch_of_new_source)
            self._batch_of_new_source = None
        if self._source and is_counted_here:
            self._steps.end_step(tokens_processed, samples, tokens, tokens_loss, at_ns=at_ns)
        else:
            self._steps.end_counted(samples)

    def finish(self) -> None:
        """Add the remaining counts at the end of training, when a wait for a GPU costs nothing."""
        atexit.unregister(self._at_exit)
        samples, tokens, tokens_loss = self._late.wait_and_take_sums()
        if self._source:
            self._steps.add_late_counts(samples=samples, tokens=tokens, tokens_loss=tokens_loss)

    def _add_arrived_at_exit(self) -> None:
        """Add the counts that the GPU has computed since the last iteration's end; do not wait for other counts."""
        samples, tokens, tokens_loss = self._late.take_sums()
        if self._source and not self._tokens_processed:  # otherwise counts of an open iteration are included
            self._steps.add_late_counts(samples=samples, tokens=tokens, tokens_loss=tokens_loss)

    def _declare_batch_facts(self, counts: Batch) -> None:  # its source; of the first batch, also its width and FLOPs
        is_first, self._source = not self._source, counts.source
        facts: dict[str, Any] = {"token_source": counts.source}
        flops = None
        if is_first and counts.width and self._parameters is not None:
            facts["sequence_length"] = counts.width
            if flops_of_token := _FLOPS_GUARD(flops_per_token, self._model(), self._parameters, counts.width):
                convention = convention_of(self._model())
                facts["flops_convention"] = f"{convention}; sequence length: width of the first batch"
                flops = flops_of_token[0]
        self._steps.add_late_facts(flops_per_token=flops, facts=facts)


def counts_of_batch(inputs: Any, is_language_model: bool = False) -> Batch:
    """Return the counts of a batch of any type; if it has no text, only the samples of its first tensor.

    With ``is_language_model``, the ids of a batch need no name.
    """
    batches = map(read_batch, _mappings_in(inputs, _DEPTH))
    counts = next((batch for batch in batches if batch is not None and batch.source), None) or read_batch(inputs)
    if (counts is None or not counts.source) and is_language_model:
        counts = _counts_of_ids(inputs) or counts
    if counts is None or not counts.source:
        first = next(_tensors_in(inputs, _DEPTH), None)
        counts = Batch(samples=int(first.shape[0]) if first is not None and first.dim() else 1)
    return counts


def _mappings_in(inputs: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield each mapping in a batch, outer ones first; the first may be the fields of an object."""
    is_object = depth == _DEPTH and not hasattr(inputs, "numel")  # objects in a batch may refer to anything
    members = inputs if isinstance(inputs, Mapping) else getattr(inputs, "__dict__", {}) if is_object else {}
    if members:
        yield members
    for member in members.values() if depth else ():
        yield from _mappings_in(member, depth - 1)


def _counts_of_ids(inputs: Any) -> Batch | None:
    """Return the counts of a batch without names: rows of ids, perhaps with their labels and a mask of 0 and 1.

    Labels are the ids, or the next ids; so the two texts of a pair and the columns of a table are no ids with labels.
    """
    tensors = list(_tensors_in(inputs, _DEPTH))
    if not 0 < len(tensors) <= 3 or any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        return None
    first = tensors[0]
    if first.dim() != 2 or first.shape[1] < 2 or any(tensor.shape != first.shape for tensor in tensors):
        return None
    masks = [tensor for tensor in tensors if len(tensors) > 1 and _is_mask(tensor)]
    texts = [tensor for tensor in tensors if not any(tensor is mask for mask in masks)]
    if len(masks) > 1 or not texts or (len(texts) > 1 and not _are_labels(*texts)):
        return None
    rows, width = map(int, first.shape)
    tokens = (masks[0] != 0).sum() if masks else rows * width
    return Batch(rows * width, rows, tokens, source=MASK if masks else UNKNOWN, width=width)


def _is_mask(tensor: Any) -> bool:  # on a GPU, to read the values would be a wait
    return tensor.device.type == "cpu" and bool(((tensor == 0) | (tensor == 1)).all())


def _are_labels(ids: Any, labels: Any) -> bool:  # a label below 0 marks a position without loss
    if ids.device.type != "cpu" or labels.device.type != "cpu":
        return False
    ignored = labels < 0
    same_and_ignored = ((labels == ids, ignored), (labels[:, :-1] == ids[:, 1:], ignored[:, :-1]))  # ids, or next ids
    return any(bool(same.any()) and bool((same | without_loss).all()) for same, without_loss in same_and_ignored)


def inputs_of(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments of a model's call by parameter name; token ids always have the name ``input_ids``."""
    if len(args) == 1 and not kwargs and not hasattr(args[0], "dim"):
        return args[0]  # the whole batch
    model_class: Any = type(module)
    inputs = {**dict(zip(_parameter_names(model_class), args, strict=False)), **kwargs}
    if not any(isinstance(name, str) and name.endswith(_IDS) for name in inputs):
        for name in _OTHER_NAMES_OF_IDS:
            ids: Any = inputs.get(name)
            if hasattr(ids, "dim") and ids.dim() == 2 and not ids.is_floating_point():
                inputs[_IDS] = inputs.pop(name)
                break
    return inputs


@functools.lru_cache(maxsize=16)
def _parameter_names(model_class: Any) -> tuple[str, ...]:
    try:
        parameters = list(inspect.signature(model_class.forward).parameters.values())[1:]  # without self
    except (AttributeError, TypeError, ValueError):
        parameters = []
    return tuple(each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))


def _tensors_in(value: Any, depth: int) -> Iterator[Any]:  # at most so deep in dictionaries, lists and objects
    if hasattr(value, "numel") and hasattr(value, "dim"):
        yield value
    elif depth and isinstance(value, Mapping):
        for member in value.values():
            yield from _tensors_in(member, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for member in value:
            yield from _tensors_in(member, depth - 1)
    elif depth and hasattr(value, "__dict__"):
        yield from _tensors_in(vars(value), depth - 1)
