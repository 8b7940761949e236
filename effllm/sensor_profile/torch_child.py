"""The process that loads a GPU: matrix products of given durations, by one CPU thread that records the edges.

The process receives orders as lines of JSON through a pipe: a list of durations, or a number of seconds for rates.
When the pipe is closed, the process ends and the load stops.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

SIZE, SMALL = 8192, 2048
#: Matrix products are queued in parcels of this duration, at most two parcels at a time.
PARCEL_S = 0.001
WARM_UP_S = 1.0
#: Rates: work between two waits for the GPU, which take some 20 us; and a copy, with its rough duration.
BATCH_S, COPY_BYTES, COPY_S = 0.05, 256 * 2**20, 0.01


def main(arguments: list[str]) -> None:
    """Process orders until their pipe is closed; ``arguments`` are the file descriptors of both pipes."""
    orders, answers = map(int, arguments)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch prints long warnings; the reason is reported below
    try:
        products = _Products(orders)
    except _Unavailable as error:
        _send(answers, {"unavailable": str(error)})
        return
    _send(answers, {"ready": products.name})
    received = b""
    while part := os.read(orders, 1 << 16):
        received += part
        while b"\n" in received:
            line, _, received = received.partition(b"\n")
            order = json.loads(line)
            is_rates = isinstance(order, float)  # else a list of durations
            try:
                answer = products.measure_rates(order) if is_rates else products.alternate(order)
            except RuntimeError as error:  # all CUDA errors have this type
                _send(answers, {"unavailable": f"torch failed under load ({type(error).__name__})"})
                return
            if answer is None:
                return
            _send(answers, {"rates" if is_rates else "edges": answer})


class _Unavailable(Exception):
    """The GPU cannot be loaded; the message is sent to the parent process."""


class _Products:
    """Products of two matrices on the only visible GPU."""

    def __init__(self, orders: int) -> None:
        self._orders = orders
        try:
            import torch
        except Exception as error:  # a broken installation may raise any exception
            missing = isinstance(error, ModuleNotFoundError)
            raise _Unavailable(
                "torch is not installed" if missing else f"torch cannot be imported ({type(error).__name__})"
            ) from error
        self._torch: Any = torch
        if not torch.cuda.is_available():
            built = torch.version.cuda or getattr(torch.version, "hip", None)
            why = "finds no GPU" if built else "is built without CUDA"
            raise _Unavailable(f"torch {torch.__version__} {why}")
        try:
            self._prepare()
        except RuntimeError as error:
            raise _Unavailable(f"torch cannot compute on this GPU ({type(error).__name__})") from error

    def _prepare(self) -> None:
        torch = self._torch
        dtype = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 8 else torch.float16  # from Ampere on
        for size in (SIZE, SIZE // 2, SMALL):
            self._left, self._right = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
            self._product = torch.empty(size, size, device="cuda", dtype=dtype)
            each_s = self._warm_up()
            if each_s <= 2 * PARCEL_S or size == SMALL:
                break
        self._parcel_size, self._each_s = max(round(PARCEL_S / each_s), 1), each_s  # number; time of a product
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
        precision = str(dtype).removeprefix("torch.")
        self.name = f"torch {torch.__version__}, {built}: {precision} products of {size} x {size}"

    def _warm_up(self) -> float:
        """Compute for `WARM_UP_S` and return the time of one product."""
        num_done, began_s = 0, time.monotonic()
        while (spent_s := time.monotonic() - began_s) < WARM_UP_S or not num_done:
            for _ in range(4):
                self._torch.mm(self._left, self._right, out=self._product)
            self._torch.cuda.synchronize()
            num_done += 4
        return spent_s / num_done

    def alternate(self, stretches_s: Sequence[float]) -> list[tuple[int, int]] | None:
        """Alternate load and pause; return their starts (ns, 1: load) and the end; ``None`` if the parent has ended."""
        edges: list[tuple[int, int]] = []
        for number, stretch_s in enumerate(stretches_s):
            is_on = number % 2 == 0
            if is_on:
                self._torch.cuda.synchronize()
            edges.append((time.monotonic_ns(), int(is_on)))
            end_s = time.monotonic() + stretch_s
            if not (self._compute_until(end_s) if is_on else self._pause_until(end_s)):
                return None
        return [*edges, (time.monotonic_ns(), 0)]

    def measure_rates(self, seconds: float) -> tuple[float, float] | None:
        """Return FLOP/s of products, then bytes/s of copies from the host; ``None`` if the parent has ended."""
        on_host = self._torch.empty(COPY_BYTES, dtype=self._torch.uint8, pin_memory=True)
        on_gpu = on_host.cuda()
        multiply = partial(self._torch.mm, self._left, self._right, out=self._product)
        copy = partial(on_gpu.copy_, on_host, non_blocking=True)
        # FLOPs or bytes of a call, its rough duration, and the call.
        tasks: tuple[tuple[float, float, Callable[[], Any]], ...] = (
            (2.0 * self._left.shape[0] ** 3, self._each_s, multiply),
            (float(COPY_BYTES), COPY_S, copy),
        )
        rates = []
        for amount, each_s, call in tasks:
            num_done, began_s = 0, time.monotonic()
            while (spent_s := time.monotonic() - began_s) < seconds / len(tasks):
                if self._has_parent_ended():
                    return None
                for _ in range(count := max(round(BATCH_S / each_s), 1)):
                    call()
                self._torch.cuda.synchronize()
                num_done += count
            rates.append(amount * num_done / spent_s)
        return rates[0], rates[1]

    def _compute_until(self, end_s: float) -> bool:
        """Compute until a time; return ``False`` at once if the parent has ended."""
        in_flight: deque[Any] = deque()
        while time.monotonic() < end_s:
            for _ in range(self._parcel_size):
                self._torch.mm(self._left, self._right, out=self._product)
            event = self._torch.cuda.Event()
            event.record()
            in_flight.append(event)
            if len(in_flight) > 1:
                in_flight.popleft().synchronize()
                if self._has_parent_ended():
                    return False
        self._torch.cuda.synchronize()
        return True

    def _pause_until(self, end_s: float) -> bool:
        """Wait until a time; return ``False`` at once if the parent has ended."""
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.1))
            if self._has_parent_ended():
                return False
        return True

    def _has_parent_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._orders, 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))


def _send(answers: int, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode() + b"\n"
    try:
        while data:
            data = data[os.write(answers, data) :]
    except BrokenPipeError:
        return  # the parent process has ended
