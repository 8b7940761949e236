"""A real Prometheus with a folder of its own, and certificates and tokens for the pages that it reads."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jobs
import pytest
import redfish_service
from sink_examples import make_run

from effllm.config.settings import Config
from effllm.records.identity import Identity
from effllm.sinks import open_sink

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TOKEN = "0123456789abcdef0123456789abcdef"
MINE = Identity(run_id="mine", user="alice")

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="prometheus is not installed (apt)"
)


class PrometheusServer:
    """Runs with a file of configs/ whose texts in ``changes`` are replaced, and scrapes five times a second."""

    def __init__(self, folder: Path, config: str = "prometheus.yml", **changes: str) -> None:
        self.port = jobs.unused_port()
        text = (CONFIGS / config).read_text()
        for old, new in {"10s": "200ms", "15s": "200ms", **changes}.items():
            assert old in text or old.endswith("s"), old
            text = text.replace(old, new)
        folder.mkdir()
        (folder / config).write_text(text)
        shutil.copy(CONFIGS / "prometheus_rules.yml", folder)
        command = [
            "prometheus", f"--config.file={folder / config}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]  # fmt: skip
        with (folder / "log.txt").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(20)

    def get(self, path: str, **parameters: str) -> dict:
        """Return the data of an answer of the HTTP API; raise with Prometheus's own text if the query is wrong."""
        address = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # Prometheus is starting
                return {}
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        except OSError:
            return {}

    def ask(self, query: str) -> list[dict]:
        """Return the samples of a query now; empty while Prometheus does not answer."""
        return self.get("query", query=query).get("result", [])

    def targets(self) -> dict[str, str]:
        """Return the health of each discovered target by its label instance."""
        active = self.get("targets").get("activeTargets", [])
        return {one["labels"]["instance"]: one["health"] for one in active if one["scrapePool"] == "efficientllm"}


class PageServer:
    """A server that sends a list of pages, one per request, and repeats the last page; a number is a status code."""

    def __init__(self, *answers: str | int) -> None:
        left = list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = left.pop(0) if len(left) > 1 else left[0]
                self.send_response(answer if isinstance(answer, int) else 200)
                if answer == 302:
                    self.send_header("Location", "http://elsewhere/")
                self.end_headers()
                if isinstance(answer, str):
                    self.wfile.write(answer.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def pages(folder: Path) -> Iterator[Callable[..., Any]]:
    """Yield a function that opens the sink prometheus with options, writes a report, and returns the sink."""
    with ExitStack() as opened:

        def serve(report: Any = None, *, identity: Identity = MINE, log: Any = lambda _: None, **options: Any) -> Any:
            text = ":".join(["prometheus", *(f"{name}={value}" for name, value in {"port": 0, **options}.items())])
            run = make_run(folder, config=Config(sinks=(text,)), identity=lambda: identity, log=log)
            sink = opened.enter_context(closing(open_sink("prometheus", run)))
            if report is not None:
                sink.write(report)
            return sink

        yield serve


def private_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def protected(folder: Path, address: str = "127.0.0.1") -> dict[str, Path]:
    """Return the options of a page with TLS and a token."""
    if redfish_service.certificate(folder, address) is None:
        pytest.skip("no openssl: no certificate can be made")
    token = private_file(folder / "token", f"{TOKEN}\n")
    return {"tls_cert": folder / "certificate.pem", "tls_key": folder / "key.pem", "token_file": token}
