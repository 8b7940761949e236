"""The TaskProlog of a site, run by a real Slurm: the job is measured, and Prometheus can find and read its page."""

import json
import ssl
import urllib.request
from pathlib import Path

import jobs
import pytest
import redfish_service
from prometheus_server import TOKEN, private_file

pytest_plugins = ["slurm"]
pytestmark = [pytest.mark.faults, pytest.mark.fault("slurm"), pytest.mark.xdist_group("slurm")]  # one Slurm per machine

PROLOG = Path(__file__).resolve().parents[2] / "configs" / "site" / "taskprolog.sh"


@pytest.fixture
def site(tmp_path):
    """Return a TaskProlog with the folders of this test, and make a home folder with a certificate and a token."""
    files = tmp_path / "home" / ".config" / "efficientllm"
    files.mkdir(parents=True)
    if redfish_service.certificate(files) is None:
        pytest.skip("no openssl: no certificate can be made")
    (files / "certificate.pem").rename(files / "cert.pem")
    private_file(files / "token", TOKEN)
    prolog = tmp_path / "taskprolog.sh"
    text = PROLOG.read_text().replace("/srv/effllm-", f"{tmp_path}/").replace("INTERFACE=ib0", "INTERFACE=127.0.0.1")
    prolog.write_text(text)
    prolog.chmod(0o755)
    for name in ("targets", "ledger"):
        (tmp_path / name).mkdir(mode=0o700)
    return prolog


def start(launch, slurm, site, **settings):
    environ = {**launch.environ(settings), **slurm.environ, "HOME": str(site.parent / "home")}
    command = ["srun", "-n1", "--quiet", f"--task-prolog={site}", jobs.sys.executable, str(jobs.SCRIPTS / "loop.py")]
    return launch._job().start([*command, "--until", "enough"], environ)


def test_prolog_measures_a_job_and_announces_its_page(launch, slurm, site):
    job = start(launch, slurm, site, log_interval=10)
    (path,) = jobs.until(lambda: list((site.parent / "targets").glob("*.json")))
    ((target,), labels) = json.loads(path.read_text())[0].values()
    trusted = ssl.create_default_context(cafile=site.parent / "home/.config/efficientllm/cert.pem")
    request = urllib.request.Request(
        f"{labels['__scheme__']}://{target}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}
    )

    def info():
        with urllib.request.urlopen(request, timeout=60, context=trusted) as answer:
            lines = answer.read().decode().splitlines()
        return next(line for line in lines if line.startswith("efficientllm_run_info"))

    jobs.until(lambda: 'partition="main"' in info())
    job_id = slurm.job_id()
    assert f'job_id="{job_id}"' in info()
    (job.folder / "enough").touch()
    job.wait()
    jobs.until(lambda: not path.exists())
    ledger = site.parent / "ledger"
    (line,) = jobs.until(lambda: [one for file in ledger.iterdir() for one in file.read_text().splitlines()])
    assert json.loads(line)["job_id"] == job_id


def test_user_who_opts_out_is_not_measured(launch, slurm, site):
    job = start(launch, slurm, site, metrics_enabled=0)
    (job.folder / "enough").touch()
    job.wait()

    assert job.code == 0 and job.runs() == []
    assert list((site.parent / "targets").iterdir()) == list((site.parent / "ledger").iterdir()) == []
