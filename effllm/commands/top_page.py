"""Reads the metrics page of a running job for ``effllm top``: values of the whole job, without single ranks."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path

from effllm.analysis.run_folders import UnreadableRun
from effllm.commands.metrics_page import address_of, fetch_text, labels_of, samples_of
from effllm.metrics import METRICS
from effllm.metrics.output_names import base_unit_name
from effllm.records.forecast import FORECAST, Foretold
from effllm.records.job import Coverage, WindowReport
from effllm.records.verdict import Straggler
from effllm.store.own_files import read_private
from effllm.views.text.numbers import count_text
from effllm.views.top.frame import Head, Problem, RunPlace, TopFrame, is_point, problems_of, status_of
from effllm.views.top.ranks import RankStates, rank_table

_PREFIX = "efficientllm_"
MAX_POINTS = 200
MAX_TOKEN_BYTES = 1 << 16
_NOTES = ("a metrics page has no verdict, events, reports of ranks or earlier windows: the run folder has them",)


class PageSource:
    """The newest values of a metrics page; without a token or a certificate, the path of its file is ""."""

    every_s = 2.0
    has_more = False

    def __init__(self, url: str, token_file: str = "", ca_file: str = "") -> None:
        self._url = url if "://" in url else f"http://{url}"
        try:
            scheme = address_of(self._url)[0]
            self._token = read_private(Path(token_file), MAX_TOKEN_BYTES).decode().strip() if token_file else ""
            self._tls = ssl.create_default_context(cafile=ca_file or None) if scheme == "https" else None
        except OSError as error:  # an SSLError is an OSError
            raise UnreadableRun(f"{token_file or ca_file}: {error.strerror or error}") from error
        except ValueError as error:
            raise UnreadableRun(str(error)) from error
        if self._token and scheme != "https" and address_of(self._url)[1] not in ("127.0.0.1", "localhost", "::1"):
            raise UnreadableRun("a token is sent to another host only over https")
        self._samples: Mapping[str, Mapping[str, float]] = {}  # by name and text of the labels
        self._points: list[WindowReport] = []  # since the start of the command

    def refresh(self) -> bool:
        """Read the page; `OSError` if it cannot be read now, `UnreadableRun` if it is not of a job with effllm."""
        samples = samples_of(fetch_text(self._url, self._token, self._tls))
        if f"{_PREFIX}run_info" not in samples:
            raise UnreadableRun(f"{self._url} is not a metrics page of effllm")
        is_new = samples != self._samples
        self._samples = samples
        return is_new

    def refresh_hosts(self) -> bool:
        return False

    def move(self, kind: str, amount: float = 0.0) -> None:
        """Move nothing, because a page has only the newest values."""

    def frame(self, now_s: float) -> TopFrame:
        """Return the values of the page; ``now_s`` is the unix time."""
        window, info = self._window_report(now_s), labels_of(next(iter(self._samples[f"{_PREFIX}run_info"]), ""))
        if is_point(window) and (not self._points or self._points[-1].iteration != window.iteration):
            self._points = [*self._points, window][-MAX_POINTS:]
        states = RankStates(stall="some ranks make no progress" if self._value("stalled") else "")
        age_s = self._value("report_age_seconds")
        is_fresh = bool(self._value("fresh"))
        status = status_of("running", False, states, None)
        head = Head(
            name=info.get("run_id") or self._url,
            user=info.get("user") or None,
            status=status if is_fresh or status == "stalled" or age_s is None else "no_update",
            age_s=age_s,
            elapsed_s=self._value("elapsed_seconds"),
            attempt=window.attempt or None,
            iteration=window.iteration or None,
            forecast=window.forecast,
            simulated=window.simulated,
        )
        return TopFrame(
            head=head,
            place=RunPlace(time_s=None if age_s is None else now_s - age_s),
            coverage=window.coverage if age_s is not None else None,
            values=window.values,
            loss=window.loss,
            problems=list(self._problems(head, states, window.coverage)) if age_s is not None else [],
            points=self._points,
            over="newest window",
            ranks=rank_table(window, (), states, {}, window.coverage.ranks_expected),
            notes=_NOTES,
        )

    def _value(self, name: str) -> float | None:
        """Return the value of a metric without labels; ``None`` if the page does not have it."""
        return next(iter(self._samples.get(_PREFIX + name, {}).values()), None)

    def _whole_number(self, name: str) -> int:
        return int(self._value(name) or 0)

    def _window_report(self, now_s: float) -> WindowReport:
        """Return the newest window, as far as the page has it."""
        forecast = {name: [self._value(f"{name}{end}") for end in ("", "_low", "_high")] for name in FORECAST}
        rank, ratio = self._value("straggler_rank"), self._value("straggler_time_ratio")
        return WindowReport(
            attempt=self._whole_number("attempt"),
            window=0,
            iteration=self._whole_number("iteration"),
            iteration_first=1,
            iteration_last=1,
            time_s=now_s,
            loss=self._value("loss"),
            values=dict(self._values_by_tag()),
            coverage=Coverage(
                ranks_expected=self._whole_number("ranks_expected"),
                ranks_reporting=self._whole_number("ranks_reporting"),
                gpus_expected=self._whole_number("gpus_expected"),
                gpus_measured=self._whole_number("gpus_measured"),
                reports_lost=self._whole_number("reports_lost_total"),
                reports_late=self._whole_number("reports_late_total"),
            ),
            straggler=None if rank is None or ratio is None else Straggler(int(rank), ratio, 1.0),  # times in medians
            forecast={name: Foretold(value, *ends) for name, (value, *ends) in forecast.items() if value is not None},
            simulated=bool(self._value("simulated")),
        )

    def _values_by_tag(self) -> Iterator[tuple[str, float]]:
        """Yield the metrics with the tags and units of windows-*.jsonl."""
        for entry in (metric for metric in METRICS.values() if metric.in_windows):
            name, factor = base_unit_name(entry)
            for labels, value in self._samples.get(_PREFIX + name, {}).items():
                yield entry.tag(labels_of(labels).get("over", entry.bases[0])), value / factor

    def _problems(self, head: Head, states: RankStates, coverage: Coverage) -> Iterator[Problem]:
        yield from problems_of(head, states, None, ())
        if head.status == "running" and (missing := coverage.ranks_expected - coverage.ranks_reporting) > 0:
            yield Problem("missing", f"no report of {missing:,} of {coverage.ranks_expected:,} ranks in this window")
        if num_named := int(dict(self._values_by_tag()).get("straggler/named_ranks", 0)):
            yield Problem("straggler", count_text(num_named, "named straggler"))
