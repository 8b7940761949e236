"""The power of a node from its management controller's Redfish service.

The power is the sum of the inputs of the power supplies (PowerSubsystem), else the power that the chassis states
(EnvironmentMetrics, or the deprecated Power: DGX A100 to B200 and iLO 5 have no other).  If a supply is present but has
no reading, the whole reading fails, because a sum without this supply would be too low.  Requests are made over HTTPS,
with the user of a private file, and with limits of time and size.  This file was tested with the forms of DMTF's public
mock-ups (DSP2043), not on real hardware.
"""

from __future__ import annotations

import base64
import ipaddress
import re
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import msgspec
import urllib3
from urllib3.exceptions import HTTPError, NewConnectionError, SSLError
from urllib3.exceptions import TimeoutError as HTTPTimeout

from effllm.devices import DeviceUnavailable
from effllm.devices.node import PSU_INTERVAL_S, NodeReader, node_device
from effllm.records.plain_text import one_line
from effllm.records.rank import INSTANT, NODE_PSU, Sensor
from effllm.store import own_files

TIMEOUT_S = 5.0  # timeout of one request
MAX_BYTES = 1024 * 1024  # of an answer
#: Pause after a rejected password: controllers lock accounts after several attempts.
LOCKED_OUT_S = 600.0
READING_TIMEOUT_S = 10.0  # timeout of all requests of one reading
SEARCH_TIMEOUT_S = 120.0  # timeout of the search through all chassis, which runs once
MAX_CHASSIS, MAX_SUPPLIES = 128, 64

#: Relative error of a supply's meter above a fifth of the full load; at a lower load 15 % are allowed.
SUPPLY_ERROR = 0.05
_SUPPLY_SOURCE = "an error of 5 % is assumed, the limit for meters of power supplies (Intel E72797-009, table 17)"
CHASSIS_ERROR = 0.10
_CHASSIS_SOURCE = "an error of 10 % is assumed, because the service does not state how it measures power"
_TICK_S = 5.0  # assumed period of the sensor
_MAX_W = 1e6

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
    if parts.scheme == "http" and not is_local_address(host, link_local=False):
        raise ValueError(f"{url!r} would send the password in the clear: use https; http is for loopback addresses")
    return parts


def is_local_address(host: str, link_local: bool = True) -> bool:
    """Whether an address means a different machine on every node: loopback, or link-local if ``link_local`` is set."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or (link_local and address.is_link_local)


class Service:
    """Requests to one service over one connection.  Redirects, and links to other hosts, are not followed.

    Args:
        credentials: user and password; ``None`` for requests without a user.
        timeout_s: timeout of one request; for the resolution of the host's name the system's timeout applies.

    Raises:
        ValueError: the file with the certificate authorities is not usable.
    """

    def __init__(self, url: SplitResult, credentials: Credentials | None, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s, self._deadline_s, self._locked_out_until_s = timeout_s, 0.0, 0.0
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

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of all following requests together."""
        self._deadline_s = time.monotonic() + timeout_s

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
        deadline_s = min(self._deadline_s, now_s + self._timeout_s)
        if deadline_s <= now_s:
            raise OSError("the service took too long for all its answers")
        timeout = urllib3.Timeout(total=deadline_s - now_s)
        try:
            answer = self._pool.urlopen("GET", path, redirect=False, preload_content=False, timeout=timeout)
            content = self._read_content(answer, path, deadline_s)
        except HTTPError as error:
            raise OSError(self._reason_of(error)) from None
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise self._error_of_status(answer.status, path)
        try:
            return msgspec.json.decode(content, type=Document)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise ValueError(f"{path} is not a valid Redfish resource: {str(error)[:150]}") from None

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._pool.close()

    def _read_content(self, answer: urllib3.BaseHTTPResponse, path: str, deadline_s: float) -> bytes:
        """Read an answer in parts, because the timeout of a socket applies to each part."""
        content, is_late = b"", False
        while not is_late and len(content) <= MAX_BYTES and (part := answer.read1(64 * 1024, decode_content=False)):
            content += part
            is_late = time.monotonic() > deadline_s
        if is_late or len(content) > MAX_BYTES:
            answer.close()
            limit = f"{self._timeout_s:g} s" if is_late else f"{MAX_BYTES >> 10} KiB"
            raise OSError(f"the answer to {path} exceeds {limit}, the limit for an answer")
        answer.release_conn()
        return content

    def _error_of_status(self, status: int, path: str) -> OSError:
        """Return the error for a rejection; after a rejected password no login is tried for `LOCKED_OUT_S`."""
        if status == 401 and "Authorization" not in self._pool.headers:
            return PermissionError("the service requires a user (401): set NODE_POWER_CREDENTIALS to a file")
        if status == 401:
            self._locked_out_until_s = time.monotonic() + LOCKED_OUT_S
            return PermissionError("the service rejects the user or the password of the credentials file (401)")
        if status == 403:
            return PermissionError(f"the user may not read {path} (403): it needs the privilege Login (role ReadOnly)")
        return OSError(f"the answer to {path} has the status {status}")

    def _reason_of(self, error: HTTPError) -> str:
        reason = getattr(error, "reason", None) or error
        text = one_line(str(reason))[:200]
        if isinstance(reason, SSLError):
            return f"certificate is not trusted ({text}): set ca_file or fingerprint in the credentials file"
        is_late = isinstance(reason, HTTPTimeout) and not isinstance(reason, NewConnectionError)
        return f"no answer within {self._timeout_s:g} s" if is_late else text


