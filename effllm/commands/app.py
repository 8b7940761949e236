"""The command line: all commands with options and examples, in the order of the help.

Each command imports its module when it is called.
"""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    name="effllm",
    help="The efficiency ledger of LLM training jobs: AMU, PCU, AL, TT, ST and AEC of the whole cluster.",
    epilog="Start with: effllm demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help reads well at any width, and starts in half the time
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main() -> None:
    """Run the command that ``sys.argv`` names, and exit with its status."""
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
    """The efficiency ledger of LLM training jobs: AMU, PCU, AL, TT, ST and AEC of the whole cluster."""


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Simulated ranks, a process each.")] = 4,
    iterations: Annotated[int, typer.Option(min=1, metavar="N", help="Iterations of each rank.")] = 60,
    step_seconds: Annotated[
        float, typer.Option(min=0.001, max=60.0, metavar="S", help="Seconds of an iteration.")
    ] = 0.05,
    log_interval: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Iterations between reports. [default: 10, or more that last a second]"),
    ] = None,
    run_dir: Annotated[
        str, typer.Option(metavar="FOLDER", help="Where the run folder is made. [default: EFFICIENTLLM_RUN_DIR]")
    ] = "",
) -> None:
    """Run a small simulated job: without GPU and torch, in a few seconds.

    Processes, agents and messages are real, GPUs are simulated; every output is marked as simulated. The last rank is
    12 % slower than the others, there is an evaluation in the middle, and the loss decreases.

    \b
    Examples:
      effllm demo
      effllm demo --ranks 8 --iterations 200
      effllm demo --run-dir /tmp/demo
      tensorboard --logdir efficientllm_runs        # then, in a browser

    Exit status: 0 the demo completed, 1 it did not, 2 wrong use, 130 stopped with Ctrl-C.
    """
    from effllm.commands import demo as command

    raise typer.Exit(command.main(ranks, iterations, step_seconds, log_interval, run_dir))


@app.command()
def check(
    device: Annotated[str, typer.Option(metavar="NAME", help="Device to check. [default: EFFICIENTLLM_DEVICE]")] = "",
    show_all: Annotated[bool, typer.Option("--all", help="Show all metrics, not only the usual ones.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all results as JSON.")] = False,
) -> None:
    """Check which metrics can be measured here, and by which sources.

    It tests sensors, their cost, the run folder and the network. For each metric that cannot be measured it prints
    the reason and the remedy. No files are left.

    \b
    Examples:
      effllm check
      effllm check --device host
      effllm check --json | jq .device
      srun --ntasks-per-node 1 effllm check         # on every node

    Exit status: 0 a run would be measured, 1 a required part is broken, 2 wrong use.
    """
    from effllm.commands import check as command

    raise typer.Exit(command.main(device, show_all=show_all, as_json=as_json))


