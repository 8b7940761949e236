"""Reads the lines of the files of a run as the records from which they were written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from effllm.records.energy import NORMAL_95
from effllm.records.job import ClusterTotals, JobConstants, WindowReport
from effllm.records.rank import Event
from effllm.store.reader import _ENERGY, _GROUPS, JsonLines, RankRow, WindowLine, segments


class WindowRow(WindowReport, frozen=True, kw_only=True):
    """A line of ``windows-*.jsonl``, decoded."""

    last: ClusterTotals
    run: ClusterTotals | None = None
    job: ClusterTotals | None = None


def totals_of(keys: Mapping[str, Any], constants: JobConstants | None = None) -> ClusterTotals:
    """Return the totals from an object of a line; the inverse of `totals_by_key`.

    Raises:
        msgspec.ValidationError: a value has a wrong type.
    """
    keys = {key: value for key, value in keys.items() if value is not None}
    energy = {name: keys[key] for name, key in _ENERGY.items() if key in keys}
    energy["inside_j2"] = (msgspec.convert(keys.get("energy_error_j", 0.0), float) / NORMAL_95) ** 2
    energy["counts"] = {key.removeprefix("energy_"): keys[key] for key in keys if key.startswith("energy_")}
    groups = dict.fromkeys(_GROUPS, keys)
    totals = msgspec.convert({**keys, **groups, "energy": energy}, ClusterTotals, str_keys=True)
    return totals if constants is None else msgspec.structs.replace(totals, constants=constants)


class WindowRows(JsonLines[WindowRow]):
    """The windows of a run, each with its constants."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths, WindowRow)
        self._constants: JobConstants | None = None
        self._decode = self._row

    def __iter__(self) -> Iterator[WindowRow]:
        self._constants = None
        return super().__iter__()

    def _row(self, text: bytes) -> WindowRow:
        line = _decode_line(text)
        self._constants = constants = line.constants or self._constants
        run, job = (totals_of(keys, constants) if keys is not None else None for keys in (line.run, line.job))
        return WindowRow(
            **{name: getattr(line, name) for name in WindowReport.__struct_fields__},
            last=totals_of(line.last, constants),
            run=run,
            job=job,
        )


_decode_line = msgspec.json.Decoder(WindowLine).decode


def read_windows(folder: Path) -> WindowRows:
    """Read the windows of a run, oldest first."""
    return WindowRows(segments(folder, "windows"))


def read_ranks(folder: Path) -> JsonLines[RankRow]:
    """Read the rank reports of a run, oldest first."""
    return JsonLines(segments(folder, "ranks"), RankRow)


def read_events(folder: Path) -> JsonLines[Event]:
    """Read the events of a run, oldest first."""
    return JsonLines([path for path in [folder / "events.jsonl"] if path.exists()], Event)
