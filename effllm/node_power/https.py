"""A service that is asked again and again over one HTTPS connection: bounded in time and size, and never elsewhere.

`http.client` and not `urllib.request`: that one takes proxies from the environment and follows redirects, and
either may carry a password to a stranger; and its time limit is one per packet, so that a service which sends a
byte every four seconds holds it for ever.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import io
import ipaddress
import json
import socket
import ssl
import time
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from effllm.node_power.credentials import SESSION, Credentials

LIMIT_S = 5.0
MOST_BYTES = 1024 * 1024
MOST_REDIRECTS = 3
#: After a refusal the user is not tried again for so long: services lock accounts.
LOCKED_OUT_S = 600.0
_GOODBYE_S = 1.0
_SESSIONS = "/redfish/v1/SessionService/Sessions"
_REDIRECTS = (301, 302, 307, 308)


class NotFound(OSError):
    """The service has no such resource."""


class Refused(OSError):
    """The service does not let this user."""


class Address(NamedTuple):
    """Where a service is."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Return the parts of a URL.

        Raises:
            ValueError: it is none, or would carry a password, or in the clear over a network.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise ValueError("the URL of the Redfish service cannot be understood") from None
        if "@" in parts.netloc:
            raise ValueError("the URL of the Redfish service holds a user: that belongs into the credentials file")
        if parts.scheme not in ("https", "http") or not host or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is no URL of a Redfish service, such as https://bmc.example/redfish/v1")
        if parts.scheme == "http" and not is_loopback(host):
            raise ValueError(
                f"{url!r} would send the password in the clear: plain http is for loopback addresses alone"
            )
        return cls(parts.scheme, host, port or (443 if parts.scheme == "https" else 80), parts.path)


def is_loopback(host: str) -> bool:
    """Whether a host is this one, by its name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


class _Timed:
    """What `http.client` asks of a socket, with one deadline for all of an exchange."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.until_s = 0.0

    def sendall(self, data: bytes) -> None:
        self._set_limit()
        self._sock.sendall(data)

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(_Reading(self))

    def receive_into(self, buffer: memoryview) -> int:
        self._set_limit()
        return self._sock.recv_into(buffer)

    def _set_limit(self) -> None:
        rest_s = self.until_s - time.monotonic()
        if rest_s <= 0:
            raise TimeoutError
        self._sock.settimeout(rest_s)

    def close(self) -> None:
        """Nothing: `http.client` closes a connection before it reads the last answer; `Service` closes it after."""

    def hang_up(self) -> None:
        self._sock.close()


class _Reading(io.RawIOBase):
    """The receiving side for one answer: closing it leaves the connection open."""

    def __init__(self, timed: _Timed) -> None:
        self._timed = timed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return self._timed.receive_into(buffer)


