"""effllm/devices/node/redfish.py with a fake service on loopback; only the tests of TLS use TLS."""

import hashlib
import ssl
import sys
import time

import pytest
import redfish_service
from redfish_service import PASSWORD, USER, Service, chassis, link, supply, tree

from effllm.devices import DeviceUnavailable
from effllm.devices import node as node_power
from effllm.devices.node.redfish import MAX_BYTES, open_reader

CHASSIS = "/redfish/v1/Chassis/1"
TWO_SUPPLIES = tree(chassis("1"), supply("1", "PSU0", 937.4), supply("1", "PSU1", 1021.1))
FIRST, SECOND = (f"{CHASSIS}/PowerSubsystem/PowerSupplies/PSU{n}" for n in (0, 1))


@pytest.fixture
def credentials(tmp_path):
    def write(**more):
        file = tmp_path / "bmc-credentials"
        file.write_text(
            "".join(f"{key} = {value}\n" for key, value in {"user": USER, "password": PASSWORD, **more}.items())
        )
        file.chmod(0o600)
        return file

    return write


@pytest.fixture
def serve(request):
    """Start a service; it ends with the test, after its readers are closed."""
    running = []

    def start(resources, **options):
        service = Service(resources, **options)
        running.append(service.__enter__())
        return service

    yield start
    for service in running:
        service.__exit__()


@pytest.fixture
def opened(serve, credentials):
    """Open readers; they are closed at the end of the test."""
    readers = []

    def open_it(service, path="", timeout_s=5.0, host="node1.example", file=None):
        readers.append(open_reader(host, service.url + path, file or credentials(), timeout_s))
        return readers[-1]

    yield open_it
    for reader in readers:
        reader.close()


def why_not(url, file, timeout_s=5.0):
    with pytest.raises(DeviceUnavailable) as caught:
        open_reader("node1", url, file, timeout_s)
    assert PASSWORD not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def watts(reader):
    sample, failures = reader.read()
    assert failures == {}
    return sample.power_w


# --- the forms of answers ---


def test_power_is_the_sum_of_the_inputs_of_all_supplies(serve, opened):
    reader = opened(serve(TWO_SUPPLIES))
    device, sensor = reader.device, reader.device.sensor

    assert watts(reader) == pytest.approx(937.4 + 1021.1)
    assert (device.key, device.kind, device.name) == ("psu:node1.example", "redfish", "Contoso 3500")
    assert (device.energy_method, device.power_scope) == ("instant power", "node-psu")
    assert (device.only_power, device.is_gpu, reader.interval_s) == (True, False, 10.0)
    assert device.energy_note == "sum of the inputs of 2 power supplies; power is integrated"
    assert (sensor.tick_s, sensor.gain_error, 0 < sensor.call_s < 5) == (5.0, 0.05, True)
    assert sensor.source.endswith("(Intel E72797-009, table 17); a period of 5 s is assumed")


def rack_mounted():
    """Return the resources of a server in the forms of DMTF's mock-up `public-rackmount1` (DSP2043)."""
    box, bays = "/redfish/v1/Chassis/1U", "/redfish/v1/Chassis/1U/PowerSubsystem/PowerSupplies"
    parts = {name: link(f"{box}/{name}") for name in ("PowerSubsystem", "EnvironmentMetrics", "Power")}
    metrics = {
        "Status": {"State": "Enabled", "Health": "Warning"},
        "InputPowerWatts": {"DataSourceUri": f"{box}/Sensors/PS1InputPower", "Reading": 937.4},
        "EnergykWh": {"DataSourceUri": f"{box}/Sensors/PS1Energy", "Reading": 325675},
    }
    return {
        "/redfish/v1/": {"RedfishVersion": "1.15.0", "Chassis": link("/redfish/v1/Chassis")},
        "/redfish/v1/Chassis": {"Members@odata.count": 1, "Members": [link(box)]},
        box: {"Id": "1U", "Links": {"ComputerSystems": [link("/redfish/v1/Systems/437XR1138R2")]}, **parts},
        f"{box}/PowerSubsystem": {"CapacityWatts": 2000, "PowerSupplies": link(bays)},
        bays: {"Members@odata.count": 2, "Members": [link(f"{bays}/Bay1"), link(f"{bays}/Bay2")]},
        f"{bays}/Bay1": {"Id": "Bay1", "Status": {"State": "Enabled"}, "Metrics": link(f"{bays}/Bay1/Metrics")},
        f"{bays}/Bay1/Metrics": metrics,
        f"{bays}/Bay2": {"Id": "Bay2", "Status": {"State": "Absent"}},
        f"{box}/EnvironmentMetrics": {"PowerWatts": {"DataSourceUri": f"{box}/Sensors/TotalPower", "Reading": 374}},
        f"{box}/Power": {"PowerControl": [{"Name": "System Input Power", "PowerConsumedWatts": 344}]},
    }


