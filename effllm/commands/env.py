"""``effllm env``: prints the settings as export commands of a shell, or checks the settings."""

from __future__ import annotations

import itertools
import operator
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from effllm.commands.output import complain
from effllm.config.settings import ALL_VARIABLES, Config, Variable, read_config
from effllm.config.switches import PREFIX, process_environ
from effllm.sinks import options_of, sink_names
from effllm.trainer.preflight import doubts, problems

_OPTIONS = ("--check", "--shell", "--markdown")
_WIDTH = 80
_group_of = operator.attrgetter("group")


def main(arguments: Sequence[str]) -> int:
    """Print the settings, or only errors with ``--check``; return 2 if a setting is wrong."""
    for argument in arguments:
        if argument not in _OPTIONS:
            return complain("env", f"{argument!r} is not one of {', '.join(_OPTIONS)}", 2)
    if "--markdown" in arguments:
        print("\n".join(markdown_tables()))
        return 0
    environ = process_environ()
    if messages := problems(environ):
        print("\n".join(f"effllm: {line}" for line in messages), file=sys.stderr)
        return 2
    if "--check" in arguments:
        for line in doubts(environ):
            print(f"effllm: {line}", file=sys.stderr)
    else:
        lines = export_lines(environ) if "--shell" in arguments else commented_export_lines(environ)
        print("\n".join(lines))
    return 0


def export_lines(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield only the exports; ``eval`` also accepts all exports in one line."""
    config = read_config(environ)
    for variable in ALL_VARIABLES:
        if value := _value_text(variable, config, environ):
            yield f"export {PREFIX}{variable.name}={shlex.quote(value)};"


def commented_export_lines(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the exports by group, with their meanings; exports of unset variables are comments."""
    config = read_config(environ)
    for group, variables in itertools.groupby(ALL_VARIABLES, _group_of):
        yield f"# ---- {group} ----"
        for variable in variables:
            yield "#"
            text = f"{variable.meaning} Allowed: {variable.value_type.allowed}."
            yield from textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")
            name, value = PREFIX + variable.name, _value_text(variable, config, environ)
            yield f"export {name}={shlex.quote(value)}" if value else f"# export {name}="
        yield ""


def markdown_tables() -> Iterator[str]:
    """Yield the headings and tables of docs/configuration.md."""
    for group, variables in itertools.groupby(ALL_VARIABLES, _group_of):
        yield from ("", f"## {group}", "", "| variable | default | meaning | allowed |", "|---|---|---|---|")
        for variable in variables:
            default = f"`{variable.default}`" if variable.field and variable.default else ""
            yield f"| `{variable.name}` | {default} | {variable.meaning} | {variable.value_type.allowed} |"
    yield from ("", "## Options of sinks", "", "| sink and option | default | meaning | allowed |", "|---|---|---|---|")
    for sink in sink_names():
        for name, (default, value_type, meaning) in options_of(sink).items():
            shown = f"`{default}`" if default else ""
            yield f"| `{sink}:{name}=` | {shown} | {meaning} | {value_type.allowed} |"


def _value_text(variable: Variable, config: Config, environ: Mapping[str, str]) -> str:
    """Return the value of a setting, "" if it is not set; a variable without a field of `Config` is a switch."""
    if variable.field:
        return variable.text_in(config)
    return environ.get(PREFIX + variable.name, "") or "1"  # `eval "$(effllm env)"` enables metrics
