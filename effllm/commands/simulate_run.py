"""One simulation of ``effllm simulate``: processes of ranks, aggregator, and measured results."""

from __future__ import annotations

import os
import secrets
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import Struct

from effllm.commands.simulate_ranks import Part, Progress
from effllm.config.settings import Config, secret_path
from effllm.config.spawn import pidfd, spawn
from effllm.network import listening, secret
from effllm.records.orders import Orders

MAX_RANKS_OF_PROCESS = 2500
JOIN_WITHIN_S = 300.0
END_WITHIN_S = 70.0
SPREAD = {"burst": 0.02, "even": 0.9}  # the ranks send their reports of a window in this share of `interval_s`


class Simulation(Struct, frozen=True):
    """The settings of a simulation."""

    ranks: int
    interval_s: float = 1.0
    minutes: float = 1.0
    endpoint: str = ""  # of a running aggregator; "": a new aggregator
    processes: int = 0  # 0: as many as the number of ranks needs
    arrival: str = "burst"  # a key of SPREAD
    run_dir: str = ""  # path at which the run folder is kept; "": it is deleted
    security: str = "curve"

    @property
    def windows(self) -> int:
        return max(round(60 * self.minutes / self.interval_s), 1)


class Findings(Struct):
    """The results of a simulation."""

    ranks: int
    windows: int
    interval_s: float
    arrival: str
    security: str = "none"
    reports: int = 0  # number of sent reports
    reports_per_s: float = 0.0
    joined_s: float = 0.0  # time until all ranks had joined
    join_cpu_s: float | None = None  # CPU time of the aggregator until all ranks had joined
    cpu_s: float | None = None  # CPU time of the aggregator while windows were reported
    cpu_ratio: float | None = None  # CPU time as a share of one core
    cpu_us_per_report: float | None = None
    rss_bytes: int | None = None  # largest memory of the aggregator
    rss_slope_bytes_per_s: float | None = None
    descriptors: int | None = None  # open files and sockets of the aggregator
    delays_s: list[float] = []  # seconds from the last report of each window to the receipt of its values at rank 0
    windows_published: int = 0  # windows whose values came to rank 0
    tokens: int = 0  # in the summary, or confirmed by another aggregator
    tokens_true: int = 0  # of all reports
    energy_j: float | None = None  # in the summary
    energy_true_j: float = 0.0  # of all reports
    lost: int = 0  # reports that could not be kept until they were confirmed
    unconfirmed: int = 0  # reports
    duplicates: int = 0  # reports that came twice
    status: str = ""  # of the run; "played" if another aggregator has the summary; "" if the simulation was stopped

    @property
    def is_exact(self) -> bool:
        """Whether all reports were counted exactly once; for another aggregator, whether it confirmed all reports."""
        energy = self.energy_j is None or abs(self.energy_j - self.energy_true_j) <= 1e-9 * self.energy_true_j
        return self.tokens == self.tokens_true and energy and not self.lost


