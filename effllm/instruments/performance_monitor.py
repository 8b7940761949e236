"""The monitor of the original EfficientLLM for evaluation harnesses, with its names; this rank's agent measures.

A value that is not measured is ``nan``, never 0.  Requests are counted and not stored.  Only the GPUs of this process
are measured.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from effllm.config.switches import process_environ
from effllm.instruments._files import write_json
from effllm.instruments._number import number, to_count
from effllm.instruments._statistics import NAN
from effllm.trainer.collector import get_metrics_collector
from effllm.trainer.inference import DECLARED, InferenceProcess, record_request

#: Name of a scenario -> the metric that is its throughput.
SCENARIOS = {
    "pretraining": "TT", "pretrain": "TT", "training": "TT",
    "finetuning": "ST", "finetune": "ST", "sft": "ST", "peft": "ST",
    "inference": "IT", "generation": "IT", "serving": "IT",
}  # fmt: skip


class PerformanceMonitor:
    """Measures the requests of this process: AMU, PCU, AL, AEC, MCR, and one of TT, ST and IT.

    The agent measures AMU, PCU and AEC during requests.  Their values include the requests up to the end of the last
    window (``EFFICIENTLLM_LOG_INTERVAL``); after `stop` they include all requests.  AL and the throughput use the times
    that are passed to `record_request`.  Without a time, AL is ``nan``, and the throughput uses the time since the
    previous request.

    Args:
        device_id: index of the GPU, if neither CUDA_VISIBLE_DEVICES nor torch shows the GPUs of this process.
    """

    def __init__(self, device_id: int = 0) -> None:
        self._device_id = device_id
        self._throughput_name: str | None = None
        self._parameters: int | None = None
        self._compression: tuple[float, float, float, float] | None = None  # arguments of `set_compression_info`
        self._started_s: float | None = None
        self._ended_s: float | None = None
        self._last_request_s = 0.0  # end of the last request
        self._has_started_metrics = False
        self._requests = self._tokens = self._samples = self._generated_tokens = 0
        self._stated_s = 0.0  # sum of the times that were passed to `record_request`
        self._assumed_s = 0.0  # for requests without a time: sum of the times since the previous request
        self._num_assumed = 0
        self._amu, self._pcu, self._aec = NAN, NAN, NAN  # as the agent last published them

    def start(self) -> None:
        """Start the metrics, unless they already run; a second start does nothing."""
        if self._started_s is not None:
            return
        was_collecting = get_metrics_collector().is_collecting
        DECLARED.start_metrics(
            lambda: InferenceProcess({"framework": "PerformanceMonitor"}, self._parameters, self._gpus())
        )
        self._has_started_metrics = not was_collecting and get_metrics_collector().is_collecting
        self._started_s = self._last_request_s = time.monotonic()

    def stop(self) -> None:
        """Stop the metrics if `start` started them, and wait up to 5 s for the last values."""
        if self._started_s is None or self._ended_s is not None:
            return
        self._ended_s = time.monotonic()
        if self._has_started_metrics:
            get_metrics_collector().stop_collection()
        self._update_agent_values()

    def set_scenario(self, scenario: str, model_parameters: int | None = None) -> None:
        """Choose the throughput: TT of pretraining, ST of fine-tuning, IT of inference.

        Raises:
            ValueError: the scenario is not in `SCENARIOS`.
        """
        throughput = SCENARIOS.get("".join(letter for letter in str(scenario).lower() if letter.isalpha()))
        if throughput is None:
            raise ValueError(f"scenario {scenario!r} is unknown; available scenarios: {', '.join(SCENARIOS)}")
        self._throughput_name = throughput
        if model_parameters is not None:
            self._parameters = model_parameters
            get_metrics_collector().set_model_parameters(model_parameters)

    def set_compression_info(
        self, original_size: float, compressed_size: float, original_perf: float, compressed_perf: float
    ) -> None:
        """Set the sizes and scores of the original and the compressed model, for MCR, also in ``run.json``."""
        self._compression = (original_size, compressed_size, original_perf, compressed_perf)
        get_metrics_collector().record_facts(
            original_size=original_size,
            compressed_size=compressed_size,
            original_perf=original_perf,
            compressed_perf=compressed_perf,
        )

    def record_request(
        self,
        tokens: int = 0,
        samples: int = 0,
        generated_tokens: int = 0,
        computation_time: float = 0.0,
        communication_time: float = 0.0,
    ) -> None:
        """Count a request that has just ended; without a time, the time since the previous request is assumed.

        Args:
            tokens: tokens of prompt and answer.
            samples: number of requests in the batch.
            generated_tokens: tokens of the answer.
            computation_time: seconds of computation in the request.
            communication_time: seconds of communication in the request.
        """
        self.start()
        now_s, since_s = time.monotonic(), self._last_request_s
        self._last_request_s = now_s
        counts = [to_count(count) for count in (tokens, samples, generated_tokens)]
        times = [_number_or_none(duration) for duration in (computation_time, communication_time)]
        if None in counts or None in times:
            # An evaluator of the original passed a latency in place of the samples.
            warnings.warn(
                "record_request was given a count or a time that is not a number of at least 0 in CPU memory; this "
                "value was ignored",
                stacklevel=2,
            )
        all_tokens, all_samples, generated = (count or 0 for count in counts)
        request_s = sum(duration or 0.0 for duration in times)
        self._requests += 1
        self._tokens += all_tokens
        self._samples += all_samples
        self._generated_tokens += generated
        if request_s > 0:
            self._stated_s += request_s
        else:
            self._num_assumed += 1
            self._assumed_s += now_s - since_s
        record_request(
            max(all_tokens - generated, 0), generated, request_s if request_s > 0 else None, samples=all_samples or 1
        )

    def get_metrics(self) -> dict[str, float]:
        """Return the values measured so far; ``nan`` for a value that is not measured."""
        if self._ended_s is None:
            self._update_agent_values()
        latency_s = self._stated_s / self._requests if self._requests and not self._num_assumed else NAN
        metrics = {"AMU": self._amu, "PCU": self._pcu, "AL": latency_s, "AEC": self._aec, "MCR": self._mcr()}
        if self._throughput_name is not None:
            metrics[self._throughput_name] = self._throughput(self._throughput_name)
        ended_s = time.monotonic() if self._ended_s is None else self._ended_s
        time_s = NAN if self._started_s is None else ended_s - self._started_s
        return {**metrics, "total_time": time_s, "num_requests": self._requests}

    def save(self, path: str | Path) -> None:
        """Write the metrics as JSON, with ``null`` for missing values; a folder gets ``performance_metrics.json``."""
        target = Path(path)
        write_json(target / "performance_metrics.json" if target.is_dir() else target, self.get_metrics())

    def _throughput(self, name: str) -> float:
        time_s = self._stated_s + self._assumed_s
        count = {"TT": self._tokens, "ST": self._samples, "IT": self._generated_tokens}[name]
        parameters = 1 if name == "IT" else self._parameters  # only TT and ST are per parameter
        return count / parameters / time_s if count and parameters and time_s > 0 else NAN

    def _mcr(self) -> float:
        if self._compression is None or not all(map(_number_or_none, self._compression[:3])):
            return NAN
        original_size, compressed_size, original_perf, compressed_perf = self._compression
        return (original_size / compressed_size) * (compressed_perf / original_perf)

    def _update_agent_values(self) -> None:
        values = get_metrics_collector().get_all_metrics()
        self._amu, self._pcu, self._aec = values.amu, values.pcu, values.aec

    def _gpus(self) -> Sequence[int]:
        """Return the GPUs of CUDA_VISIBLE_DEVICES; else the GPUs on which torch has memory; else ``device_id``."""
        visible = process_environ().get("CUDA_VISIBLE_DEVICES")
        if visible:
            return range(len(visible.split(",")))
        cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            with_memory = [index for index in range(cuda.device_count()) if cuda.memory_reserved(index)]
            if with_memory:
                return with_memory
        return [self._device_id]


class PerformanceMonitorContext:
    """``with PerformanceMonitorContext("inference") as monitor: ...``: measures requests and saves the metrics.

    Args:
        scenario: see `PerformanceMonitor.set_scenario`.
        model_parameters: number of parameters of the whole model, for TT and ST.
        save_path: a file for the metrics as JSON, or a folder.
        device_id: see `PerformanceMonitor`.
    """

    def __init__(
        self,
        scenario: str,
        model_parameters: int | None = None,
        save_path: str | Path | None = None,
        device_id: int = 0,
    ) -> None:
        self.monitor = PerformanceMonitor(device_id)
        self.monitor.set_scenario(scenario, model_parameters)
        self._save_path = save_path

    def __enter__(self) -> PerformanceMonitor:
        self.monitor.start()
        return self.monitor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.monitor.stop()
        if self._save_path is not None:
            try:
                self.monitor.save(self._save_path)
            except OSError as failure:
                warnings.warn(f"{self._save_path} could not be written: {failure}", stacklevel=2)


def _number_or_none(value: Any) -> float | None:
    """Return a value as a finite number of at least 0; ``None`` if it is invalid."""
    as_float = number(value)
    return as_float if as_float is not None and 0 <= as_float < math.inf else None
