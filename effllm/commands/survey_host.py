"""The tests of ``effllm check`` apart from devices: Python, settings, run folder, connections."""

from __future__ import annotations

import importlib
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from msgspec import Struct

from effllm import __version__
from effllm.config.settings import Config, secret_path
from effllm.config.switches import PREFIX, is_enabled
from effllm.network import interface, secret
from effllm.trainer.preflight import problems, why_unwritable

ANSWER_WITHIN_S = 5.0

#: MISSING: a run is measured, but without this part.  DIFFERS: a GPU is not as it should be, or not as its peers.
OK, BROKEN, MISSING, DIFFERS = "ok", "broken", "missing", "differs"


class Finding(Struct, frozen=True):
    """The result of one test."""

    name: str
    state: str  # OK, BROKEN, MISSING or DIFFERS
    text: str
    advice: str = ""


def python_findings() -> Iterator[Finding]:
    about = f"{platform.python_version()}, effllm {__version__}"
    try:
        yield Finding("Python", OK, f"{about}, torch {metadata.version('torch')}")
    except metadata.PackageNotFoundError:
        yield Finding("Python", OK, about)
        advice = f"a job with several ranks needs torch or {PREFIX}ENDPOINT, to find the aggregator"
        yield Finding("torch", MISSING, "not in this environment", advice)


def setting_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    lines = problems(environ)
    for line in lines:
        yield Finding("settings", BROKEN, line)
    if not is_enabled(environ):
        text = f"metrics are off: {PREFIX}METRICS_ENABLED={environ[f'{PREFIX}METRICS_ENABLED']}"
        yield Finding("settings", BROKEN, text, f"export {PREFIX}METRICS_ENABLED=true")
    elif not lines:
        yield Finding("settings", OK, "valid")


def sink_findings(config: Config) -> Iterator[Finding]:
    for name in config.sink_options():
        try:
            importlib.import_module(f"effllm.sinks.{name}")
        except ImportError as error:
            advice = f"install the package, or remove {name} from {PREFIX}SINKS"
            yield Finding("sinks", BROKEN, f"{name} cannot be imported: {error}", advice)


def run_folder_finding(config: Config) -> Finding:
    folder = Path(config.run_dir).absolute()
    if reason := why_unwritable(folder):
        return Finding("run folders", BROKEN, reason, f"set {PREFIX}RUN_DIR to a writable folder")
    return Finding("run folders", OK, f"in {folder}")


def aggregator_findings(config: Config) -> Iterator[Finding]:
    if not interface.loopback_address():
        yield Finding("loopback", BROKEN, "the loopback interface is down", "ip link set lo up")
    if not config.endpoint:
        return
    host, _, port = config.endpoint.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_WITHIN_S).close()
        yield Finding("aggregator", OK, f"listens at {config.endpoint}")
    except OSError as error:
        text = f"no connection to {config.endpoint}: {error.strerror or error}"
        yield Finding("aggregator", BROKEN, text, f"start effllm serve, or unset {PREFIX}ENDPOINT")


def security_finding(config: Config) -> Finding:
    path = secret_path(config)
    if config.security == "none":
        text = "none: every process that can connect to the port can read and forge reports"
        return Finding("security", MISSING, text, f"unset {PREFIX}SECURITY")
    which = "curve" if config.security == "curve" else "auto: CURVE"
    try:
        secret.read(path)
    except secret.SecretError as error:
        if not os.path.lexists(path):
            text = f"{which}; the secret {path} does not exist yet; rank 0 will create it"
            advice = "if the hosts have no shared home folder, copy the secret to every host"
            return Finding("security", MISSING, text, advice)
        # Without a usable secret, rank 0 of a job on one host creates a secret in a folder for temporary files.
        state = BROKEN if config.security == "curve" or config.endpoint else MISSING
        return Finding("security", state, f"{which}; {error}", "make the secret usable before a job on several hosts")
    return Finding("security", OK, f"{which}; only you can read the secret {path}")
