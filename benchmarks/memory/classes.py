"""The parameters of each class of transformers, with the default sizes of its config, on the meta device."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, suppress
from io import StringIO
from typing import Any

from benchmarks.memory.published import head, line
from effllm.memory import model_count
from effllm.memory.config_json import ONLY_TEXT, UnknownArchitecture, read_config
from effllm.memory.plan import WrongModel
from effllm.memory.states import count_parameters

OUTCOMES = ("exact by formulas", "text by formulas, whole counted", "counted", "refused", "wrong", "not built")


def classes() -> Iterator[str]:
    """Yield the lines of the report."""
    import transformers

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    yield from ("## Parameters of the classes of transformers", "")
    yield f"transformers {transformers.__version__}, default sizes of each config, models on the meta device."
    yield from ("", *head("classes", *OUTCOMES))
    named = []
    for kind in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT"):
        found: list[str] = []
        for config, build in (mapping := getattr(transformers, f"MODEL_FOR_{kind}_MAPPING")).items():
            print(f"{kind} {len(found) + 1} of {len(mapping)}: {config.__name__:<40}", end="\r", file=sys.stderr)
            what, why = outcome(config, build[0] if isinstance(build, tuple) else build)
            found.append(what)
            named += [f"- {what}: {config.__name__}: {why}"] if why else []
        yield line(kind, *(str(found.count(one)) for one in OUTCOMES))
    yield from ("", *sorted(set(named)), "")


def outcome(config_class: Any, build: Any) -> tuple[str, str]:
    """Return what fit says of a class, and the reason if it is not the number of parameters of the model."""
    import torch

    try:
        with torch.device("meta"), redirect_stderr(StringIO()):
            config = config_class()
            expected = sum(one.numel() for one in build(config).parameters())
    except Exception as error:  # noqa: BLE001 - the defaults of a few classes are not a model
        return "not built", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:100]}"
    fields = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [build.__name__]}
    shape = None
    try:
        with suppress(UnknownArchitecture):
            shape = read_config(fields)
    except WrongModel as error:
        return "refused", str(error)
    said = count_parameters(shape).total if shape else 0
    if said == expected:
        return "exact by formulas", ""
    try:
        with redirect_stderr(StringIO()):
            answer = model_count.count(fields)  # in this process, which has imported transformers
    except Exception as error:  # noqa: BLE001 - as in isolated.answer
        return "refused", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:100]}"
    counted = sum(rows * (columns or 1) * count for _, _, rows, columns, count in answer["tensors"])
    is_text = shape is not None and any(note.startswith(ONLY_TEXT) for note in shape.notes)
    if counted != expected or (shape and not is_text):
        return "wrong", f"{said:,} by formulas, {counted:,} counted, {expected:,} in the model"
    return OUTCOMES[1 if is_text else 2], ""