class RanksProcess:
    """A process that simulates some of the ranks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        their_input, self._input = os.pipe()
        self.output, their_output = os.pipe()  # descriptors
        body = msgspec.json.encode(Part(input_descriptor=their_input, output_descriptor=their_output, **settings))
        self.process = spawn("effllm.commands.simulate_ranks", [body.decode()], [their_input, their_output])
        os.close(their_input)
        os.close(their_output)
        self._incomplete_line = b""
        self.num_ranks: int = settings["num_ranks"]
        self.joined = self.sent = 0  # numbers of ranks and of reports
        self.last_progress: Progress | None = None  # the one of the end

    def send_start(self, at_s: float) -> None:
        os.write(self._input, f"{at_s!r}\n".encode())

    def read_progress(self) -> list[Progress]:
        """Return the new messages of the process; the descriptor must be readable."""
        data = os.read(self.output, 2**16)
        whole, _, self._incomplete_line = (self._incomplete_line + data).rpartition(b"\n")
        items = msgspec.json.Decoder(Progress).decode_lines(whole)
        for progress in items:
            self.joined, self.sent = max(self.joined, progress.joined), max(self.sent, progress.sent)
            if progress.done:
                self.last_progress = progress
        if not data and self.last_progress is None:
            raise SimulationError("a process of simulated ranks ended too early; the error is printed above")
        return items

    def close(self) -> None:
        os.close(self._input)
        os.close(self.output)
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()


class SimulationError(Exception):
    """The simulation cannot continue. The message is one line."""


class OwnAggregator:
    """A process with an aggregator, started in the same way as by the agent of rank 0."""

    def __init__(self, config: Config, folder: str, output: int, job: str) -> None:
        listener = listening.listen("127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        self.folder = Path(folder)
        own = pidfd(os.getpid())  # the aggregator ends with this process
        orders = Orders(
            config=config,
            job=job,
            secured=config.security == "curve",
            salt=job,
            endpoint=self.endpoint,
            folder=folder,
            listen_descriptor=listener.fileno(),
            stdout_descriptor=output,
            trainer_descriptor=own,
            facts={"launcher": "simulate"},
        )
        memory = os.memfd_create("effllm-orders", 0)
        try:
            os.write(memory, msgspec.json.encode(orders))
            self.process = spawn("effllm.server.process", [str(memory)], [memory, listener.fileno(), output, own])
        finally:
            os.close(memory)
            os.close(own)
            listener.close()
        self.psutil_process = psutil.Process(self.process.pid)

    def cpu_s(self) -> float:
        times = self.psutil_process.cpu_times()
        return float(times.user + times.system)

    def close(self, is_waited_for: bool) -> None:
        try:
            self.process.wait(END_WITHIN_S if is_waited_for else 0.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class SimulatedRun:
    """One simulation, from the first connection to the summary."""

    def __init__(self, plan: Simulation, config: Config) -> None:
        self._plan = plan
        self._config = replace(config, security=plan.security)
        self.result = Findings(plan.ranks, plan.windows, plan.interval_s, plan.arrival, plan.security)
        self._job, self._salt = secrets.token_hex(8), ""  # the salt of an own aggregator is the job
        self._processes: list[RanksProcess] = []
        self._aggregator: OwnAggregator | None = None
        self._poll = select.poll()
        self._sent_s: dict[int, float] = {}  # monotonic time of the last report, by window
        self._seen_s: dict[int, float] = {}  # monotonic time at which rank 0 had its values, by window
        self._rss_readings: list[tuple[float, int]] = []  # (monotonic time, bytes), of the aggregator

    def measure(self) -> Findings:
        """Run the simulation, and return its results."""
        with tempfile.TemporaryDirectory(prefix="effllm-simulate-") as scratch:
            output = os.open(os.devnull, os.O_WRONLY)
            try:
                if not self._plan.endpoint:
                    self._make_aggregator(Path(scratch), output)
                self._run_ranks()
            finally:
                for process in self._processes:
                    process.close()
                if self._aggregator:
                    self._aggregator.close(is_waited_for=bool(self.result.status))
                    self._read_totals(self._aggregator.folder / "summary.json")
                os.close(output)
        return self.result

    def _make_aggregator(self, scratch: Path, output: int) -> None:
        if self._config.security == "curve":
            self._config = replace(self._config, secret_file=str(scratch / "secret"))
            secret.read_or_create(scratch / "secret")
        self._salt = self._job
        folder = self._plan.run_dir or str(scratch / "run")
        self._aggregator = OwnAggregator(self._config, folder, output, self._job)

    def _run_ranks(self) -> None:
        """Start the processes of ranks, wait until they have joined, reported and left, and set the results."""
        plan, endpoint = self._plan, self._plan.endpoint
        if self._aggregator:
            endpoint = self._aggregator.endpoint
        num_processes = plan.processes or -(-plan.ranks // MAX_RANKS_OF_PROCESS)
        join_start_s = time.monotonic()
        for i in range(num_processes):
            first, end = plan.ranks * i // num_processes, plan.ranks * (i + 1) // num_processes
            process = RanksProcess({
                "first_rank": first, "num_ranks": end - first, "world_size": plan.ranks, "endpoint": endpoint,
                "log_interval": self._config.log_interval, "interval_s": plan.interval_s, "windows": plan.windows,
                "secret_file": str(secret_path(self._config)) if self._config.security == "curve" else "",
                "job": self._job, "salt": self._salt, "spread_s": SPREAD[plan.arrival] * plan.interval_s,
            })  # fmt: skip
            self._processes.append(process)
            self._poll.register(process.output, select.POLLIN)
        self._listen_until(lambda: sum(part.joined for part in self._processes) == plan.ranks, JOIN_WITHIN_S, "joined")
        self.result.joined_s = time.monotonic() - join_start_s
        if self._aggregator:
            self.result.join_cpu_s = self._aggregator.cpu_s()
        start_s = time.monotonic() + 1.0  # of the first window
        for process in self._processes:
            process.send_start(start_s)
        self._listen(1.0)
        cpu_s = self._aggregator.cpu_s() if self._aggregator else 0.0
        try:
            self._listen_until(self._have_all_reported, plan.windows * plan.interval_s * 2 + 30.0, "reported")
        except KeyboardInterrupt:  # compute the results of the reports so far
            self._set_cost(sum(process.sent for process in self._processes), time.monotonic() - start_s, cpu_s)
            self.result.windows = self.result.windows_published
            raise
        self._set_cost(plan.ranks * plan.windows, time.monotonic() - start_s, cpu_s)
        self._listen_until(lambda: all(process.last_progress for process in self._processes), END_WITHIN_S, "left")
        ends = [process.last_progress for process in self._processes if process.last_progress]
        self.result.tokens_true = sum(end.tokens for end in ends)
        self.result.tokens = sum(end.tokens_confirmed for end in ends)  # an own aggregator's summary replaces them
        self.result.energy_true_j = sum(end.energy_j for end in ends)
        self.result.lost = sum(end.lost for end in ends)
        self.result.unconfirmed = sum(end.unconfirmed for end in ends)
        self.result.status = "played"
        self._set_delays()

    def _set_cost(self, reports: int, spent_s: float, cpu_before_s: float) -> None:
        """Set the rate of the reports, which were sent in ``spent_s`` seconds, and the aggregator's CPU and memory."""
        if not reports:
            return
        self._set_delays()
        self.result.reports = reports
        self.result.reports_per_s = reports / spent_s
        if self._aggregator and self._rss_readings:
            self.result.cpu_s = self._aggregator.cpu_s() - cpu_before_s
            self.result.cpu_ratio = self.result.cpu_s / spent_s
            self.result.cpu_us_per_report = 1e6 * self.result.cpu_s / reports
            self.result.descriptors = self._aggregator.psutil_process.num_fds()
            self.result.rss_bytes = max(rss for _, rss in self._rss_readings)
            self.result.rss_slope_bytes_per_s = _second_half_slope(self._rss_readings)

    def _set_delays(self) -> None:
        published = [window for window in self._sent_s if window in self._seen_s]
        self.result.windows_published = len(published)
        self.result.delays_s = [max(self._seen_s[window] - self._sent_s[window], 0.0) for window in sorted(published)]

    def _have_all_reported(self) -> bool:
        windows = self._plan.windows
        has_last_reports = len(self._sent_s) == windows
        return has_last_reports and all(part.sent >= windows * part.num_ranks for part in self._processes)

    def _listen_until(self, is_reached: Callable[[], bool], timeout_s: float, word: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_reached():
            self._listen(0.5)
            if time.monotonic() > deadline_s:
                raise SimulationError(f"not all ranks have {word} after {timeout_s:.0f} s")

    def _listen(self, seconds: float) -> None:
        """Wait for messages of the ranks and record them; every 0.5 s, also record the memory of the aggregator."""
        for descriptor, _ in self._poll.poll(seconds * 1000):
            process = next(process for process in self._processes if process.output == descriptor)
            if process.last_progress is not None:
                self._poll.unregister(descriptor)
                continue
            for progress in process.read_progress():
                self._record(progress)
        if self._aggregator:
            if self._aggregator.process.poll():  # another status than 0
                raise SimulationError("the aggregator ended too early; the error is printed above")
            is_due = not self._rss_readings or time.monotonic() - self._rss_readings[-1][0] >= 0.5
            if self._sent_s and is_due and not self.result.reports:
                self._rss_readings.append((time.monotonic(), self._aggregator.psutil_process.memory_info().rss))

    def _record(self, progress: Progress) -> None:
        """Set the times at which windows were sent or seen; `SimulationError` if ranks were rejected."""
        if progress.rejected:
            raise SimulationError(f"the aggregator rejects the ranks: {progress.rejected}")
        if progress.seen_window:
            for window in range(max(self._seen_s, default=0) + 1, progress.seen_window + 1):
                self._seen_s[window] = progress.at_s
        elif progress.window:
            self._sent_s[progress.window] = max(self._sent_s.get(progress.window, 0.0), progress.at_s)
            if sys.stderr.isatty():
                num_sent = sum(process.sent for process in self._processes)
                print(f"\r{num_sent:,} of {self._plan.ranks * self._plan.windows:,} reports", end="", file=sys.stderr)

    def _read_totals(self, path: Path) -> None:
        try:
            summary = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.MsgspecError):
            summary = {}
        self.result.tokens = summary.get("measured_tokens") or 0
        self.result.energy_j = summary.get("energy", {}).get("measured_joules")
        self.result.duplicates = summary.get("events", {}).get("duplicate", 0)
        self.result.status = summary.get("status", "")


def _second_half_slope(points: list[tuple[float, int]]) -> float | None:
    """Return the slope in bytes/s, by least squares over the second half; during the first half, buffers grow."""
    points = points[len(points) // 2 :]
    if len(points) < 3 or points[0][0] == points[-1][0]:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope
