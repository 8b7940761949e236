"""The newest values of the whole job, as the aggregator publishes them to every rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from effllm.records.board import LOGGED, TRACKED, Board

NAN = float("nan")

#: Name of a value in the original EfficientLLM's methods -> one of the contract's six tags.
HEADLINE = {
    "amu": "amu_gb",
    "pcu": "pcu_ratio",
    "al": "al_seconds",
    "tt": "tt_tokens_per_param_per_sec",
    "st": "st_samples_per_param_per_sec",
    "aec": "aec_watts",
}
_IT = "it_tokens_per_sec"


@dataclasses.dataclass
class EfficientLLMMetrics:
    """The newest run-to-date values of the whole job; a value that is not measured is ``nan``."""

    amu: float = NAN
    pcu: float = NAN
    al: float = NAN
    tt: float = NAN
    st: float = NAN
    it: float = NAN
    aec: float = NAN


class JobValues:
    """The values of the newest report that this rank has read."""

    def __init__(self) -> None:
        self._by_tag: Mapping[str, float] = {}  # tag of a metric, as in summary.json -> value
        self.report = 0  #: number of the newest report; 0 before the first
        self._iteration = 0  # the last one of the report
        self._written_report = 0  # number of the newest report that was passed to a writer

    def update_from(self, board: Board) -> None:
        """Read the newest report, if there is one."""
        state = board.read_state()
        if state.report:
            self.report, self._iteration, self._by_tag = state.report, state.iteration, state.values

    def use_summary(self, by_tag: Mapping[str, float]) -> None:
        """Set the values of the run's summary; without new values, the earlier values stay."""
        self._by_tag = by_tag or self._by_tag

    def values_for_tracker(self, with_contract: bool) -> dict[str, float]:
        """Return the measured values for a tracker by its keys, with the contract's six values if asked for."""
        return {
            "efficientllm/iteration": self._iteration,
            **self._by_key(TRACKED),
            **{key: value for key, value in self.values_by_tag().items() if with_contract and math.isfinite(value)},
        }

    def values_for_logs(self) -> dict[str, float]:
        """Return the measured values for the logs of Hugging Face's Trainer, with four digits."""
        return {key: float(f"{value:.4g}") for key, value in self._by_key(LOGGED).items()}

    def _by_key(self, keys: Mapping[str, tuple[str, float]]) -> dict[str, float]:  # keys: by tag, a key and a factor
        values = {key: self._by_tag[tag] * factor for tag, (key, factor) in keys.items() if tag in self._by_tag}
        return {key: value for key, value in values.items() if math.isfinite(value)}

    def value(self, name: str) -> float:
        """Return a value by its name in `HEADLINE`; ``nan`` if it is not measured."""
        return self._by_tag.get(HEADLINE[name], NAN)

    def all(self) -> EfficientLLMMetrics:
        """Return the headline values and IT."""
        return EfficientLLMMetrics(**{name: self.value(name) for name in HEADLINE}, it=self._by_tag.get(_IT, NAN))

    def values_by_tag(self) -> dict[str, float]:
        """Return the contract's six values by their tags; ``nan`` for a value that is not measured."""
        return {f"efficientllm/{tag}": self._by_tag.get(tag, NAN) for tag in HEADLINE.values()}

    def write_once(self, writer: Any) -> None:
        """Pass the measured values of a new report to a writer, each report once; its exceptions are not caught."""
        if self.report > self._written_report:
            self._written_report = self.report
            for tag in HEADLINE.values():
                if tag in self._by_tag:
                    writer.add_scalar(f"efficientllm/{tag}", self._by_tag[tag], self._iteration)


class OriginalMetrics:
    """The methods of the original EfficientLLM's collector that return metrics."""

    def _newest_values(self) -> JobValues:
        """Return the newest values of the job."""
        raise NotImplementedError

    def calculate_amu(self) -> float:
        """Return the average memory utilization in GB."""
        return self._newest_values().value("amu")

    def calculate_pcu(self) -> float:
        """Return the peak compute utilization, 0..1."""
        return self._newest_values().value("pcu")

    def calculate_al(self) -> float:
        """Return the average latency in seconds per iteration."""
        return self._newest_values().value("al")

    def calculate_tt(self) -> float:
        """Return the token throughput in tokens per parameter and second."""
        return self._newest_values().value("tt")

    def calculate_st(self) -> float:
        """Return the sample throughput in samples per parameter and second."""
        return self._newest_values().value("st")

    def calculate_aec(self) -> float:
        """Return the average energy consumption in watts."""
        return self._newest_values().value("aec")

    def calculate_it(self, tokens_generated: float, total_inference_time: float) -> float:
        """Return the inference throughput in tokens per second; ``nan`` if no time passed."""
        try:
            return tokens_generated / total_inference_time if total_inference_time > 0 else NAN
        except Exception:  # noqa: BLE001 - an object of the caller's, which must not end the loop
            return NAN

    def get_all_metrics(self) -> EfficientLLMMetrics:
        """Return the newest values."""
        return self._newest_values().all()
