"""A real Prometheus with a folder of its own, and certificates and tokens for the pages that it reads."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import jobs
import pytest

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TOKEN = "0123456789abcdef0123456789abcdef"

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


def private_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path
