"""Jobs that span hosts: discovery, encryption and admission, with real hosts, launchers and sockets."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
from hosts import slurm_ranks

from effllm.config.settings import Config, secret_path
from effllm.network import secret

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300), *jobs.needs_torch]

ITERATIONS, TOKENS = 40, 100
PORT = 29555


def torchrun(launch, host, *options, arguments=(), **settings):
    options = ["--nnodes", "2", "--nproc_per_node", "2", *options]
    return launch.on(host).torchrun(options, "store_loop.py", "--iterations", ITERATIONS, *arguments, **settings)


def at_node(node, master):
    return "--node_rank", str(node), "--master_addr", master, "--master_port", str(PORT)


def ranks(launch, hosts, *arguments, **settings):
    return slurm_ranks(launch, hosts, "--iterations", ITERATIONS, *arguments, **settings)


def our_lines(job):
    return [line for line in job.our_errors if "W1121" not in line]


def is_one_job(jobs_of_hosts, num_ranks):
    first = jobs_of_hosts[0]
    summary = first.ledger.summary
    expected = (num_ranks * ITERATIONS * TOKENS, ITERATIONS, "completed")
    assert (summary.tokens, summary.iterations, summary.status) == expected
    assert {row.rank for row in first.ledger.ranks} == set(range(num_ranks))
    assert {row.host for row in first.ledger.ranks} == {"host1", "host2"}
    assert len([one for one in first.runs() if one.is_dir()]) == 1
    assert [our_lines(one) for one in jobs_of_hosts] == [[]] * len(jobs_of_hosts)


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_ranks_on_two_hosts_are_one_job_with_keys(hosts, launch, family):
    one, two = hosts(2)
    master = one.address if family == "IPv4" else one.address6

    nodes = [torchrun(launch, host, *at_node(node, master)) for node, host in enumerate((one, two))]

    is_one_job([node.done(120) for node in nodes], 4)
    assert "unauthenticated" not in nodes[0].ledger.summary.events
    assert stat.S_IMODE(secret_path(Config()).stat().st_mode) == 0o600


def test_ranks_find_the_aggregator_with_a_c10d_rendezvous(hosts, launch):
    pair = hosts(2)
    options = ("--rdzv_backend", "c10d", "--rdzv_endpoint", f"{pair[0].address}:{PORT}", "--rdzv_id", "job-1")

    nodes = [torchrun(launch, host, *options) for host in pair]
    [node.done(120) for node in nodes]

    summary = nodes[0].ledger.summary
    assert (summary.tokens, summary.status) == (4 * ITERATIONS * TOKENS, "completed")
    assert nodes[0].ledger.folder.name == "job-1"


def test_ranks_without_a_torch_store_use_an_address_file(hosts, launch, tmp_path):
    pair = hosts(2)
    runs = tmp_path / "runs"
    runs.mkdir()
    stale = {"endpoint": f"tcp://{pair[0].address}:9", "job": "0123456789abcdef"}  # address of an earlier job
    known = secret.read_or_create(secret_path(Config()))
    file = runs / ".address-4711.0-1"
    file.write_text(json.dumps(secret.sign(known, stale, "4711.0/1")))
    second, first = reversed(ranks(launch, pair, "--step-s", "0.05"))

    is_one_job([first.done(120), second.done(120)], 2)
    assert not file.exists()
    assert not list(runs.glob(".*"))


@pytest.mark.parametrize(
    ("secret_file", "reason"),
    [
        ("missing", "there is no secret {file} on this host: copy it from rank 0's"),
        ("other", "this host's secret differs from rank 0's secret"),
    ],
)
def test_host_without_the_secret_of_rank_0_reports_the_reason_and_still_trains(
    hosts, launch, tmp_path, secret_file, reason
):
    file = tmp_path / secret_file
    if secret_file == "other":
        secret.read_or_create(file)
    first, second = ranks(launch, hosts(2), environ={1: {"EFFICIENTLLM_SECRET_FILE": str(file)}})

    assert (first.wait(60).code, second.wait(60).code) == (0, 0)
    assert len(second.output()["steps"]) == ITERATIONS
    assert reason.format(file=file) in our_lines(second)[0]
    assert file.exists() == (secret_file == "other"), "no second secret is created"
    assert {row.rank for row in jobs.until(lambda: first.ledger.ranks)} == {0}


def test_rank_0_rejects_a_secret_that_other_users_can_read(hosts, launch):
    pair = hosts(2)
    file = secret_path(Config())
    secret.read_or_create(file)
    file.chmod(0o644)
    first, second = ranks(launch, pair)

    assert (first.wait(60).code, second.wait(60).code) == (0, 0)
    assert our_lines(first)[0].endswith(f"chmod 600 {file}")
    assert not [one for one in first.runs() if one.is_dir()]


def test_job_without_keys_works_and_warns_on_every_start(hosts, launch):
    pair = hosts(2)
    first, second = (one.done(120) for one in ranks(launch, pair, security="none", ports="29700-29703"))

    assert first.ledger.summary.tokens == 2 * ITERATIONS * TOKENS
    warning = (
        "EFFICIENTLLM_SECURITY=none: reports are neither encrypted nor checked, so "
        "every process that reaches tcp://10.77.0.1:29700 can read and forge them"
    )
    assert our_lines(first) == [f"[EfficientLLM] {warning}"]
    assert our_lines(second) == []
    assert first.ledger.event_texts("security") == [warning]
    assert not secret_path(Config()).exists()


def test_configured_interface_and_ports_are_used(hosts, launch):
    one, two = pair = hosts(2)
    one.run("ip", "link", "add", "ib0", "type", "veth", "peer", "name", "far")
    one.run("ip", "address", "add", "10.88.0.1/24", "dev", "ib0")
    one.run("ip", "link", "set", "ib0", "up")
    two.run("ip", "route", "add", "10.88.0.0/24", "via", one.address)
    taken = one.start(sys.executable, "-m", "http.server", "--bind", "10.88.0.1", "29700", stderr=subprocess.DEVNULL)

    def listeners():
        return sorted(line.split()[3] for line in one.run("ss", "-Hltn").stdout.splitlines())

    try:
        jobs.until(listeners)
        nodes = ranks(launch, pair, "--step-s", "0.1", interface="ib0", ports="29700-29702")
        jobs.until(lambda: len(listeners()) > 1)
        assert listeners() == ["10.88.0.1:29700", "10.88.0.1:29701"]
        is_one_job([node.done(120) for node in nodes], 2)
    finally:
        taken.kill()
        taken.communicate(timeout=10)


def test_loopback_master_address_uses_the_default_route(hosts, launch):
    one, two = pair = hosts(2)
    one.resolve("head", "127.0.1.1")  # Debian's installer assigns this address to a host's own name
    two.resolve("head", one.address)
    environ = {rank: {"MASTER_ADDR": "head"} for rank in (0, 1)}

    refused, _ = (job.wait(60) for job in ranks(launch, pair, environ=environ, run_name="refused"))
    assert "set EFFICIENTLLM_INTERFACE" in our_lines(refused)[0]

    one.run("ip", "route", "add", "default", "dev", "eth0")
    is_one_job_named = [job.done(120) for job in ranks(launch, pair, environ=environ, run_name="found")]
    assert jobs.Ledger(is_one_job_named[0].runs()[0]).summary.tokens == 2 * ITERATIONS * TOKENS


def test_secrets_are_in_no_argument_environment_file_or_log(hosts, launch, tmp_path):
    pair = hosts(2)
    nodes = ranks(launch, pair, "--step-s", "0.1", run_name="run")
    jobs.until(lambda: nodes[0].runs() and nodes[0].num_windows > 0, 90)
    known = secret_path(Config()).read_text().strip()
    job = nodes[0].ledger.facts["job"]
    hidden = forms(known, job)

    record = next((tmp_path / "runs").glob(".address-*")).read_bytes()
    processes = {pid for node in nodes for pid in jobs.processes(node.token)}
    assert len(processes) >= 5, "two trainers, two agents, one aggregator"
    public = {f"{pid}/{name}": Path(f"/proc/{pid}/{name}").read_bytes() for pid in processes for name in EXPOSED}
    is_one_job([node.done(120) for node in nodes], 2)

    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != secret_path(Config())]
    state = Path(os.environ["XDG_STATE_HOME"])
    files += [path for path in state.rglob("*") if path.is_file()]
    assert len(files) > 8
    exposed = {**public, "record": record, **{str(path): path.read_bytes() for path in files}}
    found = {name for name, content in exposed.items() for one in hidden if one in content}
    assert found == set()
    assert any(job.encode() in content for content in exposed.values()), "the search finds the job"


EXPOSED = ("cmdline", "environ")


def forms(known, job):
    """Return all forms in which the secret and its derived keys could be written."""
    from zmq.utils import z85

    seeds = [known.encode(), bytes.fromhex(known)]
    for salt in ("", job):
        seeds += [secret.derive(known.encode(), purpose, salt) for purpose in ("server", "agents", "record")]
    return [form for seed in seeds for form in (seed, seed.hex().encode(), z85.encode(seed))]


def test_serve_on_a_public_address_needs_the_secret(hosts, launch, tmp_path):
    one, two = hosts(2)
    served = launch.on(one).code(
        "import sys\nfrom effllm.cli import main\nsys.argv = "
        "['effllm', 'serve', '--bind', '10.77.0.1:5555', '--run-name', 'served']\nmain()"
    )
    jobs.until(lambda: "EFFICIENTLLM_ENDPOINT" in served.stdout, 20)
    exports = dict(
        line.strip().removeprefix("export ").split("=") for line in served.stdout.splitlines() if "export" in line
    )
    assert exports == {
        "EFFICIENTLLM_ENDPOINT": "tcp://10.77.0.1:5555",
        "EFFICIENTLLM_SECRET_FILE": str(secret_path(Config())),
    }

    refused = launch.on(two).python("loop.py", endpoint="10.77.0.1:5555", secret_file=tmp_path / "none").wait(40)
    assert "there is no secret" in refused.our_errors[0]
    variables = {name.removeprefix("EFFICIENTLLM_").lower(): value for name, value in exports.items()}
    launch.on(two).python("loop.py", "--iterations", ITERATIONS, **variables).done(40)

    served.done(20)
    assert jobs.Ledger(tmp_path / "runs" / "served").summary.tokens == ITERATIONS * TOKENS


@pytest.mark.long
@pytest.mark.fault("elastic-restart")
def test_next_attempt_ignores_the_address_of_the_first_attempt(hosts, launch):
    pair = hosts(2)
    restarting = ("--nproc_per_node", "1", "--max_restarts", "1")
    nodes = [
        torchrun(launch, host, *at_node(node, pair[0].address), *restarting, arguments=("--at", 25), run_name="run")
        for node, host in enumerate(pair)
    ]
    [node.done(120) for node in nodes]

    windows = [report for report in nodes[0].ledger.windows if report.attempt == 2]
    assert nodes[0].ledger.summary.attempts == 2
    assert {row.rank for row in nodes[0].ledger.ranks if row.attempt == 2} == {0, 1}
    assert windows[-1].iteration == ITERATIONS
