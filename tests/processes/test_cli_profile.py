"""The command effllm profile: its report, the process that loads the GPU, and the use of the result in runs.

A fake torch replaces torch: its matrix products sleep and change no sensor value.
"""

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jobs
import pytest
from known_load import KnownLoad
from nvml_library import Gpu, Trace, bursts, flat, steps

from effllm import sensor_profile as profiling
from effllm.config.settings import cache_folder
from effllm.devices import Site
from effllm.energy import calibration
from effllm.records.rank import Sensor
from effllm.sensor_profile.load import LoadUnavailable, TorchLoad

pytestmark = [pytest.mark.long, pytest.mark.alone]

NS = 1_000_000_000
UUID = "GPU-7d1f9c3b-1111-2222-3333-444444444444"
H100 = "NVIDIA H100 80GB HBM3"
SERIAL = "1320021234567"

TORCH = """
import time
__version__ = "9.9.0"
bfloat16, float16 = "torch.bfloat16", "torch.float16"
class version:
    cuda, hip = "13.9", None
class cuda:
    class Event:
        def record(self): self.due_s = time.monotonic() + 0.001
        def synchronize(self): time.sleep(max(self.due_s - time.monotonic(), 0))
    is_available = staticmethod(lambda: True)
    get_device_capability = staticmethod(lambda: (9, 0))
    synchronize = staticmethod(lambda: time.sleep(0.0002))
def randn(*size, device, dtype):
    return size
empty = randn
def mm(one, other, out):
    time.sleep(0.0002)
"""


def put_torch(folder, text=TORCH):
    """Write a fake torch; return the environment variable with its folder."""
    package = folder / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    return {"PYTHONPATH": str(package.parent)}


@pytest.fixture
def stand_in_torch(tmp_path, monkeypatch):
    """Return a function that makes started processes import a fake torch; its source text is an argument."""
    return lambda text=TORCH: monkeypatch.setenv("PYTHONPATH", put_torch(tmp_path, text)["PYTHONPATH"])


SENSOR = {"tick_s": 0.1, "duty_s": 0.025, "power_mode": "held", "power_usage": "average"}


def idle_gpu(library, folder):
    """Write a trace of an H100 with a power of 79 to 81 W."""
    trace = Trace(library, folder / "trace")
    idle = {"power": steps(79.0, 81.0, 0.01), "utilization": flat(0.0), "serial": SERIAL}
    trace.write(Gpu(UUID, "00000000:01:00.0", name=H100, **idle, **SENSOR))
    return trace


@pytest.fixture
def traced(library, tmp_path):
    return idle_gpu(library, tmp_path)


@pytest.fixture(scope="module")
def idle(library, tmp_path_factory):
    """Profile an idle GPU without CUDA in torch; return the output, the report and the cached calibration."""
    folder = tmp_path_factory.mktemp("idle")
    without_cuda = TORCH.replace("lambda: True", "lambda: False").replace('"13.9"', "None")
    environ = {**idle_gpu(library, folder).environment(), **put_torch(folder, without_cuda)}
    done = subprocess.run(
        [sys.executable, "-m", "effllm", "profile", "--seconds", "10", "--save", "h100.json"],
        env={**os.environ, **environ, "COLUMNS": "80", "XDG_CACHE_HOME": str(folder / "cache")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kept = calibration.load(folder / "cache" / "efficientllm" / "calibration", H100, "570.0")
    return SimpleNamespace(shown=done.stdout, found=json.loads((folder / "h100.json").read_text()), kept=kept)


def test_only_idle_values_are_measured_and_stored_if_torch_lacks_cuda(idle):
    found, kept = idle.found, idle.kept

    assert found["unmeasured"] == ["lag, windows and the loaded GPU: torch 9.9.0 is built without CUDA"]
    assert (found["sensor"]["duty"], found["measured_lag"]) == (0.25, False)
    assert [found[name]["period_s"] for name in ("counter", "power")] == pytest.approx([0.1] * 2, rel=0.01)
    assert {"instant power", "average power", "total energy"} <= {one["name"] for one in found["fields"]}
    assert {"energy", "utilization", "memory", "SM clock"} <= {one["name"] for one in found["calls"]}
    assert kept.sensor.tick_s == pytest.approx(0.1, rel=0.01)
    assert (kept.sensor.duty, kept.sensor.gain_error, kept.measured_lag) == (0.25, 0.05, False)


def test_report_contains_no_host_name_user_name_or_gpu_serial(idle):
    output = idle.shown + json.dumps(idle.found)

    secrets = [os.uname().nodename, str(Path.home()), UUID, UUID[4:12], SERIAL, "/tmp", "pytest"]
    assert not [secret for secret in secrets if secret in output]
    assert len(idle.found["board"]["uuid"]) == 8


def test_table_fits_80_columns_and_has_no_progress_lines(idle):
    shown = " ".join(idle.shown.split())

    assert max(map(len, idle.shown.splitlines())) <= 80
    assert "\x1b" not in idle.shown
    assert shown.startswith(f"{H100}, driver 570.0, limit 700 W (GPU ")
    assert "lag unknown: 0 ± 100 ms is assumed" in shown
    assert "the idle GPU" not in shown
    assert shown.endswith("The report is in h100.json.")


def test_check_shows_the_profile(cli, traced):
    sensor = Sensor(tick_s=0.1, tick_error_s=1e-4, lag_s=-0.0372, lag_error_s=0.005, duty=0.253, is_held=True)
    profile = calibration.Calibration(H100, "570.0", datetime.date.today().isoformat(), sensor, measured_lag=True)
    measured = json.loads(cli.run("check", "--json", **traced.environment()).stdout)["sensor"]
    assert (measured["source"], measured["measured_lag"], cache_folder().exists()) == ("measured here", False, False)

    calibration.store(cache_folder() / "calibration", profile)
    shown = " ".join(cli.run("check", **traced.environment()).stdout.split())
    assert "lag -37.2 ± 5 ms, measures 25 % of the time: both measured" in shown
    assert f"profiled {profile.date}, kept in the cache" in shown


@pytest.mark.parametrize(
    ("arguments", "variables", "why"),
    [
        ([], {}, "no GPU can be read: libnvidia-ml.so.1 is missing"),
        ([], {"EFFICIENTLLM_DEVICE": "simulated"}, "no GPU can be read: device 'simulated' is no GPU"),
        (["--save", "no/such/folder.json"], {}, "--save no/such/folder.json: not a file in an existing folder"),
    ],
)
def test_unusable_gpu_or_option_is_reported_in_one_line(cli, tmp_path, arguments, variables, why):
    done = cli.run("profile", *arguments, LD_LIBRARY_PATH=str(tmp_path), **variables)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"effllm profile: {why}")
    assert done.stderr.count("\n") == 1


def test_missing_gpu_is_reported(cli, traced):
    done = cli.run("profile", "--device", "7", **traced.environment())

    assert done.returncode == 2
    assert "CUDA_VISIBLE_DEVICES='7' shows 0 of 1 GPUs" in done.stderr


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise ImportError('libcudart of /home/me')", "torch cannot be imported (ImportError)"),
        (TORCH.replace("lambda: True", "lambda: False"), "torch 9.9.0 finds no GPU"),
        (TORCH.replace("return size", "raise RuntimeError"), "torch cannot compute on this GPU (RuntimeError)"),
        ("import os; os._exit(3)", "the process that loads the GPU has ended"),
    ],
)
def test_unusable_torch_is_reported_in_one_sentence(stand_in_torch, text, why):
    stand_in_torch(text)
    load = TorchLoad(UUID)

    with pytest.raises(LoadUnavailable) as error:
        load.opened()

    load.close()
    assert str(error.value) == why


def edges_of(load):
    while (edges := load.take_edges()) is None:
        time.sleep(0.01)
    return edges


def test_load_has_the_times_of_its_edges_uses_only_its_gpu_and_ends_when_closed(stand_in_torch):
    own = TORCH.replace('"9.9.0"', "os.environ['CUDA_VISIBLE_DEVICES']")
    stand_in_torch(f"import os\n{own}")
    load = TorchLoad(UUID).opened()
    assert load.name.startswith(f"torch {UUID}, ")

    load.start_stretches([0.05, 0.1, 0.2, 0.1])
    edges = edges_of(load)
    # A pause can start about a millisecond late, because the GPU still works; its timestamp is that later time.
    stretches_s = [(later.time_ns - earlier.time_ns) / NS for earlier, later in pairwise(edges)]
    assert [edge.is_on for edge in edges] == [True, False, True, False, False], "after the end there is no load"
    assert all(real_s >= asked_s for real_s, asked_s in zip(stretches_s, [0.05, 0.1, 0.2, 0.1], strict=True))
    assert sum(stretches_s) < 0.45 + 0.1

    load.start_stretches([60.0])
    began_s = time.monotonic()
    load.close()
    assert time.monotonic() - began_s < 5.0


def test_failing_load_raises(stand_in_torch):
    stand_in_torch(TORCH + FAILS_LATER)
    load = TorchLoad(UUID).opened()
    load.start_stretches([60.0])

    with pytest.raises(LoadUnavailable, match=r"torch failed under load \(RuntimeError\)"):
        edges_of(load)
    load.close()


FAILS_LATER = """
began_s = time.monotonic()
def mm(one, other, out):
    time.sleep(0.0002)
    if time.monotonic() > began_s + 1.5:
        raise RuntimeError("CUDA error: an illegal memory access")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signal_ends_the_load_process_and_no_result_is_written(cli, traced, stand_in_torch, number):
    stand_in_torch()
    process = subprocess.Popen(
        [sys.executable, "-m", "effllm", "profile", "--seconds", "20"],
        env=cli.environ(**traced.environment()),
        cwd=cli.folder,
        stderr=subprocess.PIPE,
    )
    with process:
        children = jobs.until(lambda: children_of(process.pid), within_s=30.0)
        process.send_signal(number)
        assert process.wait(60) in (130, -signal.SIGKILL)

    # A process that imports torch ends only after the import.
    assert not jobs.wait_until_gone(lambda: {pid for pid in children if Path(f"/proc/{pid}").exists()}, within_s=40.0)
    assert calibration.load(cache_folder() / "calibration", H100, "570.0") is None


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_profile_through_nvml_finds_the_true_tick_lag_and_window(library, tmp_path):
    power = bursts(90.0, 620.0, 0.45, 0.5, 11)
    trace = Trace(library, tmp_path / "trace")
    trace.write(Gpu(UUID, "00000000:01:00.0", name=H100, power=power, lag_s=0.04, tick_phase_s=0.02, **SENSOR))

    with trace.reader(Site()) as remote:
        found = profiling.profile(remote, lambda: KnownLoad(power), 12.0)

    # Reads on a busy machine are some ms late, so the tolerances are 4 ms for the lag and 6 ms for the window of 25 ms.
    assert found.counter.period_s == pytest.approx(0.1, rel=1e-3)
    assert found.sensor.lag_s == pytest.approx(0.04 - 0.0375, abs=0.004)
    assert found.counter_response.window_s == pytest.approx(0.025, abs=0.006)
    assert found.sensor.average_s == pytest.approx(1.0, abs=0.02)
    assert not found.sensor.is_held
    assert 0.002 < found.read_every_s < 0.01
