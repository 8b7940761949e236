"""A simulated management controller: a Redfish service on loopback; tests set its resources and its answers."""

import contextlib
import json
import shutil
import ssl
import subprocess
import threading
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

USER, PASSWORD = "monitor", "pa=ss word#1"


def link(path):
    return {"@odata.id": path}


def supply(chassis, name, watts, **more):
    """Return the two resources of a power supply: the supply and its metrics."""
    path = f"/redfish/v1/Chassis/{chassis}/PowerSubsystem/PowerSupplies/{name}"
    metrics = {"Id": "Metrics", "InputPowerWatts": {"Reading": watts}}
    own = {
        "Id": name,
        "SerialNumber": f"SN-{name}",
        "Status": {"State": "Enabled", "Health": "OK"},
        "LineInputStatus": "Normal",
        "Metrics": link(f"{path}/Metrics"),
    }
    return {path: {**own, **more}, f"{path}/Metrics": metrics}


def chassis(name, **more):
    return {f"/redfish/v1/Chassis/{name}": {"Id": name, "Manufacturer": "Contoso", "Model": "3500", **more}}


def tree(*parts):
    """Return the resources of a service: those in `parts`, the root, and the collections of chassis and supplies."""
    resources = {path: value for part in parts for path, value in part.items()}
    boxes = [path for path in resources if path.count("/") == 4 and path.startswith("/redfish/v1/Chassis/")]
    resources["/redfish/v1/"] = {"RedfishVersion": "1.15.0", "Chassis": link("/redfish/v1/Chassis")}
    resources["/redfish/v1/Chassis"] = {"Members": [link(path) for path in boxes]}
    for box in boxes:
        supplies = [path for path in resources if path.startswith(f"{box}/PowerSubsystem/PowerSupplies/")]
        supplies = [path for path in supplies if not path.endswith("/Metrics")]
        if supplies:
            resources[box]["PowerSubsystem"] = link(f"{box}/PowerSubsystem")
            resources[f"{box}/PowerSubsystem"] = {"PowerSupplies": link(f"{box}/PowerSubsystem/PowerSupplies")}
            resources[f"{box}/PowerSubsystem/PowerSupplies"] = {"Members": [link(path) for path in supplies]}
    return resources


class Service:
    """A running service.

    ``resources`` maps paths to documents. A path may have a function instead of a document; the function gets the
    handler and may send any answer.
    """

    def __init__(self, resources=None, certificate=None, password=PASSWORD):
        self.resources = resources or {}
        self.password = password
        self.asked = []  # (method, path, headers) of each request, in order
        self.release = threading.Event()  # set at the end, so that blocked handlers end
        self.num_connections = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = False  # `server_close` waits for the handler threads
        self._server.service = self
        scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
            scheme = "https"
        self.port = self._server.server_address[1]
        self.url = f"{scheme}://127.0.0.1:{self.port}/redfish/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def paths(self):
        return [path for _, path, _ in self.asked]

    def is_welcome(self, headers):
        if self.password is None:
            return True
        pair = b64encode(f"{USER}:{self.password}".encode()).decode()
        return headers.get("Authorization") == f"Basic {pair}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 20  # a client with an open connection must not block a test

    def setup(self):
        super().setup()
        self.server.service.num_connections += 1

    def handle(self):
        with contextlib.suppress(OSError, ValueError):  # the client closed the connection or rejected the certificate
            super().handle()

    def do_GET(self):
        service = self.server.service
        service.asked.append(("GET", self.path, dict(self.headers)))
        resource = service.resources.get(self.path)
        if callable(resource):
            resource(self)
        elif not service.is_welcome(self.headers):
            self.answer(401, {})
        elif resource is None:
            self.answer(404, {})
        else:
            self.answer(200, resource)

    def answer(self, status, document, headers=None):
        body = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def certificate(folder, address="127.0.0.1"):
    """Make a certificate for an address with its key and return its file; without openssl, return ``None``."""
    if shutil.which("openssl") is None:
        return None
    key, own = folder / "key.pem", folder / "certificate.pem"
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    name = ["-subj", f"/CN={address}", "-addext", f"subjectAltName=IP:{address}"]
    subprocess.run(
        ["openssl", "req", *kind, *name, "-keyout", key, "-out", own],
        check=True,
        capture_output=True,
    )
    both = folder / "both.pem"
    both.write_text(key.read_text() + own.read_text())
    return both
