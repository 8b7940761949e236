"""Requests to one HTTPS service over one connection, with limits of time and size; redirects to other hosts fail.

urllib3's connection is used without pools: a pool follows redirects, retries, and has no timeout for all attempts
together.
A socket's timeout applies to each packet: a service that sends a byte every four seconds would block a reader
forever.  So a timer closes the connection at the deadline.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, ReadTimeoutError, SSLError
from urllib3.response import HTTPResponse

from effllm.devices.node.credentials import SESSION, Credentials

LIMIT_S = 5.0
MAX_BYTES = 1024 * 1024
MAX_REDIRECTS = 3
#: Pause after a rejected login: services lock accounts after several attempts.
LOCKED_OUT_S = 600.0
_LOGOUT_S = 1.0
_SESSIONS = "/redfish/v1/SessionService/Sessions"
_REDIRECTS = (301, 302, 307, 308)


class NotFound(OSError):
    """The service has no such resource."""


class Address(NamedTuple):
    """The address of a service."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Return the parts of a URL.

        Raises:
            ValueError: the text is not a URL or contains a user, or the password would not be encrypted on a network.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise ValueError("the URL of the Redfish service is not valid") from None
        if "@" in parts.netloc:
            raise ValueError("the URL of the Redfish service contains a user: write the user into the credentials file")
        if parts.scheme not in ("https", "http") or not host or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is no URL of a Redfish service, such as https://bmc.example/redfish/v1")
        if parts.scheme == "http" and not is_own(host, link_local=False):
            raise ValueError(
                f"{url!r} would send the password in the clear: plain http is allowed only for loopback addresses"
            )
        return cls(parts.scheme, host, port or (443 if parts.scheme == "https" else 80), parts.path)