def test_forms_of_the_public_mock_up_are_read_the_best_first(serve, opened):
    """Supplies with a meter, then without measurements (OpenBMC) or with 0 W (iLO 6), then only the deprecated form."""
    service = serve(rack_mounted())
    bay = "/redfish/v1/Chassis/1U/PowerSubsystem/PowerSupplies/Bay1"
    read = [watts(opened(service))]
    service.resources[f"{bay}/Metrics"] = {"InputPowerWatts": {"Reading": 0}}
    read.append(watts(opened(service)))
    del service.resources[f"{bay}/Metrics"]
    read.append(watts(opened(service)))
    del service.resources["/redfish/v1/Chassis/1U/EnvironmentMetrics"]
    last = opened(service)

    assert [*read, watts(last)] == [937.4, 374, 374, 344]
    assert last.device.energy_note == (
        "Power of chassis 1U: the vendor chooses the measured parts; power supply Bay1 is present but reports no input "
        "power; the service shows no power, or 0 W, which a running node cannot draw; power is integrated"
    )


def test_chassis_in_the_url_may_end_with_a_slash(serve, opened):
    resources = rack_mounted()
    resources["/redfish/v1/Chassis"] = {"Members": [link("/redfish/v1/Chassis/1U/")]}
    resources["/redfish/v1/Chassis/1U/"] = resources.pop("/redfish/v1/Chassis/1U")

    assert watts(opened(serve(resources), "/Chassis/1U")) == 937.4


def box(name, reading, **links):
    """Return the resources of a chassis with a power of its own."""
    path = f"/redfish/v1/Chassis/{name}/EnvironmentMetrics"
    return {**chassis(name, EnvironmentMetrics=link(path), **links), path: {"PowerWatts": {"Reading": reading}}}


def controlled(*controls, supplies=()):
    """Return the resources of a chassis in the deprecated form, and of its supplies."""
    path = f"{CHASSIS}/Power"
    return tree(chassis("1", Power=link(path)), {path: {"PowerControl": list(controls)}}, *supplies)


SERVER = {"MemberId": "0", "Name": "Server Power Control", "PowerConsumedWatts": 344}
CPUS = {"MemberId": "1", "Name": "CPU Sub-system Power", "PowerConsumedWatts": 154}
MEMORY = {"MemberId": "2", "Name": "Memory Sub-system Power", "PowerConsumedWatts": 23}
TWO_NODES = tree(box("Node1", 700), box("Node2", 900))
INSIDE = {"Links": {"ContainedBy": link("/redfish/v1/Chassis/DGX")}}
VENDOR = "the vendor chooses the measured parts"
SYSTEMS = {"Links": {"ComputerSystems": [link("/redfish/v1/Systems/1"), link("/redfish/v1/Systems/2")]}}


@pytest.mark.parametrize(
    ("resources", "path", "expected_w", "note"),
    [
        pytest.param(tree(box("1", 374)), "", 374, f"EnvironmentMetrics of chassis 1: {VENDOR}", id="chassis"),
        pytest.param(controlled(CPUS, SERVER, MEMORY), "", 344, f"Power of chassis 1: {VENDOR}", id="components"),
        pytest.param(
            controlled({**SERVER, "PhysicalContext": "Chassis"}, {**CPUS, "PowerConsumedWatts": 9000}),
            *("", 344, f"Power of chassis 1: {VENDOR}"),
            id="control of the chassis",
        ),
        pytest.param(
            controlled(SERVER, supplies=[supply("1", "PSU0", 500.0)]),
            *("", 500.0, "sum of the inputs of 1 power"),
            id="supplies before the chassis",
        ),
        pytest.param(
            controlled(SERVER, supplies=[supply("1", "PSU0", 500.0), supply("1", "PSU1", None)]),
            *("", 344, f"{VENDOR}; power supply PSU1 is present but reports no input power"),
            id="supply without a reading",
        ),
        pytest.param(
            tree(box("DGX", 8412), *(box(f"HGX_GPU_SXM_{n}", 690, **INSIDE) for n in range(1, 9))),
            *("", 8412, f"EnvironmentMetrics of chassis DGX: {VENDOR}"),
            id="GPUs inside the node",
        ),
        pytest.param(TWO_NODES, "/Chassis/Node2/", 900, f"chassis Node2: {VENDOR}", id="chassis in the URL"),
        pytest.param(
            tree(chassis("1", **SYSTEMS), supply("1", "PSU0", 900.0)),
            *("", 900.0, "; the supplies feed 2 computer systems, as stated by the service"),
            id="several systems",
        ),
    ],
)
def test_power_of_the_node_is_read_without_its_parts(serve, opened, resources, path, expected_w, note):
    reader = opened(serve(resources), path)

    assert watts(reader) == expected_w
    assert note in reader.device.energy_note
    assert reader.device.sensor.gain_error == (0.10 if VENDOR in note else 0.05)


