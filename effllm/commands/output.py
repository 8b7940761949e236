"""What the commands share: the form of their output, and what they print on stderr."""

from __future__ import annotations

import sys
import time

from effllm.records.plain_text import one_line

FIRST_AFTER_S, EVERY_S = 1.0, 0.2  # time of a reading before its first line, and then between lines


def complain(command: str, text: str, status: int = 0) -> int:
    """Print why a command failed, or a warning; return the exit status."""
    print(f"effllm {command}: {one_line(text)}", file=sys.stderr)
    return status


def form_of(**forms: bool) -> str:
    """Return the name of the chosen option, such as json, or "text"; `BadParameter` if two are chosen."""
    chosen = [name for name, is_chosen in forms.items() if is_chosen]
    if len(chosen) > 1:
        from typer import BadParameter  # most commands of one form, and `effllm top`, start without typer

        raise BadParameter(f"--{chosen[0]} and --{chosen[1]} are two forms: choose one", param_hint=f"--{chosen[0]}")
    return chosen[0] if chosen else "text"


class ReadingProgress:
    """Prints the progress of a long reading on stderr; it prints nothing if stderr is not a terminal."""

    def __init__(self) -> None:
        self._next_line_s = time.monotonic() + FIRST_AFTER_S if sys.stderr.isatty() else float("inf")  # monotonic time
        self._printed_letters = 0  # of the line on the terminal

    def __call__(self, done: int, total: int) -> None:
        """Print the number of run folders that were read; the line is erased at the end."""
        if done >= total:
            self._replace_line("")
        elif time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + EVERY_S
            self._replace_line(f"{done:,} of {total:,} run folders were read")

    def _replace_line(self, line: str) -> None:
        if line or self._printed_letters:
            print(f"\r{line.ljust(self._printed_letters)}", end="" if line else "\r", file=sys.stderr, flush=True)
            self._printed_letters = len(line)
