"""Switches the load of a GPU on and off, following a pattern."""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from effllm.config.spawn import spawn
from effllm.config.switches import process_environ
from effllm.sensor_profile.record import LoadEdge

#: torch, CUDA and cuBLAS start slowly on a node with many GPUs.
MAX_START_S = 180.0
MAX_END_S = 10.0


class LoadUnavailable(Exception):
    """The GPU cannot be put under load, or the load has ended; the message is one sentence."""


def load_pattern_s(seconds: float, tick_s: float) -> list[float]:
    """Return durations of load, pause, load, ...: first long, then short, then medium; never in step with ticks.

    Long loads show the state of the loaded GPU.  Short loads, some shorter than a tick, begin at varying phases of the
    sensor.  Medium loads are long enough for readings that are means over a second.
    """
    chance = random.Random(20261120)  # noqa: S311 - the same pattern each time
    tick_s = min(max(tick_s, 0.04), 0.5)
    stretches_s = [max(0.2 * seconds, 2.5), max(0.04 * seconds, 0.5)]
    while sum(stretches_s) < 0.72 * seconds:
        stretches_s += [chance.uniform(0.3, 2.5) * tick_s, chance.uniform(1.3, 3.0) * tick_s]
    while sum(stretches_s) < seconds:
        stretches_s += [chance.uniform(0.5, 2.5), chance.uniform(0.5, 2.5)]
    return stretches_s


class TorchLoad:
    """Matrix products by torch, in a separate process, so that load and reads do not share one interpreter lock.

    ``device`` is the UUID of the GPU or slice; ``None`` for torch's first GPU.
    """

    def __init__(self, device: str | None) -> None:
        self.name = ""
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None
        self._orders = self._answers = -1  # descriptors: the pipe to the process, and the pipe from it
        self._received = b""  # the beginning of the next answer
        self._deadline_s = 0.0

    def opened(self) -> TorchLoad:
        """Start the process, prepare the GPU, and return this object.

        Raises:
            LoadUnavailable: torch is missing, or cannot compute on this GPU.
        """
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        environ = {**process_environ(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # effllm does not measure this process
        if self._device:
            environ["CUDA_VISIBLE_DEVICES"] = self._device
        try:
            descriptors = [orders, answers]
            self._process = spawn("effllm.sensor_profile.torch_child", [*map(str, descriptors)], descriptors, environ)
        except OSError as error:
            raise LoadUnavailable(f"no process can be started: {error.strerror}") from error
        finally:
            os.close(orders)
            os.close(answers)
        self._deadline_s = time.monotonic() + MAX_START_S
        while (answer := self._take_answer()) is None:
            select.select([self._answers], [], [], 0.2)
        self.name = answer["ready"]
        return self

    def start_stretches(self, stretches_s: Sequence[float]) -> None:
        """Start alternating load and pause with these durations; `take_edges` has the result.

        Raises:
            LoadUnavailable: the process has ended.
        """
        self._send_order(list(stretches_s), sum(stretches_s))

    def start_rates(self, seconds: float) -> None:
        """Start matrix products and then copies from the host; `take_rates` has the result.

        Raises:
            LoadUnavailable: the process has ended.
        """
        self._send_order(float(seconds), seconds)

    def take_rates(self) -> tuple[float, float] | None:
        """Return FLOP/s and bytes/s after the end of the load, else ``None``.

        Raises:
            LoadUnavailable: the load failed.
        """
        answer = self._take_answer()
        return None if answer is None else (answer["rates"][0], answer["rates"][1])

    def _send_order(self, order: list[float] | float, seconds: float) -> None:
        self._deadline_s = time.monotonic() + seconds + MAX_END_S
        try:
            os.write(self._orders, json.dumps(order).encode() + b"\n")
        except OSError as error:
            raise LoadUnavailable("the process that loads the GPU has ended") from error

    def take_edges(self) -> list[LoadEdge] | None:
        """Return the actual edges of the load after the load has ended, else ``None``.

        Raises:
            LoadUnavailable: the load failed.
        """
        answer = self._take_answer()
        return None if answer is None else [LoadEdge(time_ns, bool(is_on)) for time_ns, is_on in answer["edges"]]

    def close(self) -> None:
        """End the load; may be called twice."""
        for descriptor in (self._orders, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._orders = self._answers = -1
        if self._process is not None:
            try:
                self._process.wait(MAX_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _take_answer(self) -> dict[str, Any] | None:
        """Return the next answer of the process, or ``None`` if no answer has arrived.

        Raises:
            LoadUnavailable: the process cannot load the GPU, has ended, or does not answer in time.
        """
        while b"\n" not in self._received and select.select([self._answers], [], [], 0)[0]:
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise LoadUnavailable("the process that loads the GPU has ended")
            self._received += part
        if b"\n" not in self._received:
            if time.monotonic() > self._deadline_s:
                raise LoadUnavailable("the process that loads the GPU does not answer")
            return None
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "unavailable" in answer:
            raise LoadUnavailable(answer["unavailable"])
        return answer
