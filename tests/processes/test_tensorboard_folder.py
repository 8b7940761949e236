"""The folder of the event file; the framework's folder is used only if no setting has another folder."""

import pytest

SCRIPT = """
import sys, time
import effllm

effllm.initialize_efficientllm_metrics(10, facts={"tensorboard_dir": sys.argv[1]} if len(sys.argv) > 1 else {})
collector = effllm.get_metrics_collector()
for iteration in range(4):
    collector.record_iteration_start()
    time.sleep(0.01)
    collector.record_iteration_end(8, 1)
effllm.finalize_efficientllm_metrics()
"""


@pytest.fixture
def run(launch, tmp_path):
    """Return a function that runs a loop with a framework's folder of event files and returns the run folder."""
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT)

    def start(*arguments, **settings):
        return launch.python(script, *arguments, log_interval=2, **settings).done().ledger.folder

    return start


def event_files(folder):
    return [path.name for path in folder.glob("events.out.tfevents.*")] if folder.is_dir() else []


def test_event_file_is_below_the_folder_of_the_framework(run, tmp_path):
    framework = tmp_path / "tensorboard of the framework"
    framework.mkdir()

    folder = run(framework)

    assert len(event_files(framework / "efficientllm")) == 1
    assert not event_files(folder)


def test_event_folder_of_the_framework_on_another_host_is_not_used(run, tmp_path):
    folder = run(tmp_path / "elsewhere")

    assert len(event_files(folder)) == 1
    assert not (tmp_path / "elsewhere").exists()


def test_folder_setting_of_the_user_replaces_the_framework_folder(run, tmp_path):
    framework = tmp_path / "framework"
    framework.mkdir()

    folder = run(framework, sinks=f"tensorboard:dir={tmp_path / 'chosen'}")

    assert len(event_files(tmp_path / "chosen" / folder.name)) == 1
    assert not event_files(framework / "efficientllm")
    assert not event_files(folder)


def test_event_file_is_in_the_run_folder_by_default(run):
    assert len(event_files(run())) == 1