class Service:
    """One service, asked by one user; nothing is sent before the first question.

    Args:
        address: where it is.
        credentials: who asks; ``None`` asks as nobody.
        limit_s: how long one question may take, connection and redirects included; only the resolution of
            the host's name is the system's.
    """

    def __init__(self, address: Address, credentials: Credentials | None, limit_s: float = LIMIT_S) -> None:
        self._address = address
        self._credentials = credentials
        self._limit_s = limit_s
        self._tls = _tls(credentials) if address.scheme == "https" else None
        self._connection: http.client.HTTPConnection | None = None
        self._timed: _Timed | None = None
        self._token = self._session = ""
        self._locked_out_until_s = 0.0

    def get(self, path: str) -> bytes:
        """Return a resource.

        Raises:
            NotFound: there is none.
            Refused: this user may not.
            OSError, ValueError: no answer in time, or none that can be used.
        """
        if not path.startswith("/") or path.startswith("//"):
            raise ValueError(f"the service points to {path[:100]!r}, which is no path on it")
        if time.monotonic() < self._locked_out_until_s:
            raise Refused("the service refused the user (401), who is not tried again for ten minutes")
        until_s = time.monotonic() + self._limit_s
        try:
            for _ in range(MOST_REDIRECTS + 1):
                answer = self._ask_as_user(path, until_s)
                if answer.status not in _REDIRECTS:
                    return self._body(path, answer)
                path = self._redirected(path, answer.headers.get("Location", ""))
        except TimeoutError:
            self._hang_up()
            raise TimeoutError(f"no answer within {self._limit_s:g} s") from None
        except ssl.SSLCertVerificationError as error:
            self._hang_up()
            raise OSError(
                f"the service's certificate is not believed ({error.verify_message}): name ca_file or fingerprint in "
                "the credentials file"
            ) from None
        except http.client.HTTPException as error:
            self._hang_up()
            raise OSError(f"no HTTP answer: {type(error).__name__}") from None
        except OSError:
            self._hang_up()
            raise
        raise OSError(f"more than {MOST_REDIRECTS} redirects")

    def close(self) -> None:
        """End the session, if there is one, and the connection; may be called twice."""
        if self._session:
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                self._exchange("DELETE", self._session, self._authorization(), b"", time.monotonic() + _GOODBYE_S)
            self._token = self._session = ""
        self._hang_up()

    # --- asking ---

    def _ask_as_user(self, path: str, until_s: float) -> _Answer:
        had_token = bool(self._token)
        answer = self._exchange("GET", path, self._authorization_or_login(until_s), b"", until_s)
        if answer.status == 401 and had_token:  # sessions expire
            self._token = self._session = ""
            answer = self._exchange("GET", path, self._authorization_or_login(until_s), b"", until_s)
        return answer

    def _authorization_or_login(self, until_s: float) -> dict[str, str]:
        credentials = self._credentials
        if credentials is not None and credentials.authentication == SESSION and not self._token:
            question = json.dumps({"UserName": credentials.user, "Password": credentials.password}).encode()
            answer = self._exchange("POST", _SESSIONS, {"Content-Type": "application/json"}, question, until_s)
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
        """Return the body of an answer that is one."""
        if answer.status == 200:
            return answer.body
        if answer.status == 404:
            raise NotFound(f"{path} is not there (404)")
        if answer.status == 401 and self._credentials is None:
            raise Refused("the service asks for a user (401): name a credentials file")
        if answer.status == 401:
            self._locked_out_until_s = time.monotonic() + LOCKED_OUT_S
            raise Refused("the service refuses the user or the password of the credentials file (401)")
        if answer.status == 403:
            raise Refused(f"the user may not read {path} (403): give it the privilege Login (the role ReadOnly)")
        raise OSError(f"{path} answers {answer.status}")

    def _redirected(self, path: str, location: str) -> str:
        """Return the path that a service points to, on itself.

        Raises:
            ValueError: it points elsewhere.
        """
        own = self._address
        origin = f"{own.scheme}://{f'[{own.host}]' if ':' in own.host else own.host}:{own.port}"
        target = Address.parse(urljoin(origin + path, location))
        if target[:3] != own[:3]:
            raise ValueError(f"the service points to another one ({target.host}), which is not followed")
        return target.path

    # --- one exchange ---

    def _exchange(self, method: str, path: str, headers: dict[str, str], body: bytes, until_s: float) -> _Answer:
        was_open = self._connection is not None
        try:
            return self._exchange_once(method, path, headers, body, until_s)
        except ConnectionError:  # a service may end a connection between two questions
            self._hang_up()
            if not was_open:
                raise
            return self._exchange_once(method, path, headers, body, until_s)

    def _exchange_once(self, method: str, path: str, headers: dict[str, str], body: bytes, until_s: float) -> _Answer:
        if self._connection is None or self._timed is None:
            self._connect(until_s)
        assert self._connection is not None and self._timed is not None
        self._timed.until_s = until_s
        fixed = {"Accept": "application/json", "Accept-Encoding": "identity", "OData-Version": "4.0"}
        self._connection.request(method, path, body or None, {**fixed, **headers})
        response = self._connection.getresponse()
        content = response.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES or response.will_close:
            self._hang_up()
        if len(content) > MOST_BYTES:
            raise ValueError(f"{path} is larger than {MOST_BYTES // 1024} KiB, which no power reading is")
        if response.length:  # what is still to come of what was announced
            raise ConnectionAbortedError(f"the answer to {path} breaks off")
        return _Answer(response.status, response.headers, content)

    def _connect(self, until_s: float) -> None:
        rest_s = until_s - time.monotonic()
        if rest_s <= 0:
            raise TimeoutError
        sock = socket.create_connection((self._address.host, self._address.port), rest_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self._address.host)
                self._check_fingerprint(sock)
        except BaseException:
            sock.close()
            raise
        self._timed = _Timed(sock)
        self._connection = http.client.HTTPConnection(self._address.host, self._address.port)
        self._connection.auto_open = 0
        self._connection.sock = self._timed

    def _check_fingerprint(self, sock: ssl.SSLSocket) -> None:
        """Compare the certificate before anything is said.

        Raises:
            OSError: it is another one.
        """
        expected = self._credentials.fingerprint if self._credentials else None
        if expected is not None and hashlib.sha256(sock.getpeercert(binary_form=True) or b"").digest() != expected:
            raise OSError("the service's certificate is not the one whose fingerprint the credentials file holds")

    def _hang_up(self) -> None:
        if self._timed is not None:
            self._timed.hang_up()
        self._connection = self._timed = None


def _tls(credentials: Credentials | None) -> ssl.SSLContext:
    """Return whom to believe; a pinned certificate may say of itself what it likes, and mostly does.

    Raises:
        ValueError: the file of authorities cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=credentials.ca_file if credentials else None)
    except OSError as error:
        raise ValueError(f"ca_file of the credentials file cannot be used: {error.strerror or error}") from error
    if credentials is not None and credentials.fingerprint is not None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