@app.command()
def profile(
    device: Annotated[
        str, typer.Option(metavar="GPU", help="Its index in bus order, or UUID. [default: the first visible]")
    ] = "",
    seconds: Annotated[float, typer.Option(min=10.0, max=600.0, metavar="S", help="For all measurements.")] = 60.0,
    save: Annotated[str, typer.Option(metavar="FILE", help="Write the report there, as JSON.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Measure the behaviour of the sensors of one GPU without other work.

    The GPU is first idle, then loaded by torch with matrix products that are switched on and off. The results are the
    period of counter and power, their lag, the measured share of the time, and the duration of calls. Later runs on
    this model and driver use them. The report has no host, user or serial number and can be published unchanged.

    No other program should use the GPU. Without torch and CUDA, only the idle GPU is measured.

    \b
    Examples:
      effllm profile
      effllm profile --device 3 --seconds 120
      effllm profile --save h100.json               # to be sent in

    Exit status: 0 it was profiled, 1 the report cannot be written, 2 no GPU can be read, or wrong use, 130 stopped.
    """
    from effllm.commands import profile as command

    raise typer.Exit(command.main(device, seconds, as_json=as_json, save=save))


@app.command()
def env(
    check: Annotated[bool, typer.Option("--check", help="Print only errors, on stderr.")] = False,
    shell: Annotated[bool, typer.Option("--shell", help="Print only the exports, without comments.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables of docs/configuration.md.")] = False,
) -> None:
    """Print the settings as a shell exports them, or check them.

    Each setting has the value that a run would use: the variable's value, else the default. The most common settings
    come first. An unknown name is an error that suggests the nearest name, or the new name of an old one.

    \b
    Examples:
      effllm env | less                             # every setting, by group
      eval "$(effllm env)"                          # set them in this shell
      EFFICIENTLLM_WARMUP=60s effllm env --shell | grep WARMUP
      effllm env --check && torchrun ... train.py

    Exit status: 0 no setting is wrong (doubtful ones are named), 2 a setting is wrong.
    """
    from effllm.commands import env as command

    raise typer.Exit(command.main(["--check"] * check + ["--shell"] * shell + ["--markdown"] * markdown))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or -m and a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None,
) -> None:
    """Run a training script and measure it.

    The script runs unchanged, as with python, and its run folder is completed however it ends. Training loops of the
    known frameworks, and any other loop with a torch optimizer, are hooked when they are imported; docs/systems.md
    lists them. A loop without torch calls effllm.monitor, or initialize_efficientllm_metrics(parameters), and
    record_iteration_start and record_iteration_end around each step.

    The exit status and the traceback are the script's own. An exception, or an exit status that is not 0, makes the
    run "failed".

    \b
    Examples:
      effllm run train.py --lr 3e-4
      effllm run -m my_package.train --lr 3e-4
      torchrun --nproc_per_node 2 -m effllm run train.py
      EFFICIENTLLM_LOG_INTERVAL=50 effllm run train.py
    """
    from effllm.commands import run as command

    raise typer.Exit(command.main([script, *(arguments or [])]))


@app.command()
def serve(
    bind: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 is a free one.")] = (
        "127.0.0.1:0"
    ),
    run_dir: Annotated[
        str, typer.Option(metavar="FOLDER", help="Where the run folder is made. [default: EFFICIENTLLM_RUN_DIR]")
    ] = "",
    run_name: Annotated[
        str, typer.Option(metavar="NAME", help="Its name. [default: EFFICIENTLLM_RUN_NAME, else time and id]")
    ] = "",
    job: Annotated[
        str, typer.Option(metavar="ID", help="Id of the job; a new one in an old folder is its next attempt.")
    ] = "",
) -> None:
    """Run a separate aggregator, not started by rank 0.

    It prints the variables for the training processes, ends when all ranks have left, and writes the summary, also
    after Ctrl-C or SIGTERM. LOG_INTERVAL must be the same in the training processes.

    \b
    Examples:
      effllm serve                            # on a free port, which it prints
      effllm serve --bind 127.0.0.1:5555 --run-name llama-7b
      EFFICIENTLLM_ENDPOINT=tcp://127.0.0.1:5555 torchrun ... train.py

    Exit status: 0 the summary is written, 1 the port is not available, 2 wrong use.
    """
    from effllm.commands import serve as command

    raise typer.Exit(command.main(bind, run_dir, run_name, job))


@app.command()
def simulate(
    ranks: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Ranks that report.")],
    interval: Annotated[
        float, typer.Option(min=0.05, max=3600.0, metavar="S", help="Seconds between two reports of a rank.")
    ] = 1.0,
    minutes: Annotated[float, typer.Option(min=0.01, max=10_080.0, metavar="M", help="For how long.")] = 1.0,
    endpoint: Annotated[str, typer.Option(metavar="HOST:PORT", help="A running aggregator. [default: a new one]")] = "",
    processes: Annotated[
        int, typer.Option(min=0, max=256, metavar="K", show_default=False, help="Sender processes. [default: by ranks]")
    ] = 0,
    arrival: Annotated[
        str, typer.Option(metavar="HOW", help="burst: all ranks end a window at once; even: spread over it.")
    ] = "burst",
    security: Annotated[str, typer.Option(metavar="HOW", help="curve: with keys; none: without.")] = "curve",
    run_dir: Annotated[str, typer.Option(metavar="FOLDER", help="Keep the run folder there. [default: deleted]")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure the cost of an aggregator for a number of ranks.

    Simulated ranks send real messages over real connections to a real aggregator. The results are its share of a
    core, its memory, and the delay of a window's values after its last report. The summary is compared with the
    reported numbers. Ranks and aggregator share this machine, unless --endpoint is given.

    \b
    Examples:
      effllm simulate --ranks 1000
      effllm simulate --ranks 10000 --minutes 5 --json
      effllm simulate --ranks 512 --interval 10 --arrival even
      effllm serve --bind 10.0.0.1:5555             # on the head node; then:
      effllm simulate --ranks 4000 --endpoint 10.0.0.1:5555

    Exit status: 0 all reports were counted, 1 some were lost or the simulation failed, 2 wrong use, 130 stopped with
    Ctrl-C.
    """
    from effllm.commands import simulate as command

    for option, value, allowed in (
        ("--arrival", arrival, tuple(command.SPREAD)),
        ("--security", security, ("curve", "none")),
    ):
        if value not in allowed:
            raise typer.BadParameter(f"{value} is not one of: {', '.join(allowed)}", param_hint=option)
    simulation = command.Simulation(
        ranks=ranks,
        interval_s=interval,
        minutes=minutes,
        endpoint=f"tcp://{endpoint.removeprefix('tcp://')}" if endpoint else "",
        processes=processes,
        arrival=arrival,
        run_dir=run_dir,
        security=security,
    )
    raise typer.Exit(command.main(simulation, as_json))


@app.command()
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
    """Watch a running vLLM server: tokens/s, and the power of its GPUs.

    Tokens are read from the server's metrics page, for all its models and engines. Power is read from the GPUs of
    this machine in CUDA_VISIBLE_DEVICES, so run it on the server's machine, with the same variable. The server needs
    no change. If it does not answer, the request is repeated; after a restart one interval has no tokens.

    \b
    Examples:
      effllm watch
      effllm watch --vllm http://127.0.0.1:8000/metrics --interval 10
      CUDA_VISIBLE_DEVICES=0,1 effllm watch         # the server's two GPUs
      effllm watch --json --count 12 | jq .joules_per_token

    Exit status: 0 at least one interval was measured, 1 none was, 2 wrong use.
    """
    from effllm.commands import watch as command

    raise typer.Exit(command.main(vllm, interval, count, as_json=as_json))


@app.command()
def events(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/events.md.")] = False,
) -> None:
    """List every kind of event with its output and meaning.

    Events of a run are lines of events.jsonl in its run folder; each is counted.

    \b
    Examples:
      effllm events
      effllm events | grep -A1 xid

    Exit status: 0 success, 2 wrong use.
    """
    from effllm.commands import lists

    lists.print_events(as_markdown=as_markdown)


@app.command()
def metrics() -> None:
    """List every metric with its unit, tag and meaning.

    \b
    Examples:
      effllm metrics
      effllm metrics | grep energy
    """
    from effllm.commands import lists

    lists.print_metrics()
