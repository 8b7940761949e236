"""The command line: the commands that commands.toml declares, with their options and examples.

The module of a command is imported when the command is called.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from msgspec import Struct

#: Commands whose ``main`` has the words of the command line: see effllm/cli.py, which starts them without typer.
OF_WORDS = ("env", "run", "top")
_TYPES: Mapping[str, Any] = {
    "int": int, "float": float, "text": str, "texts": list[str], "path": Path, "flag": bool,
}  # fmt: skip


class CommandOption(Struct, frozen=True, forbid_unknown_fields=True):
    """An option or an argument of a command; the fields are those of typer."""

    type: Literal["int", "float", "text", "texts", "path", "flag"]
    help: str
    metavar: str | None = None
    names: tuple[str, ...] = ()
    default: str | int | float | None = None
    min: int | float | None = None
    max: int | float | None = None
    show_default: bool = True
    is_argument: bool = False
    is_required: bool = False

    def parameter(self, name: str) -> inspect.Parameter:
        """Return the parameter of a function from which typer makes the option."""
        declare = typer.Argument if self.is_argument else typer.Option
        default = ... if self.is_required else False if self.type == "flag" else self.default
        about = declare(
            default,
            *(() if self.is_argument else self.words_of(name)),
            help=self.help,
            metavar=self.metavar,
            min=self.min,
            max=self.max,
            show_default=self.show_default,
        )
        kind = _TYPES[self.type] if default is not None else _TYPES[self.type] | None
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=about, annotation=kind)

    def words_of(self, name: str) -> tuple[str, ...]:
        """Return the words that name the option of a parameter."""
        return self.names or (f"--{name.replace('_', '-')}",)

    def words(self, name: str, value: Any) -> Iterator[str]:
        """Yield the words of the command line for a value."""
        if self.is_argument:
            yield from [value] if value and isinstance(value, str) else value or ()
        elif value:
            yield self.words_of(name)[-1]
            yield from () if self.type == "flag" else (value,)


class DeclaredCommand(Struct, frozen=True, forbid_unknown_fields=True):
    """A command in commands.toml."""

    help: str
    options: dict[str, CommandOption]
    is_for_operators: bool = False  # or for tests
    settings: dict[str, bool] = {}  # of click

    def add_to(self, app: typer.Typer, command: str) -> None:
        """Add the command."""

        def call(**values: Any) -> None:
            main = import_module(f"effllm.commands.{command}").main
            if command in OF_WORDS:
                words = (word for name, one in self.options.items() for word in one.words(name, values[name]))
                raise typer.Exit(main(list(words)))
            raise typer.Exit(main(**values))

        parameters = [one.parameter(name) for name, one in self.options.items()]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        # Before a paragraph, this control character prevents that it is wrapped.
        text = re.sub(r"\n\n(?=Example)", "\n\n\b\n", self.help)
        app.command(command, help=text, context_settings=self.settings)(call)


class _Commands(typer.core.TyperGroup):
    """The commands in blocks."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - click's signature
        return list(DECLARED)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, is_for_operators in (("Commands", False), ("Commands for operators and tests", True)):
            names = [name for name, one in DECLARED.items() if one.is_for_operators == is_for_operators]
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


DECLARED = msgspec.toml.decode(Path(__file__).with_name("commands.toml").read_bytes(), type=dict[str, DeclaredCommand])
for _name, _declared in DECLARED.items():
    _declared.add_to(app, _name)
