"""The command line: the commands in the order of the help.

A command is ``main`` in the module of its name, with its options. Commands that start without typer are declared here.
"""

from __future__ import annotations

import functools
import io
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

#: The commands in the order of the help, in two blocks.
BLOCKS = (
    (
        "Commands",
        ["demo", "check", "env", "run", "inspect", "top", "report", "runs", "compare", "campaign", "fit", "explain"],
    ),
    ("Commands for operators and tests", ["serve", "simulate", "watch", "profile"]),
)


class _Commands(typer.core.TyperGroup):
    """The commands in blocks; the module of a command is imported when the command is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Every name is listed, for "Did you mean"; None: the command is made when it is called.
        self.commands: Any = dict.fromkeys(self.list_commands(None)) | self.commands

    def list_commands(self, _ctx: Any) -> list[str]:
        return [name for _, names in BLOCKS for name in names]

    def get_command(self, _ctx: Any, name: str) -> Any:
        return (self.commands[name] or _load_command(name)) if name in self.commands else None

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        for title, names in BLOCKS:
            with formatter.section(title):
                formatter.write_dl([(name, self._first_help_line(name)) for name in names])

    def _first_help_line(self, name: str) -> str:
        """Return the first line of the help, which is the first line of the module if it declares the command."""
        if (declared := self.commands.get(name)) is not None:
            return str(declared.help).partition("\n")[0]
        with Path(__file__).with_name(f"{name}.py").open() as file:
            return file.readline().strip('"\n')


def _load_command(name: str) -> Any:
    """Return a command: the options are the parameters of ``main`` in its module, and the help is the module's text."""
    module = import_module(f"effllm.commands.{name}")

    @functools.wraps(module.main)
    def call(**options: Any) -> None:
        raise typer.Exit(module.main(**options))

    command = typer.Typer(add_completion=False, rich_markup_mode=None)
    command.command(name, help=module.__doc__)(call)
    return typer.main.get_command(command)


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


def _print_version(wanted: bool) -> None:
    if wanted:
        from effllm import __version__

        print(f"effllm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Show how well training jobs use their GPUs, across all ranks and nodes."""


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


@app.command()
def top(
    run: Annotated[
        str,
        typer.Argument(metavar="[RUN]", help="Run folder or its name, or a folder of runs. [default: the newest run]"),
    ] = "",
    endpoint: Annotated[
        str, typer.Option(metavar="URL", help="Metrics page of a running job, instead of a run folder.")
    ] = "",
    token_file: Annotated[
        str, typer.Option(metavar="FILE", help="File with the token of the page, readable only by its user.")
    ] = "",
    ca_file: Annotated[
        str, typer.Option(metavar="FILE", help="Certificate of the page, or of its authority. [default: the system's]")
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Print one frame as plain text and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
) -> None:
    """Show a job, or all running jobs of a folder, on one screen.

    The screen has the verdict, the values of the job, and the ranks or hosts, the worst first with the reason. The keys
    are in its last line; the key ? lists all of them. A finished run is replayed with the arrow keys, Home, End and
    the space bar. The job needs no change; the command only reads its run folder. A terminal that cannot move the
    cursor (TERM=dumb) gets one frame, as with --once. A folder of runs, or of EFFICIENTLLM_LEDGER, shows a line for
    each running job, the worst first; Enter opens the job.

    \b
    Examples:
      effllm top                                    # the newest run in EFFICIENTLLM_RUN_DIR
      effllm top efficientllm_runs/20260101-120000-1a2b3c4d
      effllm top /project/efficientllm_runs         # all running jobs
      effllm top --endpoint http://127.0.0.1:9788/metrics
      effllm top RUN --once --json | jq -r '.problems[].text'
      effllm top RUN --once > /dev/null || echo "look at RUN"

    Exit status: 0 no problem, or quit by a key, 1 no run, or (with --once) a problem of the job, 2 wrong use, 3 no
    values, 130 stopped with Ctrl-C, 143 ended by SIGTERM.
    """
    from effllm.commands import top as command

    texts = ("--endpoint", endpoint), ("--token-file", token_file), ("--ca-file", ca_file)
    options = [word for name, text in texts if text for word in (name, text)]
    raise typer.Exit(command.main([run] * bool(run) + options + ["--once"] * once + ["--json"] * as_json))
