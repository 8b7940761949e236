"""Reads a metrics page in the text format of Prometheus."""

from __future__ import annotations

import contextlib
import http.client
import math
import re
import socket
import ssl
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

MAX_BYTES = 8 * 1024 * 1024
TIMEOUT_S = 5.0
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}

Labelled = Mapping[str, float]  # values of one metric by the text of its labels


class Unreachable(OSError):
    """The page cannot be read now. The message is one sentence."""


def address_of(url: str) -> tuple[str, str, int, str]:
    """Return the scheme, host, port and path of a page of http or https; the default path is /metrics."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not the http(s) URL of a page, such as http://127.0.0.1:8000/metrics")
    port = parts.port or (443 if parts.scheme == "https" else 80)  # raises ValueError for an invalid port
    return parts.scheme, parts.hostname, port, parts.path if parts.path not in ("", "/") else "/metrics"


def fetch_text(url: str, token: str = "", tls: ssl.SSLContext | None = None) -> str:
    """Return the text of a page.

    The token is not sent to another address, because redirections are not followed. By default, the certificates of the
    system are trusted.
    """
    scheme, host, port, path = address_of(url)
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    if scheme == "https":
        connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=tls)
    try:
        body = _read_body(connection, path, {"Authorization": f"Bearer {token}"} if token else {})
    except Unreachable:  # an OSError with its message
        raise
    except (TimeoutError, socket.gaierror, ConnectionError) as error:
        reason = "timeout" if isinstance(error, TimeoutError) else error.strerror or type(error).__name__
        raise Unreachable(f"no answer: {reason}") from error
    except (http.client.HTTPException, OSError) as error:
        raise Unreachable(f"not an HTTP answer: {type(error).__name__}: {str(error)[:120]}") from error
    finally:
        connection.close()
    return body.decode("utf-8", "replace")


def _read_body(connection: http.client.HTTPConnection, path: str, headers: Mapping[str, str]) -> bytes:
    deadline_s = time.monotonic() + TIMEOUT_S
    connection.request("GET", path, headers={"Accept": "text/plain", "Connection": "close", **headers})
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        redirected = f" to {answer.headers['Location'][:200]}" if answer.headers["Location"] else ""
        raise Unreachable(f"the server answers {answer.status} {answer.reason[:80]}{redirected}")
    body = b""
    while part := answer.read1(65536):
        body += part
        if len(body) > MAX_BYTES:
            raise Unreachable(f"the page is longer than {MAX_BYTES // 2**20} MiB")
        if time.monotonic() > deadline_s:  # the connection's timeout applies to each packet
            raise Unreachable(f"the page was not complete within {TIMEOUT_S:.0f} s")
    return body


def samples_of(text: str) -> dict[str, dict[str, float]]:
    """Return the finite values of a page: by name, and by the text of their labels."""
    samples: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        # Label values may contain spaces and braces. After the last brace there are only numbers.
        head, brace, tail = line.rpartition("}")
        name, _, labels = head.partition("{")
        numbers = tail.split()  # a value, and perhaps its time
        with contextlib.suppress(ValueError, IndexError):
            name = name.strip() if brace else numbers.pop(0)  # without labels, the name is the first word
            if math.isfinite(value := float(numbers[0])):
                samples.setdefault(name, {})[labels] = value
    return samples


def labels_of(text: str) -> dict[str, str]:
    """Return the labels of a value.

    >>> labels_of('run_id="a",kind="b c"')
    {'run_id': 'a', 'kind': 'b c'}
    """
    escapes = re.compile(r"\\.")
    return {
        name: escapes.sub(lambda match: _ESCAPED.get(match[0], match[0]), value) for name, value in _LABEL.findall(text)
    }
