"""vLLM in this process: ``LLM.generate`` and ``LLM.chat``; tokens are counted from their outputs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from effllm.hooks import Unknown
from effllm.hooks._wrap import Call, Guard, around
from effllm.trainer import ownership
from effllm.trainer.inference import InferenceProcess, Requests

_GUARD = Guard("vLLM")
_REQUESTS = Requests(ownership.GENERATION, "generation")


def attach(module: ModuleType) -> None:
    engine = getattr(module, "LLM", None)
    if engine is None or not around(engine, "generate", _GUARD, before=_begins, after=_generated, failed=_REQUESTS.end):
        raise Unknown("LLM.generate")
    around(engine, "chat", _GUARD, before=_begins, after=_generated, failed=_REQUESTS.end)


def _begins(call: Call) -> Any:
    return _REQUESTS.begin(lambda: _describe(call.args[0] if call.args else None))


def _describe(engine: Any) -> InferenceProcess:
    config = getattr(getattr(engine, "llm_engine", None), "vllm_config", None)
    workers = getattr(getattr(config, "parallel_config", None), "world_size", 1)
    return InferenceProcess({"framework": "vllm"}, gpus=range(workers if isinstance(workers, int) else 1))


def _generated(begun: Any, call: Call, result: Any) -> None:
    if begun is None:
        return
    counts: tuple[int | None, int, int] = None, 0, 1
    try:
        requests = list(result) if isinstance(result, (list, tuple)) else [result]
        tokens = sum(len(output.token_ids) for request in requests for output in request.outputs)
        prompts = sum(len(getattr(request, "prompt_token_ids", None) or ()) for request in requests)
        counts = tokens, prompts, len(requests)
    finally:
        _REQUESTS.end(begun, *counts)
