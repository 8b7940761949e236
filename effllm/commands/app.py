"""The command line: all commands with options and examples, in the order of the help.

The function of a command declares its options and its help; the command is `main` of the module with its name, which
is imported when the command is called.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from effllm.commands import analysis_app

#: The commands in the order of the help, in two blocks.
BLOCKS = (
    (
        "Commands",
        ["demo", "check", "env", "run", "inspect", "top", "report", "runs", "compare", "campaign", "fit", "explain"],
    ),
    ("Commands for operators and tests", ["serve", "simulate", "watch", "profile"]),
)


class _Commands(typer.core.TyperGroup):
    """The commands in blocks."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - click's signature
        return [name for _, names in BLOCKS for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in BLOCKS:
            found = [(name, command) for name in names if (command := self.get_command(ctx, name)) is not None]
            width = formatter.width - 6 - max(len(name) for name, _ in found)
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(width)) for name, command in found])


app = typer.Typer(
    name="effllm",
    cls=_Commands,
    help="Show how well training jobs use their GPUs, across all ranks and nodes.",
    epilog="Start with: effllm demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help is readable at any width and starts in half the time
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main() -> None:
    """Run the command in ``sys.argv``, and exit with its status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal of another locale has no sign for ±
    app(prog_name="effllm")


def _show_version(wanted: bool) -> None:
    if wanted:
        from effllm import __version__

        print(f"effllm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Show how well training jobs use their GPUs, across all ranks and nodes."""


def _command(declared: Callable[..., None]) -> None:
    """Add a command, whose ``main`` has the same parameters as the function that declares the command."""

    @functools.wraps(declared)
    def call(**options: Any) -> None:
        raise typer.Exit(import_module(f"effllm.commands.{declared.__name__}").main(**options))

    app.command()(call)


@_command
def demo(
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
) -> None:
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


@_command
def check(
    device: Annotated[str, typer.Option(metavar="NAME", help="Device to check. [default: EFFICIENTLLM_DEVICE]")] = "",
    show_all: Annotated[bool, typer.Option("--all", help="Show all metrics, not only the common metrics.")] = False,
    has_load: Annotated[
        bool, typer.Option("--load", help="Put each GPU under load for 5 s, unless a process uses it; needs torch.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all results as JSON.")] = False,
) -> None:
    """Check which metrics can be measured here, and by which sources.

    The command tests sensors, their cost, the run folder and the network, and compares the GPUs of the machine:
    clocks, limits, links and errors. For each metric that cannot be measured, the reason and the remedy are printed.
    All test files are deleted.

    \b
    Examples:
      effllm check
      effllm check --device host
      effllm check --load                           # a slow host: load each GPU
      effllm check --json | jq .device
      srun --ntasks-per-node 1 effllm check         # on every node

    Exit status: 0 a run would be measured, 1 a required part is broken, 2 wrong use.
    """


@_command
def profile(
    device: Annotated[
        str, typer.Option(metavar="GPU", help="UUID or PCI-order index of the GPU. [default: first visible GPU]")
    ] = "",
    seconds: Annotated[
        float, typer.Option(min=10.0, max=600.0, metavar="S", help="Duration of the measurement in seconds.")
    ] = 60.0,
    save: Annotated[str, typer.Option(metavar="FILE", help="Write the report to this file, as JSON.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Measure the behaviour of the sensors of one GPU.

    The GPU is first idle. Then torch loads the GPU with matrix products that are switched on and off. The results are
    the period and the lag of the energy counter and of the power reading, the share of each period that the sensor
    measures, and the duration of a read. Later runs on this model and driver use these results. The report has no host,
    user or serial number and can be published.

    No other program should use the GPU during the measurement. Without torch and CUDA, only the idle GPU is measured.

    \b
    Examples:
      effllm profile
      effllm profile --device 3 --seconds 120
      effllm profile --save h100.json               # a file to send to us

    Exit status: 0 profile complete, 1 report not written, 2 no readable GPU or wrong use, 130 stopped with Ctrl-C.
    """


@app.command()
def env(
    check: Annotated[bool, typer.Option("--check", help="Print only errors, on stderr.")] = False,
    shell: Annotated[bool, typer.Option("--shell", help="Print only the exports, without comments.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables of docs/configuration.md.")] = False,
) -> None:
    """Print the settings as exports of a shell, or check them.

    Each setting is printed with its value: the value of its variable, or the default. The most common settings are
    first. For an unknown name, an error with the nearest known name is printed.

    \b
    Examples:
      effllm env | less                             # every setting, by group
      eval "$(effllm env)"                          # set all settings here
      EFFICIENTLLM_WARMUP=60s effllm env --shell | grep WARMUP
      effllm env --check && torchrun ... train.py

    Exit status: 0 no wrong setting (doubtful settings are reported), 2 a wrong setting.
    """
    from effllm.commands import env as command

    raise typer.Exit(command.main(["--check"] * check + ["--shell"] * shell + ["--markdown"] * markdown))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or -m and a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None,
) -> None:
    """Run a training script and measure it.

    The script runs unchanged, as with python. The run folder is also completed after an error. Training loops of known
    frameworks (docs/systems.md lists them) and any other loop with a torch optimizer are measured without a change. A
    loop without torch needs a call of effllm.monitor. The alternative is a call of initialize_efficientllm_metrics
    with the number of parameters, and record_iteration_start and record_iteration_end around each step.

    The command ends with the exit status and the traceback of the script. A run with an exception, or with an exit
    status other than 0, has the status "failed".

    \b
    Examples:
      effllm run train.py --lr 3e-4
      effllm run -m my_package.train --lr 3e-4
      torchrun --nproc_per_node 2 -m effllm run train.py
      EFFICIENTLLM_LOG_INTERVAL=50 effllm run train.py
    """
    from effllm.commands import run as command

    raise typer.Exit(command.main([script, *(arguments or [])]))


@_command
def serve(
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the aggregator. With port 0, any free port is used.")
    ] = ("127.0.0.1:0"),
    run_dir: Annotated[
        str, typer.Option(metavar="FOLDER", help="Parent folder of the run folder. [default: EFFICIENTLLM_RUN_DIR]")
    ] = "",
    run_name: Annotated[
        str,
        typer.Option(metavar="NAME", help="Name of the run folder. [default: EFFICIENTLLM_RUN_NAME, else time and id]"),
    ] = "",
    job: Annotated[
        str, typer.Option(metavar="ID", help="Id of the job. In an existing run folder, a new id starts a new attempt.")
    ] = "",
) -> None:
    """Run a separate aggregator in place of that of rank 0.

    The command prints the variables for the training processes. After the last rank has left, or after Ctrl-C or
    SIGTERM, the aggregator writes the summary and ends. LOG_INTERVAL must have the same value for this command and for
    the training processes.

    \b
    Examples:
      effllm serve                            # on a free port, which is printed
      effllm serve --bind 127.0.0.1:5555 --run-name llama-7b
      EFFICIENTLLM_ENDPOINT=tcp://127.0.0.1:5555 torchrun ... train.py

    Exit status: 0 summary written, 1 port not available, 2 wrong use.
    """


@_command
def simulate(
    ranks: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Number of simulated ranks.")],
    interval: Annotated[
        float, typer.Option(min=0.05, max=3600.0, metavar="S", help="Seconds between two reports of a rank.")
    ] = 1.0,
    minutes: Annotated[
        float, typer.Option(min=0.01, max=10_080.0, metavar="M", help="Duration of the simulation in minutes.")
    ] = 1.0,
    endpoint: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of a running aggregator. [default: a new aggregator]")
    ] = "",
    processes: Annotated[
        int, typer.Option(min=0, max=256, metavar="K", show_default=False, help="Sender processes. [default: by ranks]")
    ] = 0,
    arrival: Annotated[
        str, typer.Option(metavar="HOW", help="Reports of all ranks, in a share of the interval: burst 2 %, even 90 %.")
    ] = "burst",
    security: Annotated[str, typer.Option(metavar="HOW", help="Connections: curve with keys, none without.")] = "curve",
    run_dir: Annotated[
        str, typer.Option(metavar="FOLDER", help="Keep the run folder at this path. [default: it is deleted]")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure the cost of an aggregator for a number of ranks.

    Simulated ranks send real messages over real connections to a real aggregator. The results are the aggregator's
    share of a core, its memory, and the time from the last report of a window to the window's values at rank 0. The
    totals in the summary are compared with the sums of all reports. Ranks and aggregator share this machine, unless
    --endpoint is given; then the tokens that the aggregator has confirmed are compared.

    \b
    Examples:
      effllm simulate --ranks 1000
      effllm simulate --ranks 10000 --minutes 5 --json
      effllm simulate --ranks 512 --interval 10 --arrival even
      effllm serve --bind 10.0.0.1:5555             # on the head node, first
      effllm simulate --ranks 4000 --endpoint 10.0.0.1:5555

    Exit status: 0 all reports counted, 1 lost or unconfirmed reports or failed simulation, 2 wrong use, 130 Ctrl-C.
    """


@_command
def watch(
    vllm: Annotated[str, typer.Option(metavar="URL", help="Metrics page of a vLLM server.")] = (
        "http://127.0.0.1:8000/metrics"
    ),
    interval: Annotated[float, typer.Option(min=0.5, max=3600.0, metavar="S", help="Seconds between lines.")] = 5.0,
    count: Annotated[
        int, typer.Option(min=0, metavar="N", show_default=False, help="Number of intervals. [default: until Ctrl-C]")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each interval.")] = False,
) -> None:
    """Print tokens/s and GPU power of a running vLLM server.

    Tokens are read from the server's metrics page, for all models and engines. Power is read from the GPUs of this
    machine in CUDA_VISIBLE_DEVICES: run the command on the server's machine, with the server's CUDA_VISIBLE_DEVICES.
    The server needs no change. While the server does not answer, the request is repeated. After a restart of the
    server, the tokens of one interval are unknown.

    \b
    Examples:
      effllm watch
      effllm watch --vllm http://127.0.0.1:8000/metrics --interval 10
      CUDA_VISIBLE_DEVICES=0,1 effllm watch         # GPUs of the server
      effllm watch --json --count 12 | jq .joules_per_token

    Exit status: 0 one or more intervals measured, 1 no interval measured, 2 wrong use.
    """


@_command
def inspect(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, its name or how only that begins, or last.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    mail: Annotated[bool, typer.Option("--mail", help="Print a text of at most 15 lines for the user.")] = False,
    stacks: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the recorded stacks for speedscope or flamegraph.pl.")
    ] = None,
) -> None:
    """Print the verdict on a run, and the parts of its device time.

    The parts of the time and of the energy add up to the whole.
    The verdict names the largest avoidable loss with its evidence and the next action, or "healthy", or "unknown".
    For a running job, it covers the time so far. `effllm inspect` reads only summary.json of the run folder, and with
    --stacks only stacks.jsonl.

    \b
    Examples:
      effllm inspect last                           # the run that started last
      effllm inspect RUN --mail | mail -s "your job" alice
      effllm inspect RUN --json | jq -r .verdict.cause
      effllm inspect RUN --json | jq '.waterfall.parts[] | {name, share}'
      effllm inspect RUN --stacks job.folded && flamegraph.pl job.folded >job.svg

    Exit status: 0 success, 1 no summary or no stacks can be read, 2 wrong use.
    """


_command(analysis_app.fit)
app.command()(analysis_app.top)
for _declared in analysis_app.COMMANDS:
    _command(_declared)


@_command
def explain(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="Metrics, events, causes, settings, columns or GPUs."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/events.md.")] = False,
) -> None:
    """Explain a metric, event, cause, setting, column or GPU.

    Without a name, all but the columns and GPUs are listed. A name may be a tag of a chart.

    \b
    Examples:
      effllm explain mfu_ratio
      effllm explain efficientllm/al_seconds device_idle xid LOG_INTERVAL
      effllm explain ranks.energy_j "NVIDIA H100 NVL"
      effllm explain | grep -A1 energy
      effllm explain --json | jq '.[] | select(.what == "metric") | .name'

    Exit status: 0 success, 1 a name has no entry, 2 wrong use.
    """
