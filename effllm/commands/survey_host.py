"""The tests of ``effllm check`` apart from devices: Python, settings, run folder, connections, shared memory."""

from __future__ import annotations

import importlib
import os
import platform
import socket
import statistics
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import zmq
from msgspec import Struct

from effllm import __version__
from effllm.config.settings import Config, secret_path
from effllm.config.switches import PREFIX, is_enabled
from effllm.network import interface, secret
from effllm.network.transport import AgentLink, FrameError, ServerSocket, decode_from_agent, make_context
from effllm.records.ring import RingWriter, ring_bytes
from effllm.records.shared_memory import RingError, make_memory
from effllm.records.wire import Heartbeat
from effllm.trainer.preflight import problems, why_unwritable
from effllm.trainer.recorder import Recorder

NUM_ITERATIONS = 2000
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


def try_loopback() -> Finding:
    """Send one message over an agent's link, and receive it with an aggregator's socket."""
    if not (address := interface.loopback_address()):
        return Finding("ZeroMQ", BROKEN, "the loopback interface is down", "ip link set lo up")
    context = make_context()
    server = ServerSocket(context)
    link: AgentLink | None = None
    began_s = time.monotonic()
    advice = "check with ip link that loopback is up, and that it is not filtered"
    try:
        link = AgentLink(context, server.listen(interface.endpoint(address, 0)))
        link.connect()
        sent = Heartbeat("check", 0, 0, "check", 0.0)
        arrived = None
        while arrived is None and time.monotonic() - began_s < ANSWER_WITHIN_S:
            link.send(sent)
            server.socket.poll(20)
            arrived = server.receive()
        if arrived is None or decode_from_agent(arrived[1]) != sent:
            return Finding("ZeroMQ", BROKEN, f"no message over {address} in {ANSWER_WITHIN_S:g} s", advice)
    except (zmq.ZMQError, FrameError) as error:
        return Finding("ZeroMQ", BROKEN, f"loopback fails: {error}", advice)
    finally:
        if link:
            link.close()
        server.close()
        context.destroy(linger=0)
    return Finding("ZeroMQ", OK, f"{zmq.zmq_version()}, over loopback in {1e3 * (time.monotonic() - began_s):.0f} ms")


def aggregator_findings(config: Config) -> Iterator[Finding]:
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
            advice = "if the hosts have no shared home folder, copy the secret to every host"
            return Finding(
                "security", MISSING, f"{which}; the secret {path} does not exist yet; rank 0 will create it", advice
            )
            # Without a usable secret, rank 0 of a job on one host creates a secret in a folder for temporary files.
        state = BROKEN if config.security == "curve" or config.endpoint else MISSING
        return Finding("security", state, f"{which}; {error}", "make the secret usable before a job on several hosts")
    return Finding("security", OK, f"{which}; only you can read the secret {path}")


def record_in_shared_memory(config: Config) -> tuple[float | None, Finding]:
    """Create a trainer's ring, record iterations in it, and return the time per iteration in us."""
    size = ring_bytes(config.history_size)
    try:
        os.close(make_memory("effllm-check", size))
        writer = RingWriter(config.history_size)
    except RingError as error:
        advice = f"free memory, or lower {PREFIX}HISTORY_SIZE={config.history_size}"
        return None, Finding("shared memory", BROKEN, str(error), advice)
    recorder = Recorder(writer, NUM_ITERATIONS + 1)
    durations_s = []
    for _ in range(NUM_ITERATIONS):
        began_s = time.perf_counter()
        recorder.start()
        recorder.end(1, 1)
        durations_s.append(time.perf_counter() - began_s)
    recorder.disable()
    writer.close()
    return 1e6 * statistics.median(durations_s), Finding("shared memory", OK, f"{size / 1024:.0f} KiB for the ring")
