"""Generation in this process: ``generate`` of transformers, and ``LLM.generate`` and ``LLM.chat`` of vLLM.

The tokens of transformers are counted from the shapes of arguments and results, which need no synchronisation.  In a
result on the CPU, positions after the end of a sequence are not counted.  On a GPU, a search for the end would be a
synchronisation, so every sequence is counted with the length of the longest sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from effllm.hooks import Unknown
from effllm.hooks._parameters import model_name
from effllm.hooks._wrap import Call, Guard, around
from effllm.trainer import ownership
from effllm.trainer.inference import InferenceProcess, Requests

_GUARD, _VLLM_GUARD = Guard("generate of transformers"), Guard("vLLM")
_REQUESTS = Requests(ownership.GENERATION, "generation")
_PROMPTS = ("inputs", "input_ids", "inputs_embeds", "decoder_input_ids")


def attach(module: ModuleType) -> None:
    """Hook ``generate`` in the base class of all generating models of transformers."""
    mixin = getattr(module, "GenerationMixin", None)
    if mixin is None or not around(mixin, "generate", _GUARD, before=_begins, after=_generated, failed=_REQUESTS.end):
        raise Unknown("GenerationMixin.generate")


def attach_vllm(module: ModuleType) -> None:
    engine = getattr(module, "LLM", None)
    begins, ends, fails = _vllm_begins, _vllm_generated, _REQUESTS.end
    if engine is None or not around(engine, "generate", _VLLM_GUARD, before=begins, after=ends, failed=fails):
        raise Unknown("LLM.generate")
    around(engine, "chat", _VLLM_GUARD, before=begins, after=ends, failed=fails)


def _begins(call: Call) -> Any:
    model = call.args[0] if call.args else None
    return _REQUESTS.begin(lambda: _describe_model(model))


def _describe_model(model: Any) -> InferenceProcess:
    parameters = list(model.parameters()) if hasattr(model, "parameters") else []
    gpus = {parameter.device.index or 0 for parameter in parameters if parameter.device.type == "cuda"}
    if len(gpus) == 1 and gpus == {sys.modules["torch"].cuda.current_device()}:
        gpus = set()  # CUDA's current device need not be stated
    count = getattr(model, "num_parameters", None)  # this method also counts quantised parameters correctly
    return InferenceProcess(
        {"framework": "transformers", "model": model_name(model)},
        count() if count is not None else sum(parameter.numel() for parameter in parameters) or None,
        sorted(gpus),
    )


def _generated(begun: Any, call: Call, result: Any) -> None:
    _end_request(begun, lambda: _counts_of_call(call, getattr(result, "sequences", result)))


def _vllm_begins(call: Call) -> Any:
    return _REQUESTS.begin(lambda: _describe_engine(call.args[0] if call.args else None))


def _describe_engine(engine: Any) -> InferenceProcess:
    config = getattr(getattr(engine, "llm_engine", None), "vllm_config", None)
    workers = getattr(getattr(config, "parallel_config", None), "world_size", 1)
    return InferenceProcess({"framework": "vllm"}, gpus=range(workers if isinstance(workers, int) else 1))


def _vllm_generated(begun: Any, _call: Call, result: Any) -> None:
    _end_request(begun, lambda: _counts_of_outputs(list(result) if isinstance(result, (list, tuple)) else [result]))


def _counts_of_outputs(requests: list[Any]) -> tuple[int, int, int]:  # as `_counts_of_call`
    tokens = sum(len(output.token_ids) for request in requests for output in request.outputs)
    return tokens, sum(len(getattr(request, "prompt_token_ids", None) or ()) for request in requests), len(requests)


def _end_request(begun: Any, counts_of_result: Callable[[], tuple[int, int, int]]) -> None:
    if begun is None:
        return
    counts: tuple[int | None, int, int] = None, 0, 1  # used if the result cannot be counted
    try:
        counts = counts_of_result()
    finally:
        _REQUESTS.end(begun, *counts)


def _counts_of_call(call: Call, sequences: Any) -> tuple[int, int, int]:
    """Return three numbers: generated tokens, tokens in prompts, prompts."""
    rows, length = _rows_and_length(sequences)
    num_prompts, prompt_length = _rows_and_length(_prompt(call))
    first = _num_not_generated(call, prompt_length)  # position of the first generated token
    num_generated = rows * max(length - first, 0) - _num_padding(call, sequences, first)
    return num_generated, num_prompts * prompt_length, num_prompts or rows


def _prompt(call: Call) -> Any:
    named = {**call.kwargs}
    if len(call.args) > 1:
        named.setdefault("inputs", call.args[1])
    return next((named[name] for name in _PROMPTS if named.get(name) is not None), None)


def _num_not_generated(call: Call, prompt_length: int) -> int:
    """Return the number of tokens in a result that were not generated: the prompt, or a decoder's forced start."""
    if getattr(getattr(call.args[0], "config", None), "is_encoder_decoder", False):
        return max(_rows_and_length(call.kwargs.get("decoder_input_ids"))[1], 1)
    if call.kwargs.get("inputs_embeds") is not None:
        return _rows_and_length(call.kwargs.get("input_ids"))[1]  # the result does not contain embeddings of the prompt
    return prompt_length or 1


def _rows_and_length(tensor: Any) -> tuple[int, int]:  # 0 and 0 for a value that is no batch of sequences
    shape = getattr(tensor, "shape", None)
    return (int(shape[0]), int(shape[1])) if shape is not None and len(shape) >= 2 else (0, 0)


def _num_padding(call: Call, sequences: Any, first: int) -> int:
    """Return the number of positions from ``first`` on that are padding after the end of a sequence; 0 on a GPU."""
    device = getattr(sequences, "device", None)
    if device is None or device.type != "cpu" or not hasattr(sequences, "tolist"):
        return 0
    config = call.kwargs.get("generation_config") or getattr(call.args[0], "generation_config", None)
    ends = call.kwargs.get("eos_token_id", getattr(config, "eos_token_id", None))
    ends = {ends} if isinstance(ends, int) else set(ends) if isinstance(ends, (list, tuple)) else set()
    pad = call.kwargs.get("pad_token_id", getattr(config, "pad_token_id", None))
    return sum(_num_padding_in_row(row, ends, pad) for row in sequences[:, first:].tolist())


def _num_padding_in_row(row: list[int], ends: set[int], pad: int | None) -> int:
    """Return the number of tokens after the end of a sequence; ``ends`` are the tokens that end it.

    >>> [_num_padding_in_row(row, {2}, p) for row, p in (([5, 6, 2, 0, 0], 0), ([5, 6, 2, 2, 2], 2), ([5, 6, 0], 0))]
    [2, 2, 1]
    """
    for index, token in enumerate(row):
        if token in ends:
            return len(row) - index - 1
    padding = 0  # a sequence may also be stopped without an end token
    while padding < len(row) and row[-1 - padding] == pad:
        padding += 1
    return padding
