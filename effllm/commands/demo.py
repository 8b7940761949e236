"""Run a small simulated job, without GPU and torch.

Processes, agents and messages are real. GPUs are simulated, and every output is marked as simulated. The last rank
is 12 % slower than the other ranks. The job has an evaluation in the middle, and its loss decreases.

\b
Examples:
  effllm demo
  effllm demo --ranks 8 --iterations 200
  effllm demo --run-dir /tmp/demo
  EFFICIENTLLM_SINKS=console,prometheus effllm demo --keep-alive 10m
  tensorboard --logdir efficientllm_runs        # for a browser

Exit status: 0 demo completed, 1 demo not completed, 2 wrong use, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from effllm.commands.output import complain
from effllm.config.settings import ALL_VARIABLES, Config, ConfigError, read_config, secret_path
from effllm.config.spawn import pidfd, spawn
from effllm.config.switches import PREFIX, process_environ
from effllm.network import discovery, listening
from effllm.network.secret import SecretError
from effllm.records.orders import Orders
from effllm.records.shared_memory import make_memory
from effllm.server.process import Server

RANKS_END_WITHIN_S = 6.0  # rank 0 waits at most five seconds for the summary
SAMPLE_S = 0.1  # between two samples, if EFFICIENTLLM_COLLECTION_INTERVAL is not set
#: Settings of another job in the same environment: its place, its name, and its switch.
_NOT_OF_DEMO = {PREFIX + name for name in ("ENDPOINT", "RUN_NAME", "METRICS_ENABLED", "DEVICE", "INTERFACE")}
PEAK_TFLOPS = 312.0  # of a simulated GPU: dense BF16 of an A100


def main(
    ranks: Annotated[
        int, typer.Option(min=1, max=64, metavar="N", help="Number of simulated ranks, one process per rank.")
    ] = 4,
    iterations: Annotated[int, typer.Option(min=1, metavar="N", help="Number of iterations.")] = 60,
    step_seconds: Annotated[
        float, typer.Option(min=0.001, max=60.0, metavar="S", help="Duration of an iteration in seconds.")
    ] = 0.05,
    log_interval: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Iterations per report. [default: at least 10, and at least 1 s]"),
    ] = None,
    run_dir: Annotated[
        str, typer.Option(metavar="FOLDER", help="Parent folder of the run folder. [default: EFFICIENTLLM_RUN_DIR]")
    ] = "",
    keep_alive: Annotated[
        str, typer.Option(metavar="TIME", help="Run for so long, to try charts and Prometheus: 90s, 10m, 1h.")
    ] = "",
) -> int:
    """Run the demo; return 1 if it is incomplete, 2 for wrong use, 128 + signal number after a signal, otherwise 0."""
    environ = process_environ()
    try:
        given = read_config({name: text for name, text in environ.items() if name not in _NOT_OF_DEMO})
        iterations = max(iterations, round(_duration_s(keep_alive) / step_seconds))
    except (ConfigError, ValueError) as error:
        return complain("demo", str(error), 2)
    config = replace(
        given,
        collection_interval_s=given.collection_interval_s if f"{PREFIX}COLLECTION_INTERVAL" in environ else SAMPLE_S,
        log_interval=log_interval or given.log_interval,
        min_window_s=0.0 if log_interval else given.min_window_s,  # so that it is not made longer than stated
        run_dir=str(Path(run_dir or given.run_dir).absolute()),
        run_name=f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        device="simulated",
        peak_tflops=given.peak_tflops or PEAK_TFLOPS,
    )
    try:
        config = discovery.config_with_secret(config)
    except SecretError:  # a simulation needs no keys
        config = replace(config, security="none")
    print(f"effllm demo: {ranks} simulated ranks, {iterations} iterations of {step_seconds:g} s")
    print("No hardware is measured: GPUs, their power and their memory are simulated.\n", flush=True)
    return _Job(config, ranks, [str(iterations), str(step_seconds)]).run()


def _duration_s(text: str) -> float:
    """Return a duration such as 90s, 10m or 1h in seconds; 0 for an empty text."""
    if not text:
        return 0.0
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)) is None:
        raise ValueError(f"--keep-alive {text}: expected a duration such as 90s, 10m or 1h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


class _Job:
    """The ranks in separate processes, and the aggregator in this process."""

    def __init__(self, config: Config, num_ranks: int, arguments: Sequence[str]) -> None:
        self._config, self._num_ranks, self._arguments = config, num_ranks, arguments
        self._ranks: list[subprocess.Popen[bytes]] = []  # the processes
        self._signal = 0  # number of the signal that ends the demo

    def run(self) -> int:
        listener = listening.listen("127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._pass_on_signal)
        waits = make_memory("effllm-demo", 4 * self._num_ranks)  # descriptor: see effllm.commands.demo_rank.main
        try:
            for rank in range(self._num_ranks):
                environ = _rank_environment(self._config, endpoint, rank, self._num_ranks)
                arguments = [*self._arguments, str(waits)]
                self._ranks.append(spawn("effllm.commands.demo_rank", arguments, [waits], environ))
            if self._signal:  # a signal during the start: also stop the ranks that were started after the signal
                self._pass_on_signal(self._signal, None)
            orders = Orders(
                config=self._config,
                job=secrets.token_hex(8),
                endpoint=endpoint,
                folder=str(Path(self._config.run_dir) / self._config.run_name),
                listen_descriptor=listener.detach(),
                trainer_descriptor=pidfd(self._ranks[0].pid),
                secured=discovery.is_secured(self._config),
                facts={"launcher": "demo", "command": ["effllm", *sys.argv[1:]]},
            )
            status = Server(orders, sys.stdout).run()
        finally:
            self._wait_or_kill_ranks()
            os.close(waits)
        return 128 + self._signal if self._signal else int(status != "completed")

    def _pass_on_signal(self, number: int, _frame: FrameType | None) -> None:
        """End the ranks; the aggregator ends after all ranks have left."""
        self._signal = number
        for rank in self._ranks:
            # SIGINT would cause a traceback in a rank that is still starting.
            rank.send_signal(signal.SIGUSR1 if number == signal.SIGINT else number)

    def _wait_or_kill_ranks(self) -> None:
        deadline_s = time.monotonic() + RANKS_END_WITHIN_S
        for rank in self._ranks:
            try:
                rank.wait(max(deadline_s - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()


def _rank_environment(config: Config, endpoint: str, rank: int, num_ranks: int) -> dict[str, str]:
    """Return the environment of a rank: this environment without the variables of other jobs."""
    foreign = (PREFIX, "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_")
    own = {PREFIX + variable.name for variable in ALL_VARIABLES} - _NOT_OF_DEMO
    environ = {name: value for name, value in process_environ().items() if name in own or not name.startswith(foreign)}
    environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    settings = {
        "ENDPOINT": endpoint,
        "DEVICE": config.device,
        "LOG_INTERVAL": str(config.log_interval),
        "COLLECTION_INTERVAL": str(config.collection_interval_s),
        "SECURITY": config.security,
        "SECRET_FILE": str(secret_path(config)),
    }
    return environ | {PREFIX + name: value for name, value in settings.items()}
