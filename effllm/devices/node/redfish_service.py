"""Requests to one Redfish service over HTTPS: with the user of a private file, and with limits of time and size."""

from __future__ import annotations

import base64
import ipaddress
import re
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec
import urllib3
from urllib3.exceptions import HTTPError, NewConnectionError, SSLError
from urllib3.exceptions import TimeoutError as HTTPTimeout

from effllm.records.plain_text import one_line
from effllm.store import own_files

LIMIT_S = 5.0  # timeout of one request
MAX_BYTES = 1024 * 1024  # of an answer
#: Pause after a rejected password: controllers lock accounts after several attempts.
LOCKED_OUT_S = 600.0

Document = dict[str, Any]


@dataclass(frozen=True)
class Credentials:
    """The content of a credentials file."""

    user: str
    password: str = field(repr=False)
    ca_file: str | None = None  # certificate authorities; None: the system's authorities
    fingerprint: str | None = None  # SHA-256 of the only accepted certificate; name and issuer are ignored


def read_credentials(path: Path) -> Credentials:
    """Read lines of the form ``key = value``; blank lines and lines that begin with ``#`` are ignored.

    Raises:
        ValueError: other users may read the file, or a key is wrong or missing; the message has no content of the file.
    """
    try:
        text = own_files.read_private(path, 16 * 1024).decode()
    except own_files.NotPrivateError as error:
        raise ValueError(str(error)) from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    keys = ("user", "password", "ca_file", "fingerprint")
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals or key not in keys or key in values:
            raise ValueError(f"{path}: line {number} must be 'key = value', each key once; keys: {', '.join(keys)}")
        values[key] = value
    if missing := [key for key in ("user", "password") if not values.get(key)]:
        raise ValueError(f"{path} has no {' and no '.join(missing)}")
    # OpenSSL prints "sha256 Fingerprint=8C:4E:..."
    digits = values.pop("fingerprint", "").lower().rpartition("=")[2].removeprefix("sha256:").replace(":", "")
    if digits and not re.fullmatch("[0-9a-f]{64}", digits):
        raise ValueError(f"{path}: fingerprint must be the SHA-256 of the certificate, 64 hexadecimal digits")
    return Credentials(**values, fingerprint=digits or None)


def parse_url(url: str) -> SplitResult:
    """Return the parts of the URL of a service.

    Raises:
        ValueError: the text is no such URL or contains a user, or the password would not be encrypted on a network.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError("the URL of the Redfish service is not valid") from None
    if "@" in parts.netloc:
        raise ValueError("the URL of the Redfish service contains a user: write the user into the credentials file")
    if parts.scheme not in ("https", "http") or not host or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no URL of a Redfish service, such as https://bmc.example/redfish/v1")
    if parts.scheme == "http" and not is_own(host, link_local=False):
        raise ValueError(f"{url!r} would send the password in the clear: use https; http is for loopback addresses")
    return parts


def is_own(host: str, link_local: bool = True) -> bool:
    """Whether an address means a different machine on every node: loopback, or link-local if ``link_local`` is set."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or (link_local and address.is_link_local)


class Service:
    """Requests to one service over one connection.  Redirects, and links to other hosts, are not followed.

    Args:
        url: the URL of the service.
        credentials: user and password; ``None`` for requests without a user.
        limit_s: timeout of one request; for the resolution of the host's name the system's timeout applies.

    Raises:
        ValueError: the file with the certificate authorities is not usable.
    """

    def __init__(self, url: SplitResult, credentials: Credentials | None, limit_s: float = LIMIT_S) -> None:
        self._limit_s, self._until_s, self._locked_out_until_s = limit_s, 0.0, 0.0
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "OData-Version": "4.0"}
        if credentials is not None:
            pair = f"{credentials.user}:{credentials.password}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        # Reading is tried twice, because a service may end a connection between two requests.
        options: dict[str, Any] = {"headers": headers, "retries": urllib3.Retry(connect=0, read=1, status=0, other=0)}
        if url.scheme == "http":
            self._pool = urllib3.HTTPConnectionPool(url.hostname or "", url.port, **options)
            return
        pinned = credentials.fingerprint if credentials else None
        try:
            tls = ssl.create_default_context(cafile=credentials.ca_file if credentials else None)
        except OSError as error:
            raise ValueError(f"ca_file of the credentials file cannot be used: {error.strerror or error}") from error
        if pinned is not None:  # a pinned certificate often has a wrong name and issuer, so they are not checked
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        options |= {"ssl_context": tls, "assert_fingerprint": pinned}
        self._pool = urllib3.HTTPSConnectionPool(url.hostname or "", url.port, **options)

    def begin(self, limit_s: float) -> None:
        """Set the timeout of all following requests together."""
        self._until_s = time.monotonic() + limit_s

    def get(self, path: str) -> Document | None:
        """Return a resource; ``None`` if it does not exist, or for an empty path.

        Raises:
            OSError, ValueError: the service does not answer in time, rejects the user, or returns something else.
        """
        if not path:
            return None
        now_s = time.monotonic()
        if now_s < self._locked_out_until_s:
            raise PermissionError("the service rejected the user (401): the next login is in ten minutes")
        until_s = min(self._until_s, now_s + self._limit_s)
        if until_s <= now_s:
            raise OSError("the service took too long for all its answers")
        timeout = urllib3.Timeout(total=until_s - now_s)
        try:
            answer = self._pool.urlopen("GET", path, redirect=False, preload_content=False, timeout=timeout)
            content = self._content(answer, path, until_s)
        except HTTPError as error:
            raise OSError(self._reason(error)) from None
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise self._rejection(answer.status, path)
        try:
            return msgspec.json.decode(content, type=Document)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise ValueError(f"{path} is not a valid Redfish resource: {str(error)[:150]}") from None

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._pool.close()

    def _content(self, answer: urllib3.BaseHTTPResponse, path: str, until_s: float) -> bytes:
        """Read an answer in parts, because the timeout of a socket applies to each part."""
        content, is_late = b"", False
        while not is_late and len(content) <= MAX_BYTES and (part := answer.read1(64 * 1024, decode_content=False)):
            content += part
            is_late = time.monotonic() > until_s
        if is_late or len(content) > MAX_BYTES:
            answer.close()
            limit = f"{self._limit_s:g} s" if is_late else f"{MAX_BYTES >> 10} KiB"
            raise OSError(f"the answer to {path} exceeds {limit}, the limit for an answer")
        answer.release_conn()
        return content

    def _rejection(self, status: int, path: str) -> OSError:
        if status == 401 and "Authorization" not in self._pool.headers:
            return PermissionError("the service requires a user (401): set NODE_POWER_CREDENTIALS to a file")
        if status == 401:
            self._locked_out_until_s = time.monotonic() + LOCKED_OUT_S
            return PermissionError("the service rejects the user or the password of the credentials file (401)")
        if status == 403:
            return PermissionError(f"the user may not read {path} (403): it needs the privilege Login (role ReadOnly)")
        return OSError(f"the answer to {path} has the status {status}")

    def _reason(self, error: HTTPError) -> str:
        reason = getattr(error, "reason", None) or error
        text = one_line(str(reason))[:200]
        if isinstance(reason, SSLError):
            return f"certificate is not trusted ({text}): set ca_file or fingerprint in the credentials file"
        is_late = isinstance(reason, HTTPTimeout) and not isinstance(reason, NewConnectionError)
        return f"no answer within {self._limit_s:g} s" if is_late else text
