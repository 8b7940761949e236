"""The messages of simulated ranks, with windows of known length on simulated GPUs. No I/O.

The exact sums are known; the sums in the summary must be equal to them, to the last token.
"""

from __future__ import annotations

from typing import Any

from effllm.devices import Site
from effllm.devices.simulated import MAX_CLOCK_HZ, open_device
from effllm.records.energy import EnergyAmount
from effllm.records.rank import CLOCK_RATIO, Allocator, DeviceWindow, Gauge, Integrals, ParameterCount, RankReport
from effllm.records.wire import Bye, Hello

RANKS_PER_NODE = 8
PARAMETERS = 7_000_000_000
TOKENS = 4096  # tokens per iteration; each rank adds its rank number, so that any lost report changes the sum
BUSY = 0.95  # step time as a share of an iteration
CLOCK_HZ, TEMPERATURE_C, LIMIT_W = 1.7e9, 61.0, 700.0
CLOCK = CLOCK_HZ / MAX_CLOCK_HZ
#: The readings of torch's allocator that each rank with CUDA reports in each window (effllm/agent/rank_memory.py).
ALLOCATOR_BYTES = (40e9, 45e9, 1e9)  # allocated, reserved, fragmented


class SimulatedRank:
    """One rank of a job: its HELLO, its windows, its BYE, and the sums of its reports.

    Args:
        rank: number of the rank.
        world_size: number of ranks in the job.
        job: id of the job.
        agent: id of the rank's agent.
        log_interval: iterations per window.
    """

    def __init__(self, rank: int, world_size: int, job: str, agent: str, log_interval: int) -> None:
        self.rank = rank
        self._world_size = world_size
        self._job, self.agent = job, agent
        self._log_interval = log_interval
        self._host = f"node{rank // RANKS_PER_NODE:05d}"
        reader = open_device(Site(local_rank=rank % RANKS_PER_NODE, host=self._host))
        self._device, self._wave = reader.device, reader.waveform
        self._window = 0
        self.tokens = 0
        self.energy_j = 0.0

    def hello(self) -> Hello:
        return Hello(
            job=self._job,
            agent=self.agent,
            rank=self.rank,
            local_rank=self.rank % RANKS_PER_NODE,
            world_size=self._world_size,
            host=self._host,
            role="trainer",
            devices=(self._device,),
            parameters=ParameterCount(total=PARAMETERS),
            log_interval=self._log_interval,
        )

    def next_row(self, start_s: float, end_s: float, unix_minus_monotonic_s: float) -> RankReport:
        """Return the report of the next window; ``start_s`` and ``end_s`` are monotonic times."""
        self._window += 1
        span_s, wave = end_s - start_s, self._wave
        last = self._window * self._log_interval
        tokens = self.tokens_until(1)
        energy_j = wave.energy_j(start_s, end_s)
        self.tokens += tokens
        self.energy_j += energy_j
        memory, utilization = wave.memory_byte_seconds(start_s, end_s), wave.utilization_seconds(start_s, end_s)
        power_w = energy_j / span_s
        energy = EnergyAmount(energy_j, span_s, gain_j=self._device.sensor.gain_error * energy_j)
        device = DeviceWindow(
            self._device.key,
            Integrals(energy, memory, span_s, utilization, span_s),
            memory_peak_bytes=memory / span_s,
            power_peak_w=power_w,
            energy_method="counter",
            gauges={
                "sm_clock_hz": Gauge(CLOCK_HZ * span_s, span_s, CLOCK_HZ, CLOCK_HZ),
                CLOCK_RATIO: Gauge(CLOCK * span_s, span_s, CLOCK, CLOCK),
                "temperature_c": Gauge(TEMPERATURE_C * span_s, span_s, TEMPERATURE_C, TEMPERATURE_C),
                "power_limit_w": Gauge(LIMIT_W * span_s, span_s, LIMIT_W, LIMIT_W),
            },
            power_histogram_s={int(power_w / 10): span_s},
        )
        counts: dict[str, Any] = {"tokens": tokens, "tokens_processed": tokens, "samples": self._log_interval}
        return RankReport(
            agent=self.agent,
            sequence=self._window,
            rank=self.rank,
            window=self._window,
            iteration_first=last - self._log_interval + 1,
            iteration_last=last,
            iteration_shown=last,
            start_time_s=start_s + unix_minus_monotonic_s,
            end_time_s=end_s + unix_minus_monotonic_s,
            wall_s=span_s,
            busy_s=BUSY * span_s,
            wait_s=span_s - BUSY * span_s,
            phases_s={},
            devices=(device,),
            allocator=Allocator(*(size + self.rank for size in ALLOCATOR_BYTES)),
            **counts,
        )

    def tokens_until(self, window: int) -> int:
        """Return the tokens of the reports up to a window."""
        return window * self._log_interval * (TOKENS + self.rank)

    def bye(self, lost: int) -> Bye:
        return Bye(self.agent, self.rank, "completed", self._window * self._log_interval, lost)