def is_own(host: str, link_local: bool = True) -> bool:
    """Whether an address means a different machine on every node: loopback, or link-local if ``link_local`` is set."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or (link_local and address.is_link_local)


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class Service:
    """One service and one user; the connection is opened by the first request.

    Args:
        address: the address of the service.
        credentials: user and password; ``None`` for requests without a user.
        limit_s: timeout of one request, including the connection and redirects; for the resolution of the host's
            name the system's timeout applies.
    """

    def __init__(self, address: Address, credentials: Credentials | None, limit_s: float = LIMIT_S) -> None:
        self._address = address
        self._credentials = credentials
        self._limit_s = limit_s
        self._connection = _connection(address, credentials)
        self._token = self._session = ""
        self._locked_out_until_s = 0.0

    def get(self, path: str) -> bytes:
        """Return a resource.

        Raises:
            NotFound: the resource does not exist.
            PermissionError: the user may not read the resource.
            OSError, ValueError: the answer is missing at the deadline, or is not usable.
        """
        if not path.startswith("/") or path.startswith("//"):
            raise ValueError(f"the service returned the link {path[:100]!r}, which is not a path")
        if time.monotonic() < self._locked_out_until_s:
            raise PermissionError("the service rejected the user (401): the next login is in ten minutes")
        until_s = time.monotonic() + self._limit_s
        try:
            for _ in range(MAX_REDIRECTS + 1):
                answer = self._get_as_user(path, until_s)
                if answer.status not in _REDIRECTS:
                    return self._body(path, answer)
                path = self._redirected(path, answer.headers.get("Location", ""))
        except NewConnectionError as error:
            raise OSError(str(error.__cause__)) from None
        except (TimeoutError, ConnectTimeoutError, ReadTimeoutError):
            raise TimeoutError(f"no answer within {self._limit_s:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise OSError(
                f"the service's certificate is not trusted ({error.verify_message}): set ca_file or fingerprint in "
                "the credentials file"
            ) from None
        except SSLError:
            raise OSError("the service's certificate does not have the fingerprint of the credentials file") from None
        except HTTPError:
            raise OSError(f"the answer to {path} is incomplete") from None
        except HTTPException as error:
            raise OSError(f"no HTTP answer: {type(error).__name__}") from None
        raise OSError(f"more than {MAX_REDIRECTS} redirects")

    def close(self) -> None:
        """End the session and the connection; may be called twice."""
        if self._session:
            with contextlib.suppress(OSError, ValueError, HTTPException, HTTPError):
                self._exchange("DELETE", self._session, self._authorization(), b"", time.monotonic() + _LOGOUT_S)
            self._token = self._session = ""
        self._connection.close()

    # --- requests ---

    def _get_as_user(self, path: str, until_s: float) -> _Answer:
        had_token = bool(self._token)
        answer = self._exchange("GET", path, self._authorization_or_login(until_s), b"", until_s)
        if answer.status == 401 and had_token:  # sessions expire
            self._token = self._session = ""
            answer = self._exchange("GET", path, self._authorization_or_login(until_s), b"", until_s)
        return answer

    def _authorization_or_login(self, until_s: float) -> dict[str, str]:
        credentials = self._credentials
        if credentials is not None and credentials.authentication == SESSION and not self._token:
            login = json.dumps({"UserName": credentials.user, "Password": credentials.password}).encode()
            answer = self._exchange("POST", _SESSIONS, {"Content-Type": "application/json"}, login, until_s)
            if answer.status not in (200, 201):
                self._body(_SESSIONS, answer)
            self._token = answer.headers.get("X-Auth-Token", "")
            if not self._token:
                raise ValueError("the service opens no session: set authentication = basic in the credentials file")
            with contextlib.suppress(ValueError):
                self._session = self._redirected(_SESSIONS, answer.headers.get("Location", ""))
        return self._authorization()

    def _authorization(self) -> dict[str, str]:
        if self._credentials is None:
            return {}
        if self._token:
            return {"X-Auth-Token": self._token}
        pair = f"{self._credentials.user}:{self._credentials.password}".encode()
        return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}

    def _body(self, path: str, answer: _Answer) -> bytes:
        if answer.status == 200:
            return answer.body
        if answer.status == 404:
            raise NotFound(f"{path} does not exist (404)")
        if answer.status == 401 and self._credentials is None:
            raise PermissionError("the service requires a user (401): set NODE_POWER_CREDENTIALS to a file")
        if answer.status == 401:
            self._locked_out_until_s = time.monotonic() + LOCKED_OUT_S
            raise PermissionError("the service rejects the user or the password of the credentials file (401)")
        if answer.status == 403:
            raise PermissionError(
                f"the user may not read {path} (403): the privilege Login (the role ReadOnly) is missing"
            )
        raise OSError(f"the answer to {path} has the status {answer.status}")

    def _redirected(self, path: str, location: str) -> str:
        """Return the path of a redirect within the service.

        Raises:
            ValueError: the redirect leads to another service.
        """
        own = self._address
        origin = f"{own.scheme}://{f'[{own.host}]' if ':' in own.host else own.host}:{own.port}"
        target = Address.parse(urljoin(origin + path, location))
        if target[:3] != own[:3]:
            raise ValueError(f"the service redirects to another service ({target.host}); this is not allowed")
        return target.path

    # --- one exchange ---

    def _exchange(self, method: str, path: str, headers: dict[str, str], body: bytes, until_s: float) -> _Answer:
        was_open = not self._connection.is_closed
        try:
            return self._exchange_once(method, path, headers, body, until_s)
        except ConnectionError:  # a service may end a connection between two requests
            if not was_open:
                raise
            return self._exchange_once(method, path, headers, body, until_s)

    def _exchange_once(self, method: str, path: str, headers: dict[str, str], body: bytes, until_s: float) -> _Answer:
        fixed = {"Accept": "application/json", "Accept-Encoding": "identity", "OData-Version": "4.0"}
        connection = self._connection
        try:
            connection.timeout = max(until_s - time.monotonic(), 0.001)  # 0 would mean a non-blocking socket
            if connection.is_closed:
                connection.connect()
            with _ended_at(until_s, connection.sock):
                connection.request(method, path, body or None, {**fixed, **headers}, preload_content=False)
                response = connection.getresponse()
                content = _content(path, response)
        except BaseException:
            connection.close()
            raise
        return _Answer(response.status, response.headers, content)


def _content(path: str, response: HTTPResponse) -> bytes:
    content = response.read(MAX_BYTES + 1, decode_content=False)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES // 1024} KiB, the limit for a resource")
    response.read(1)  # raises if the body is shorter than announced
    return content


@contextlib.contextmanager
def _ended_at(until_s: float, sock: socket.socket) -> Iterator[None]:
    """Shut a connection down at a deadline, also during a read.

    Raises:
        TimeoutError: the deadline has passed.
    """
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        with contextlib.suppress(OSError):
            # This call bypasses the TLS object, because the reading thread uses it.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    timer = threading.Timer(until_s - time.monotonic(), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if is_over.is_set():
            raise TimeoutError


def _connection(address: Address, credentials: Credentials | None) -> HTTPConnection:
    """Return a connection that is not open.

    Raises:
        ValueError: the file with the certificate authorities is not usable.
    """
    if address.scheme == "http":
        return HTTPConnection(address.host, address.port)
    try:
        tls = ssl.create_default_context(cafile=credentials.ca_file if credentials else None)
    except OSError as error:
        raise ValueError(f"ca_file of the credentials file cannot be used: {error.strerror or error}") from error
    pinned = credentials.fingerprint if credentials else None
    if pinned is not None:  # a pinned certificate often has a wrong name and issuer, so they are not checked
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return HTTPSConnection(
        address.host, address.port, ssl_context=tls, assert_fingerprint=pinned.hex() if pinned else None
    )
