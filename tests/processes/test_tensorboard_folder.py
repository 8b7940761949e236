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


@pytest.mark.parametrize(
    ("framework", "is_here", "sinks", "place"),
    [
        ("framework", True, None, "framework/efficientllm"),
        ("framework", False, None, "runs/mine"),  # the folder of another host
        ("framework", True, "tensorboard:dir={}/chosen", "chosen/mine"),
        (None, False, None, "runs/mine"),
    ],
    ids=["framework", "framework of another host", "setting", "default"],
)
def test_event_file_is_in_one_folder(launch, tmp_path, framework, is_here, sinks, place):
    (tmp_path / "loop.py").write_text(SCRIPT)
    if is_here:
        (tmp_path / framework).mkdir()
    arguments = [tmp_path / framework] if framework else []
    settings = {"sinks": sinks.format(tmp_path)} if sinks else {}
    launch.python(tmp_path / "loop.py", *arguments, log_interval=2, run_name="mine", **settings).done()

    (file,) = tmp_path.rglob("events.out.tfevents.*")
    assert file.parent == tmp_path / place
