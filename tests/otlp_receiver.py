"""An OTLP receiver on loopback: decodes each request and keeps its points."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE


class Point(NamedTuple):
    """One point of a metric, with the attributes of its resource."""

    name: str
    instrument: str
    unit: str
    resource: dict[str, Any]
    attributes: dict[str, Any]
    start_ns: int
    time_ns: int
    value: float


class Receiver:
    """Answers with ``status``, after a wait of ``pause_s``."""

    def __init__(self, status: int = 200, pause_s: float = 0.0) -> None:
        receiver, self.status = self, status
        self.requests: list[list[Point]] = []
        self.headers: list[dict[str, str]] = []
        self.calls = 0
        self.closing = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.calls += 1
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                receiver.closing.wait(pause_s)
                if receiver.status == 200:
                    receiver.headers.append(dict(self.headers))
                    receiver.requests.append(list(_points(ExportMetricsServiceRequest.FromString(body))))
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def points(self) -> list[Point]:
        return [point for request in self.requests for point in request]

    def newest(self, name: str) -> dict[tuple[Any, ...], float]:
        """Return the last value of each series of a metric."""
        points = [one for one in self.points if one.name == name]
        return {tuple(sorted((one.resource | one.attributes).items())): one.value for one in points}

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def _points(request: ExportMetricsServiceRequest) -> Any:
    for group in request.resource_metrics:
        resource = _attributes(group.resource.attributes)
        for metric in (metric for scope in group.scope_metrics for metric in scope.metrics):
            kind = metric.WhichOneof("data")
            data = getattr(metric, kind)
            if kind == "sum":
                assert data.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
                kind = "counter" if data.is_monotonic else "updowncounter"
            for one in data.data_points:
                value = getattr(one, one.WhichOneof("value"))
                times = one.start_time_unix_nano, one.time_unix_nano
                yield Point(metric.name, kind, metric.unit, resource, _attributes(one.attributes), *times, value)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
