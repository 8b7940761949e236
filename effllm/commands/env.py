"""``effllm env``: the settings as a shell exports them, and whether they are right."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence

from effllm.config import SWITCHES, VARIABLES, read_config
from effllm.preflight import doubts, problems
from effllm.switches import PREFIX, this_process

_OPTIONS = ("--check", "--shell")


def main(arguments: Sequence[str]) -> int:
    """Print the settings, or with ``--check`` nothing; return 2 where one of them is wrong."""
    for argument in arguments:
        if argument not in _OPTIONS:
            print(f"effllm env: {argument!r} is not one of {', '.join(_OPTIONS)}", file=sys.stderr)
            return 2
    environ = this_process()
    found = problems(environ)
    if found:
        print("\n".join(f"effllm: {line}" for line in found), file=sys.stderr)
        return 2
    if "--check" in arguments:
        for line in doubts(environ):
            print(f"effllm: {line}", file=sys.stderr)
    else:
        lines = statements(environ) if "--shell" in arguments else commented(environ)
        print("\n".join(lines))
    return 0


def statements(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the exports alone, which ``eval`` takes on one line, too."""
    for name, value, _ in _settings(environ):
        if value:
            yield f"export {name}={shlex.quote(value)};"


def commented(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the exports with what they mean; what is unset is a comment."""
    for name, value, meaning in _settings(environ):
        yield f"# {meaning}"
        yield f"export {name}={shlex.quote(value)}" if value else f"# export {name}="


def _settings(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    config = read_config(environ)
    for variable in VARIABLES:
        yield PREFIX + variable.name, variable.value(config), variable.meaning
    for name in SWITCHES:
        yield name, environ.get(name, "") or "1", "frameworks are hooked as they are imported"
