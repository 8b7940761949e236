"""Compare the runs in a CSV file of scripts/train.py: tokens per second, energy per token, memory.

    python scripts/analyze_energy.py outputs/energy_results.csv

Runs with the same backend, optimizer and precision are one group. Each value of a group is a quotient of sums over its
runs, and a run without a value is not in its sums. The other groups are compared with
the first group.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

NUMBERS = ("tokens_processed", "energy_J", "tok_per_s", "J_per_token", "avg_power_W", "vram_peak_MB")
GROUPED_BY = ("backend", "optimizer", "precision")
SAME_IN_A_FAIR_COMPARISON = ("model", "dataset", "seq_len", "batch_size", "grad_accum")

Row = dict[str, str]


class WrongFile(ValueError):
    """The file cannot be analysed; the message is one line."""


@dataclass
class Group:
    """The runs of one configuration."""

    name: str
    rows: list[Row] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the runs, divided by the time of the runs."""
        pairs = self._pairs("tokens_processed", "tok_per_s")
        return _quotient(sum(tokens for tokens, _ in pairs), sum(tokens / rate for tokens, rate in pairs if rate))

    @property
    def joules_per_token(self) -> float | None:
        """Energy of the runs, divided by the tokens of the runs."""
        pairs = self._pairs("energy_J", "tokens_processed")
        return _quotient(sum(joules for joules, _ in pairs), sum(tokens for _, tokens in pairs))

    @property
    def watts(self) -> float | None:
        """Energy of the runs, divided by the time of the runs."""
        pairs = [(joules, watts) for joules, watts in self._pairs("energy_J", "avg_power_W") if watts]
        return _quotient(sum(joules for joules, _ in pairs), sum(joules / watts for joules, watts in pairs))

    @property
    def peak_mb(self) -> float | None:
        """Largest peak of the runs."""
        return max((peak for row in self.rows if (peak := _number(row, "vram_peak_MB")) is not None), default=None)

    def _pairs(self, first: str, second: str) -> list[tuple[float, float]]:
        found = [(_number(row, first), _number(row, second)) for row in self.rows]
        return [(one, other) for one, other in found if one is not None and other is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the runs in a CSV file of scripts/train.py.")
    parser.add_argument("file", type=Path, help="such as outputs/energy_results.csv")
    try:
        print(text(read_rows(file := parser.parse_args().file), str(file)))
    except WrongFile as error:
        print(f"analyze_energy: {error}", file=sys.stderr)
        return 1
    return 0


def read_rows(path: Path) -> list[Row]:
    """Return the rows of the file.

    Raises:
        WrongFile: the file cannot be read, lacks a column, has no row, or a cell is not a number.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            rows, columns = list(reader), reader.fieldnames or ()
    except (OSError, ValueError, csv.Error) as error:
        raise WrongFile(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    needed = (*NUMBERS, *GROUPED_BY, *SAME_IN_A_FAIR_COMPARISON)
    if missing := [name for name in needed if name not in columns]:
        raise WrongFile(f"{path} has no column {missing[0]}")
    if not rows:
        raise WrongFile(f"{path} has no row")
    for line, row in enumerate(rows, 2):
        for name in NUMBERS:
            try:
                _number(row, name)
            except ValueError:
                raise WrongFile(f"{path}, line {line}: {name} is {row[name]!r}, not a number") from None
    return rows


def text(rows: list[Row], name: str) -> str:
    """Return the comparison, in lines of at most 80 characters if the names are short."""
    groups: dict[str, Group] = {}
    for row in rows:
        key = " ".join(row[column] for column in GROUPED_BY)
        groups.setdefault(key, Group(key)).rows.append(row)
    lines = [f"{name}: {_runs(len(rows))}", ""]
    lines.append(f"{'':<31}{'runs':>4}{'tokens/s':>11}{'mJ/token':>10}{'E10k_J':>9}{'W':>6}{'peak MB':>9}")
    for group in groups.values():
        per_token = group.joules_per_token
        cells = [
            _cell(group.tokens_per_second, 11),
            _cell(_times(per_token, 1e3), 10),
            _cell(_times(per_token, 1e4), 9),
        ]
        cells += [_cell(group.watts, 6), _cell(group.peak_mb, 9)]
        lines.append(f"{group.name:<31}{len(group.rows):>4}{''.join(cells)}")
    first, *others = groups.values()
    lines += ["", *(line for other in others for line in _compared(other, first))]
    return "\n".join([*lines, *_warnings(rows)]).rstrip()


def _compared(group: Group, first: Group) -> list[str]:
    pairs = {
        "tokens/s": (group.tokens_per_second, first.tokens_per_second),
        "J/token": (group.joules_per_token, first.joules_per_token),
        "peak memory": (group.peak_mb, first.peak_mb),
    }
    known = [f"{100 * (value / base - 1):+.1f} % {name}" for name, (value, base) in pairs.items() if value and base]
    return [f"{group.name}, compared with {first.name}:", f"  {', '.join(known) or 'no common values'}"]


def _warnings(rows: list[Row]) -> list[str]:
    lines = []
    if without := sum(not row["energy_J"] for row in rows):
        lines.append(f"without energy: {without} of {_runs(len(rows))}")
    values = {column: sorted({row[column] for row in rows}) for column in SAME_IN_A_FAIR_COMPARISON}
    lines += [f"the runs differ in {name}: {', '.join(found)}" for name, found in values.items() if len(found) > 1]
    if any("simulated" in row.get("notes", "") for row in rows):
        lines.append("some energy is of simulated devices")
    return lines


def _runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


def _number(row: Row, name: str) -> float | None:
    """Return a cell; ``None`` if it is empty."""
    if not row[name].strip():
        return None
    value = float(row[name])
    if not math.isfinite(value):
        raise ValueError(name)
    return value


def _quotient(above: float, below: float) -> float | None:
    return above / below if below else None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _cell(value: float | None, width: int) -> str:
    if value is None:
        return f"{'-':>{width}}"
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:>{width},.{min(digits, 4)}f}"


if __name__ == "__main__":
    sys.exit(main())
