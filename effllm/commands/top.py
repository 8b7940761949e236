"""``effllm top``: a running or finished job on one terminal screen, or one frame of it for scripts."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from effllm.analysis.run_folders import LINE_FILES, NoRun, UnreadableRun, named_run, runs_below
from effllm.commands.output import complain
from effllm.commands.top_reader import TopSource, ordered_frame
from effllm.config.switches import process_environ
from effllm.records.plain_text import one_line
from effllm.views.top.frame import NO_DATA, WRONG_USE, TopFrame, document, exit_status
from effllm.views.top.screen import plain_frame
from effllm.views.top.text import ASCII_BARS, BARS, plain
from effllm.views.top.view_state import Order

STOPPED = 130
DEFAULT_SIZE = (80, 24)


def main(arguments: Sequence[str]) -> int:
    """Show a job; return the exit status."""
    given = _options_or_status(arguments)
    if isinstance(given, int):
        return given
    try:
        if (folder := _folder_of_runs(given.run)) is not None:
            return _show_fleet(folder, is_once=given.once, as_json=given.json)
        source, name = _source_and_name(given)
        terminal = None if given.once else _screen_module()
        return _print_once(source, as_json=given.json) if terminal is None else terminal.show(source, one_line(name))
    except UnreadableRun as error:
        return complain("top", str(error), 1 if isinstance(error, NoRun) else NO_DATA)
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:  # stdout was closed, as with `effllm top | head`
        sys.stderr.close()
        return 0


class _Parser(argparse.ArgumentParser):
    """A parser whose errors have the form of the other commands."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(message)


def _options_or_status(arguments: Sequence[str]) -> argparse.Namespace | int:
    """Return the options, or the exit status of wrong use; `effllm.commands.app` has the help."""
    parser = _Parser(prog="effllm top", add_help=False, allow_abbrev=False)
    parser.add_argument("run", nargs="?", default="")
    parser.add_argument("--endpoint", default="")
    parser.add_argument("--token-file", default="")
    parser.add_argument("--ca-file", default="")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--json", action="store_true")
    try:
        given = parser.parse_args(arguments)
        if given.json and not given.once:
            parser.error("--json needs --once")
        if given.run and given.endpoint:
            parser.error("RUN and --endpoint are two sources: choose one")
        if (given.token_file or given.ca_file) and not given.endpoint:
            parser.error("--token-file and --ca-file belong to --endpoint")
    except ValueError as error:
        return complain("top", f"{error}; effllm top --help has examples", WRONG_USE)
    return given


def _folder_of_runs(run: str) -> Path | None:
    """Return the folder of several runs, or of ledger files, that was given; ``None`` for one run."""
    path = Path(run)
    if not run or not path.exists():
        return None
    if path.is_dir():
        return None if any(runs_below(str(path), 0)) else path  # a run folder is one run
    return path if path.suffix == ".jsonl" and not LINE_FILES.fullmatch(path.name) else None


def _show_fleet(folder: Path, *, is_once: bool, as_json: bool) -> int:
    from effllm.commands.top_fleet import Fleet, print_once, show

    fleet = Fleet(folder)
    if not is_once and _screen_module() is not None:
        return show(fleet)
    return print_once(fleet, shutil.get_terminal_size(DEFAULT_SIZE).columns, as_json=as_json)


def _screen_module() -> ModuleType | None:
    """Return the module of the screen; ``None`` without a terminal that can move its cursor."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    try:
        from effllm.commands import top_terminal
    except ImportError:  # a Python without curses
        return None
    return top_terminal if top_terminal.can_move_cursor(process_environ().get("TERM", "")) else None


def _source_and_name(given: argparse.Namespace) -> tuple[TopSource, str]:
    if given.endpoint:
        from effllm.commands.top_page import PageSource

        return PageSource(given.endpoint, given.token_file, given.ca_file), given.endpoint
    from effllm.commands.top_folder import FolderSource
    from effllm.config.settings import ConfigError, read_config

    try:
        path = named_run(given.run) if given.run else Path(read_config(process_environ()).run_dir)
    except UnreadableRun as error:
        raise NoRun(str(error)) from error
    except ConfigError as error:
        raise UnreadableRun(str(error)) from error
    if not path.exists():
        raise NoRun(f"{path} does not exist: start a job with effllm run, or give a run")
    return FolderSource(path), f"{path}"


def _print_once(source: TopSource, *, as_json: bool) -> int:
    frame = _read_whole_frame(source)
    if as_json:
        print(json.dumps(document(frame), allow_nan=False))
    else:
        encoding = sys.stdout.encoding or "ascii"
        bars = BARS if encoding.lower().replace("-", "") == "utf8" else ASCII_BARS
        width = shutil.get_terminal_size(DEFAULT_SIZE).columns
        text = plain(plain_frame(frame, width, DEFAULT_SIZE[1], bars))
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
    return exit_status(frame)


def _read_whole_frame(source: TopSource) -> TopFrame:
    try:
        source.refresh()
        while source.has_more:
            source.refresh()
        source.refresh_hosts()
        return ordered_frame(source, Order())
    except OSError as error:
        raise UnreadableRun(f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")) from error
