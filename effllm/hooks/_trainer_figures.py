"""The figures in the logs of a Hugging Face Trainer: of transformers, TRL and axolotl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effllm.records.framework_figures import TOKENS_PER_ITERATION, TOKENS_PER_S, TOKENS_PER_S_PER_GPU

#: The total of tokens in a Trainer's logs: transformers' count, or else that of TRL's SFTTrainer.
TOTALS = ("num_input_tokens_seen", "num_tokens")
#: The figure of axolotl in a Trainer's logs.
AXOLOTL = "tokens/train_per_sec_per_gpu"


class TrainerFigures:
    """Converts the totals and means of a Trainer's logs to means since its last log."""

    def __init__(self) -> None:
        self._total: tuple[float, int] | None = None  # tokens and steps at the last log with more tokens
        self._to_date = (0.0, 0.0)  # tokens and seconds since the start of the training

    def take(self, logs: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return the figures of a log after this step, by names in `FIGURES`."""
        figures: dict[str, Any] = {TOKENS_PER_S_PER_GPU: logs.get(AXOLOTL)}
        total = next(filter(None, (_number(logs, name) for name in TOTALS)), None)
        tokens, last = self._total or (0.0, step)
        if total is not None and (self._total is None or (step > last and total > tokens)):
            self._total = (total, step)
            if step > last:
                figures[TOKENS_PER_ITERATION] = (total - tokens) / (step - last)
        # transformers logs the mean rate since the start of the training, and the seconds since then.
        rate, seconds = _number(logs, "train_tokens_per_second"), _number(logs, "train_runtime")
        if rate is not None and seconds is not None:
            (tokens, start_s), self._to_date = self._to_date, (rate * seconds, seconds)
            if 0 < start_s < seconds:
                figures[TOKENS_PER_S] = (self._to_date[0] - tokens) / (seconds - start_s)
        return figures


def _number(logs: Mapping[str, Any], name: str) -> float | None:
    value: Any = logs.get(name)
    return float(value) if type(value) in (int, float) else None