@pytest.mark.parametrize(
    ("resources", "name"),
    [
        (TWO_NODES, "Node1"),
        (tree(chassis("1"), chassis("2"), supply("1", "PSU0", 500.0), supply("2", "PSU0", 500.0)), "1"),
    ],
    ids=["chassis", "supplies"],
)
def test_two_separate_chassis_need_a_chassis_in_the_url(serve, credentials, resources, name):
    text = why_not(serve(resources).url, credentials())

    assert text.endswith(f"shows the power of 2 chassis: name one in the URL, such as /redfish/v1/Chassis/{name}")


def test_service_without_power_readings_is_reported(serve, credentials):
    assert why_not(serve(tree(chassis("1"))).url, credentials()).endswith("shows no power of a whole chassis")


@pytest.mark.parametrize("reading", [0, -3, 1e7, "NaN", 1e400])
def test_implausible_power_is_rejected(serve, credentials, reading):
    service = serve(tree(chassis("1"), supply("1", "PSU0", 1.0)))
    body = f'{{"InputPowerWatts": {{"Reading": {reading if reading != "NaN" else chr(34) + "NaN" + chr(34)}}}}}'
    service.resources[f"{FIRST}/Metrics"] = lambda handler: raw(handler, body.encode().replace(b"inf", b"1e400"))

    assert why_not(service.url, credentials())


# --- absent supplies ---


def test_error_names_the_supply_without_a_reading_until_it_recovers(serve, opened):
    service = serve({**TWO_SUPPLIES})
    reader = opened(service)
    service.resources[f"{SECOND}/Metrics"] = {"InputPowerWatts": {"Reading": None}}
    failed, failures = reader.read()
    service.resources[f"{SECOND}/Metrics"] = {"InputPowerWatts": {"Reading": 1000.0}}

    assert failed.power_w is None
    assert failures == {"power_w": "redfish: power supply PSU1 is present but reports no input power"}
    assert watts(reader) == pytest.approx(1937.4)


@pytest.mark.parametrize("how", [{"Status": {"State": "Absent"}}, {"LineInputStatus": "LossOfInput"}])
def test_absent_or_unpowered_supply_counts_as_0_watts(serve, opened, how):
    service = serve({**TWO_SUPPLIES})
    reader = opened(service)
    service.resources[SECOND] = {**service.resources[SECOND], **how}
    service.resources[f"{SECOND}/Metrics"] = {"InputPowerWatts": {"Reading": None}}

    assert watts(reader) == 937.4


def test_supply_added_later_is_counted(serve, opened):
    service = serve(
        tree(chassis("1"), supply("1", "PSU0", 937.4), supply("1", "PSU1", None, Status={"State": "Absent"}))
    )
    reader = opened(service)
    before_w = watts(reader)
    service.resources[f"{SECOND}/Metrics"] = {"InputPowerWatts": {"Reading": 62.6}}

    assert (before_w, watts(reader)) == (937.4, 1000.0)


# --- the device and its node ---


def test_controller_on_loopback_is_separate_for_each_node(serve, opened):
    assert opened(serve(TWO_SUPPLIES)).device.energy_key == ""


def test_nodes_with_one_controller_share_its_energy_key(serve, opened, monkeypatch):
    service = serve(TWO_SUPPLIES)
    # A controller on the network: its address means the same machine on every node.
    monkeypatch.setattr("effllm.devices.node.redfish.is_local_address", lambda _, link_local=True: not link_local)
    keys = {opened(service, host=host).device.energy_key for host in ("node1", "node2")}

    assert keys == {f"psu:127.0.0.1:{service.port}/redfish/v1"}


def test_host_in_the_url_is_the_node_name_up_to_its_first_dot(credentials):
    with pytest.raises(DeviceUnavailable, match=r"Redfish at node7-bmc\.invalid: "):
        open_reader("node7.cluster.example", "https://{host}-bmc.invalid/redfish/v1", credentials())