class Source(NamedTuple):
    """A source of a node's power, with its error."""

    note: str
    gain_error: float
    error_source: str
    read_w: Callable[[], float]  # raises OSError or ValueError if a part of the power cannot be read


def find_source(service: Service, path: str) -> tuple[Source, str]:
    """Return the source of the node's power, and the name of the machine.

    The path is that of a chassis; or of the root, for the chassis that no other chassis contains.

    Raises:
        OSError, ValueError: the service has no source, or more than one source.
    """
    links = _member_paths(service, _linked_path(service.get("/redfish/v1/") or {}, "Chassis"))[:MAX_CHASSIS]
    if is_named := path not in ("", "/redfish", "/redfish/v1", "/redfish/v1/Chassis"):
        links = [link for link in links if link.rstrip("/") == path]
        if not links:
            raise ValueError(f"{path} is neither the root of the service nor one of its chassis")
    all_chassis = [(link, chassis) for link in links if (chassis := service.get(link)) is not None]
    outermost = [pair for pair in all_chassis if not _linked_path(_as_object(pair[1].get("Links")), "ContainedBy")]
    chosen = outermost if outermost and not is_named else all_chassis
    why_not: list[str] = []
    sources = [(*pair, source) for pair in chosen if (source := _best_source(service, pair[1], why_not)) is not None]
    if not sources:
        raise ValueError("; ".join(["the service shows no power of a whole chassis", *why_not]))
    link, chassis, source = sources[0]
    if len(sources) > 1:
        raise ValueError(f"the service shows the power of {len(sources)} chassis: name one in the URL, such as {link}")
    names = (chassis.get("Manufacturer"), chassis.get("Model"))
    return source, " ".join(name for name in names if isinstance(name, str))


def _best_source(service: Service, chassis: Document, why_not: list[str]) -> Source | None:
    """Return the best source that can be read; the reasons why a better one is not used are added to ``why_not``."""
    for source in _possible_sources(service, chassis):
        try:
            source.read_w()
        except ValueError as error:
            why_not.append(str(error))
        else:
            return source._replace(note="; ".join([source.note, *why_not]))
    return None


def _possible_sources(service: Service, chassis: Document) -> Iterator[Source]:  # the best first
    subsystem = service.get(_linked_path(chassis, "PowerSubsystem")) or {}
    links = _member_paths(service, _linked_path(subsystem, "PowerSupplies"))[:MAX_SUPPLIES]
    if links:
        supplies = {link: _linked_path(service.get(link) or {}, "Metrics") for link in links}
        note = f"sum of the inputs of {len(supplies)} power supplies"
        if (systems := len(_objects_in(_as_object(chassis.get("Links")).get("ComputerSystems")))) > 1:
            note += f"; the supplies feed {systems} computer systems, as stated by the service"
        yield Source(note, SUPPLY_ERROR, _SUPPLY_SOURCE, partial(_supplies_w, service, supplies))
    for name, read_w in (("EnvironmentMetrics", _environment_w), ("Power", _control_w)):
        if path := _linked_path(chassis, name):
            note = f"{name} of chassis {chassis.get('Id')}: the vendor chooses the measured parts"
            yield Source(note, CHASSIS_ERROR, _CHASSIS_SOURCE, partial(read_w, service, path))


