"""Prometheus: a page with the newest values of the job and its totals, by default only on loopback.

A value that is no longer measured is not served, because alerts must not use old values.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app

from effllm.config.setting_values import FOLDER, INTERFACE, SECRET_FILE, ValueType, whole
from effllm.records.job import ClusterReport
from effllm.records.rank import Event
from effllm.sinks import Option, RunInfo
from effllm.sinks.prometheus.page import MetricsPage
from effllm.sinks.prometheus.target_file import TargetFile, instance_of
from effllm.sinks.prometheus.web_server import Access, listen, read_access
from effllm.store.own_files import user_name

OPTIONS = {
    "port": Option(
        "9788", whole(0, 65535, "a port"), "Port of the metrics page. 0: any free port, as if the port is in use."
    ),
    "interface": Option(
        "127.0.0.1", INTERFACE, "Interface of the page. The page leaves loopback only with TLS and a token."
    ),
    "tls_cert": Option("", ValueType(str, "a PEM file"), "Certificate of the page, with its chain."),
    "tls_key": Option("", SECRET_FILE, "Private key of the certificate."),
    "token_file": Option("", SECRET_FILE, "File with the token that each request must have."),
    "discovery_dir": Option(
        "", FOLDER, "Folder for Prometheus's file_sd_configs, in which the job writes a file with its address."
    ),
}

POLL_S = 0.1


def open_sink(run: RunInfo) -> Prometheus:
    """Start to serve the metrics of this run.

    Raises:
        SinkUnavailable: the page cannot be served with these options.
    """
    access = read_access(run.options)
    page = MetricsPage(run.identity, time.monotonic, run.config.runbook_url)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(page)
    port = run.options["port"]
    server = listen(access, port, make_wsgi_app(registry))
    address = f"{access.scheme}://{access.target(server.server_port)}/metrics"
    if server.server_port != port:
        in_use = f"port {port} is in use: " if port else ""
        run.log(f"{in_use}metrics for Prometheus are at {address}")
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="sink-prometheus-http", daemon=True)
    thread.start()
    return Prometheus(page, server, thread, _announce(run, access, server.server_port))


def _announce(run: RunInfo, access: Access, port: int) -> TargetFile | None:
    """Write the file of the job in the discovery folder; without the file the page is served all the same."""
    if not (folder := run.options["discovery_dir"]):
        return None
    instance = instance_of(user_name(), run.identity().run_id or "", run.folder)
    try:
        return TargetFile(Path(folder), instance, access.target(port), {"__scheme__": access.scheme})
    except OSError as error:
        run.log(
            f"Prometheus cannot discover this job: prometheus:discovery_dir={folder}: {error.strerror or error}; "
            f"metrics are at {access.scheme}://{access.target(port)}/metrics"
        )
        return None


class Prometheus:
    """Serves the newest report."""

    def __init__(self, page: MetricsPage, server: Any, thread: threading.Thread, target: TargetFile | None) -> None:
        self._page = page
        self._server = server
        self._thread = thread
        self._target = target
        self.port: int = server.server_port

    def write(self, report: ClusterReport) -> None:
        self._page.take(report)

    def event(self, event: Event) -> None:
        """Count an event, with the number of events in its line."""
        self._page.count(event.kind, event.count)

    def close(self) -> None:
        """Stop the server. Prometheus then marks the values as stale."""
        if self._target is not None:
            self._target.close()  # first, so that the end of a job is not an unreachable target
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(1.0)