# --- authentication ---


def test_wrong_password_is_reported_in_one_line_but_not_printed(serve, credentials):
    service = serve(TWO_SUPPLIES, password="another")

    assert why_not(service.url, credentials()).endswith(
        "rejects the user or the password of the credentials file (401)"
    )
    assert len(service.asked) == 1


def test_rejected_login_is_not_repeated_within_ten_minutes(serve, opened):
    service = serve({**TWO_SUPPLIES})
    reader = opened(service)
    service.password = "changed"
    _, first = reader.read()
    num_asked = len(service.asked)
    _, second = reader.read()

    assert "rejects the user" in first["power_w"]
    assert "the next login is in ten minutes" in second["power_w"]
    assert len(service.asked) == num_asked


def test_missing_credentials_are_reported(serve):
    missing = why_not(serve(TWO_SUPPLIES).url, None)
    assert missing.endswith("requires a user (401): set NODE_POWER_CREDENTIALS to a file")


def test_no_user_is_sent_to_a_service_without_authentication(serve):
    service = serve(TWO_SUPPLIES, password=None)
    reader = open_reader("node1", service.url)

    assert watts(reader) == pytest.approx(1958.5)
    assert not any("Authorization" in headers for _, _, headers in service.asked)
    reader.close()


# --- trust ---


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    made = redfish_service.certificate(tmp_path_factory.mktemp("tls"))
    if made is None:
        pytest.skip("no openssl: no certificate can be made")
    return made


def fingerprint(certificate):
    own = (certificate.parent / "certificate.pem").read_text()
    digits = hashlib.sha256(ssl.PEM_cert_to_DER_cert(own)).hexdigest().upper()
    return ":".join(digits[n : n + 2] for n in range(0, 64, 2))


@pytest.mark.parametrize(
    ("host", "trusted", "reason"),
    [
        ("127.0.0.1", {}, "certificate is not trusted"),
        ("localhost", {"ca_file": True}, "certificate is not trusted"),  # the certificate is for 127.0.0.1
        ("127.0.0.1", {"fingerprint": "00" * 32}, "certificate is not trusted (Fingerprints did not match"),
        ("127.0.0.1", {"ca_file": True}, ""),
        ("localhost", {"fingerprint": True}, ""),  # makes a certificate of any name trusted
    ],
)
def test_password_is_sent_only_for_a_trusted_certificate(serve, credentials, certificate, host, trusted, reason):
    service = serve(TWO_SUPPLIES, certificate=certificate)
    url = service.url.replace("127.0.0.1", host)
    own = {"ca_file": certificate.parent / "certificate.pem", "fingerprint": fingerprint(certificate)}
    file = credentials(**{key: own[key] if value is True else value for key, value in trusted.items()})

    if reason:
        assert reason in why_not(url, file)
        assert service.asked == []
    else:
        reader = open_reader("node1", url, file)
        assert watts(reader) == pytest.approx(1958.5)
        reader.close()


def test_missing_ca_file_is_reported_before_sending(serve, credentials, tmp_path):
    service = serve(TWO_SUPPLIES)
    url = service.url.replace("http:", "https:")

    assert "ca_file" in why_not(url, credentials(ca_file=tmp_path / "nowhere.pem"))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://192.0.2.7/redfish/v1", "in the clear"),  # plain HTTP is used only on this machine
        ("https://root:calvin@bmc.example/redfish/v1", "credentials file"),
        *((f"https://{end}", "") for end in ("", "bmc:port", "bmc/redfish/v1?x=1", "[::1", "127.0.0.1:9/metrics")),
    ],
)
def test_invalid_url_is_reported_without_its_password(credentials, url, reason):
    text = why_not(url, credentials(), timeout_s=0.5)

    assert text.startswith("node power: ")
    assert reason in text
    assert "calvin" not in text