def _supplies_w(service: Service, supplies: dict[str, str]) -> float:
    """Return the sum of the inputs, by the paths of supplies and their metrics; an unplugged supply draws nothing."""
    total_w = 0.0
    for path, metrics in supplies.items():
        watts = _valid_watts(_as_object((service.get(metrics) or {}).get("InputPowerWatts")).get("Reading"))
        if watts is not None:
            total_w += watts
        elif (supply := service.get(path)) is not None:
            is_absent = _as_object(supply.get("Status")).get("State") == "Absent"
            if not is_absent and supply.get("LineInputStatus") != "LossOfInput":
                raise ValueError(f"power supply {supply.get('Id')} is present but reports no input power")
    return _above_zero(total_w)


def _environment_w(service: Service, path: str) -> float:
    return _above_zero(_valid_watts(_as_object((service.get(path) or {}).get("PowerWatts")).get("Reading")))


def _control_w(service: Service, path: str) -> float:
    """Return the largest power: some services list the chassis and also its parts, such as CPUs and memory."""
    controls = _objects_in((service.get(path) or {}).get("PowerControl"))
    chosen = [control for control in controls if control.get("PhysicalContext") == "Chassis"] or controls
    powers_w = [watts for control in chosen if (watts := _valid_watts(control.get("PowerConsumedWatts"))) is not None]
    return _above_zero(max(powers_w, default=None))


def _valid_watts(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < _MAX_W:  # also a number that is not finite
        raise ValueError(f"{str(value)[:40]} W is not a possible power")
    return float(value)


def _above_zero(watts: float | None) -> float:
    if not watts:
        raise ValueError("the service shows no power, or 0 W, which a running node cannot draw")
    return watts


def _member_paths(service: Service, path: str) -> list[str]:
    members = _objects_in((service.get(path) or {}).get("Members"))
    return [member["@odata.id"] for member in members if isinstance(member.get("@odata.id"), str)]


def _linked_path(document: Document, name: str) -> str:
    """Return the path of a linked resource; empty if there is no link."""
    path = _as_object(document.get(name)).get("@odata.id")
    return path if isinstance(path, str) else ""


def _as_object(value: Any) -> Document:
    return value if isinstance(value, dict) else {}


def _objects_in(value: Any) -> list[Document]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def open_reader(host: str, url: str, credentials_file: Path | None = None, timeout_s: float = TIMEOUT_S) -> NodeReader:
    """Open the power of a node; ``{host}`` in the URL is replaced by the node's name up to its first dot.

    Raises:
        DeviceUnavailable: the URL or the credentials file is not usable, or the service has no power readings.
    """
    try:
        address = parse_url(url.replace("{host}", host.partition(".")[0]))
        credentials = read_credentials(credentials_file.expanduser()) if credentials_file is not None else None
        service = Service(address, credentials, timeout_s)
    except ValueError as error:
        raise DeviceUnavailable(f"node power: {error}") from error
    service.set_timeout(SEARCH_TIMEOUT_S)
    try:
        source, name = find_source(service, address.path.rstrip("/"))
        began_s = time.monotonic()
        source.read_w()
    except (OSError, ValueError) as error:
        service.close()
        raise DeviceUnavailable(f"node power: Redfish at {address.hostname}: {error}") from error
    device = node_device(
        host,
        NODE_PSU,
        kind="redfish",
        name=name or "node",
        energy_method=INSTANT,
        energy_note=f"{source.note}; power is integrated",
        sensor=Sensor(
            tick_s=_TICK_S,
            tick_error_s=_TICK_S,
            is_held=True,
            gain_error=source.gain_error,
            call_s=time.monotonic() - began_s,
            source=f"{source.error_source}; a period of {_TICK_S:g} s is assumed",
        ),
        driver="Redfish",
        energy_key="" if is_local_address(address.hostname or "") else f"psu:{address.netloc}{address.path}",
    )

    def measure() -> float:
        service.set_timeout(READING_TIMEOUT_S)
        return source.read_w()

    return NodeReader(device, PSU_INTERVAL_S, measure, service.close)
