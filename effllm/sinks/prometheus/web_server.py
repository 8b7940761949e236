"""The web server of the metrics page: one address, TLS, and a token that each request must have."""

from __future__ import annotations

import contextlib
import errno
import hmac
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from effllm.network import interface
from effllm.sinks import SinkUnavailable
from effllm.store import own_files

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

MAX_AT_ONCE, MAX_PER_ADDRESS = 16, 8  # concurrent connections, of all addresses and of one
DEADLINE_S = 10.0  # from the connection to the last byte of the answer: Prometheus's default scrape_timeout
MIN_TOKEN_LETTERS, MAX_TOKEN_LETTERS = 16, 1000
MAX_FILE_BYTES = 1 << 16


class Access(NamedTuple):
    """Who can read the page: its address, and its protection."""

    address: str
    tls: ssl.SSLContext | None
    token: bytes  # empty: no request needs a token

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    def target(self, port: int) -> str:
        """Return address and port as in a target of Prometheus; an IPv6 address is in brackets."""
        return f"[{self.address}]:{port}" if ":" in self.address else f"{self.address}:{port}"


def read_access(options: Mapping[str, Any]) -> Access:
    """Return the access that the options of the sink set.

    Raises:
        SinkUnavailable: unknown interface, unusable file, or an address of the network without TLS and token.
    """
    name, cert, key, token_file = (options[option] for option in ("interface", "tls_cert", "tls_key", "token_file"))
    address = interface.address_of(name)
    if not address or interface.is_wildcard(address) or not interface.is_on_this_host(address):
        raise SinkUnavailable(f"prometheus:interface={name} is neither an interface nor an address of this host")
    if bool(cert) != bool(key):
        raise SinkUnavailable("TLS needs two files: set prometheus:tls_cert=FILE and prometheus:tls_key=FILE")
    if not interface.is_loopback(address) and not (cert and token_file):
        raise SinkUnavailable(
            f"on {address} the page needs TLS and a token: set the options tls_cert, tls_key and token_file, or leave "
            "out the option interface"
        )
    return Access(address, _tls_context(cert, key) if cert else None, _read_token(token_file) if token_file else b"")


def _read_token(path: str) -> bytes:
    token = _read_private(path).strip()
    if not re.fullmatch(rb"[!-~]{%d,%d}" % (MIN_TOKEN_LETTERS, MAX_TOKEN_LETTERS), token):
        raise SinkUnavailable(
            f"prometheus:token_file={path} must have one line of {MIN_TOKEN_LETTERS} to {MAX_TOKEN_LETTERS} ASCII "
            "characters without spaces, such as the output of: openssl rand -hex 32"
        )
    return token


def _tls_context(cert: str, key: str) -> ssl.SSLContext:
    _read_private(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password="")  # without a password, ssl asks for one on the terminal
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise SinkUnavailable(f"the certificate {cert} with the key {key} cannot be used: {error}") from error
    return context


def _read_private(path: str) -> bytes:
    try:
        return own_files.read_private(Path(path), MAX_FILE_BYTES)
    except OSError as error:
        raise SinkUnavailable(f"{path}: {error.strerror}" if error.strerror else str(error)) from error


def _with_token(token: bytes, page: Application) -> Application:
    """Return an application that answers with the page, or with 401 and nothing else to a request without the token.

    Its answers do not contain the version of Python.
    """

    def served(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start_response(status, [*headers, ("Server", _Handler.server_version)], *rest)

        scheme, _, given = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        # Compared in a constant time. WSGI decodes headers as Latin-1.
        is_bearer = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), token)
        if is_bearer or not token:
            return page(environ, start)
        body = b"401 Unauthorized\n"
        headers = [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain"), ("Content-Length", str(len(body)))]
        start("401 Unauthorized", headers)
        return [body]

    return served


class _Handler(WSGIRequestHandler):
    timeout = DEADLINE_S
    server_version, sys_version = "effllm", ""

    def version_string(self) -> str:
        return self.server_version

    def get_environ(self) -> dict[str, Any]:
        """Return the request, which is now complete, so that other connections yield to a new one first."""
        connection = self.server.connections.get(self.request)  # type: ignore[attr-defined]
        if connection is not None:  # else it was closed for another
            connection.is_complete = True
        return super().get_environ()

    def log_message(self, *_: Any) -> None:
        """Log nothing, because stderr belongs to the job."""


@dataclass(slots=True)
class _Connection:
    address: str
    since_s: float  # monotonic time of its start
    is_complete: bool = False  # the whole request was read


class _Server(ThreadingMixIn, WSGIServer):
    """Starts a thread for each request, with a limit, because every user of this host can connect.

    Slow connections cannot block the page: the oldest one yields to a new connection, and each ends at its deadline.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, access: Access, port: int) -> None:
        self.connections: dict[Any, _Connection] = {}  # by socket, the oldest first
        if ":" in access.address:
            self.address_family = socket.AF_INET6
        super().__init__((access.address, port), _Handler)
        if access.tls is not None:
            # The handshake is done by the first read, in the thread of the request: a silent client delays no other.
            self.socket = access.tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer also asks the name service for the host's name, which may take long
        self.server_name, self.server_port = str(self.server_address[0]), self.socket.getsockname()[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        address = client_address[0]
        current = self.connections.copy()  # threads remove theirs
        same_address = {key: connection for key, connection in current.items() if connection.address == address}
        if len(same_address) >= MAX_PER_ADDRESS:
            self._close_oldest(same_address)
        elif len(current) >= MAX_AT_ONCE:
            self._close_oldest(current)
        self.connections[request] = _Connection(address, time.monotonic())
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.pop(request, None)

    def service_actions(self) -> None:
        """Close connections at their deadline, because a timeout of a socket begins again with each byte."""
        super().service_actions()
        for request, connection in self.connections.copy().items():
            if time.monotonic() - connection.since_s > DEADLINE_S:
                self._close(request)

    def _close_oldest(self, connections: dict[Any, _Connection]) -> None:
        """Close the oldest connection without a complete request, or else the oldest one."""
        self._close(min(connections, key=lambda each: (connections[each].is_complete, connections[each].since_s)))

    def _close(self, request: Any) -> None:
        self.connections.pop(request, None)
        with contextlib.suppress(OSError):
            socket.socket.shutdown(request, socket.SHUT_RDWR)  # not of the TLS object, which its thread uses

    def handle_error(self, *_: Any) -> None:
        """Log nothing about interrupted connections."""


def listen(access: Access, port: int, page: Application) -> _Server:
    """Return a server of the page on this port, or on any free port if the port is in use.

    Raises:
        SinkUnavailable: the server cannot listen on the address.
    """
    try:
        try:
            server = _Server(access, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            server = _Server(access, 0)
    except OSError as error:
        raise SinkUnavailable(
            f"the sink cannot listen on port {port} of {access.address}: {error.strerror or error}; "
            "set another port with prometheus:port=9789 in EFFICIENTLLM_SINKS, or 0 for any free port"
        ) from error
    server.set_app(_with_token(access.token, page))
    return server