def test_proxies_of_the_environment_are_not_used(serve, opened, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    assert watts(opened(serve(TWO_SUPPLIES))) == pytest.approx(1958.5)


# --- faulty services ---


def raw(handler, body, status="200 OK"):
    handler.wfile.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def test_read_of_a_hanging_service_ends_at_the_timeout(serve, opened):
    service = serve({**TWO_SUPPLIES})
    reader = opened(service, timeout_s=0.4)
    metrics = service.resources[f"{SECOND}/Metrics"]
    service.resources[f"{SECOND}/Metrics"] = lambda handler: service.release.wait(20)
    began_s = time.monotonic()
    failed, failures = reader.read()
    took_s = time.monotonic() - began_s
    service.resources[f"{SECOND}/Metrics"] = metrics

    assert (failed.power_w, failures) == (None, {"power_w": "redfish: no answer within 0.4 s"})
    assert 0.3 < took_s < 10.0
    assert watts(reader) == pytest.approx(1958.5)


def drip(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not handler.server.service.release.wait(0.05):
        handler.wfile.write(b" ")


def test_slow_body_over_tls_ends_at_the_timeout(serve, credentials, certificate):
    service = serve({**TWO_SUPPLIES, "/redfish/v1/": drip}, certificate=certificate)
    file = credentials(ca_file=certificate.parent / "certificate.pem")

    assert why_not(service.url, file, timeout_s=1.0).endswith("exceeds 1 s, the limit for an answer")


def test_missing_urllib3_is_reported_with_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "urllib3", None)
    (node,) = [one for one in node_power.openers("https://bmc.example/redfish/v1", "node1") if one.name == "psu"]

    with pytest.raises(DeviceUnavailable, match=r"Redfish needs urllib3.* pip install 'effllm\[redfish\]'"):
        node.open()


@pytest.mark.parametrize("body", [b"<html>Welcome</html>", b"[]", b'{"Members": [{}]}', b"\xff\xfe", b"[" * 100_000])
def test_garbage_is_reported(serve, credentials, body):
    service = serve({**TWO_SUPPLIES, "/redfish/v1/Chassis": lambda handler: raw(handler, body)})

    text = why_not(service.url, credentials())
    assert text.endswith("shows no power of a whole chassis") or "Chassis is not a valid Redfish resource" in text


def drip_without_length(handler):
    handler.close_connection = True
    handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n{}")
    while not handler.server.service.release.wait(0.05):
        handler.wfile.write(b" ")


@pytest.mark.parametrize(
    ("path", "answer", "timeout_s", "reason"),
    [
        ("/", drip, 0.4, "exceeds 0.4 s, the limit for an answer"),
        ("/", drip_without_length, 0.4, "exceeds 0.4 s, the limit for an answer"),
        ("/Chassis", lambda handler: handler.answer(403, {}), 5.0, "(403): it needs the privilege Login"),
    ],
    ids=["slow", "slow without a length", "no privilege"],
)
def test_faulty_answer_is_reported_within_the_timeout(serve, credentials, path, answer, timeout_s, reason):
    service = serve({**TWO_SUPPLIES, f"/redfish/v1{path}": answer})
    began_s = time.monotonic()

    assert reason in why_not(service.url, credentials(), timeout_s)
    assert time.monotonic() - began_s < 10.0


def test_endless_body_is_read_up_to_a_mebibyte(serve, credentials):
    sent = []

    def flood(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n")
        try:
            while not handler.server.service.release.is_set():
                handler.wfile.write(b" " * 65536)
                sent.append(65536)
        except OSError:
            handler.close_connection = True

    service = serve({**TWO_SUPPLIES, "/redfish/v1/": flood})

    assert "exceeds 1024 KiB" in why_not(service.url, credentials())
    assert sum(sent) < 20 * MAX_BYTES


def test_redirect_to_another_service_is_not_followed(serve, credentials):
    other = serve({**TWO_SUPPLIES}, password=None)
    target = {"Location": other.url + "/"}
    service = serve({"/redfish/v1/": lambda handler: handler.answer(307, {}, target)})

    assert "/redfish/v1/ has the status 307" in why_not(service.url, credentials())
    assert other.num_connections == 0


@pytest.mark.parametrize("elsewhere", ["http://127.0.0.1:1/steal", "//evil.example/x", "relative"])
def test_link_to_another_service_is_not_followed(serve, credentials, elsewhere):
    service = serve({**TWO_SUPPLIES, "/redfish/v1/": {"Chassis": link(elsewhere)}})

    text = why_not(service.url, credentials())
    assert "foreign host" in text or service.paths() == ["/redfish/v1/", "/evil.example/x"]


def test_connection_closed_by_the_service_is_opened_again(serve, opened):
    service = serve({**TWO_SUPPLIES})
    reader = opened(service)
    metrics = service.resources[f"{SECOND}/Metrics"]

    def last_answer(handler):
        handler.answer(200, metrics)
        handler.close_connection = True  # without announcing it

    service.resources[f"{SECOND}/Metrics"] = last_answer

    assert [watts(reader) for _ in range(3)] == pytest.approx([1958.5] * 3)
