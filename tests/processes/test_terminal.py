"""A real job on a terminal, with a progress bar of the training."""

import os
import pty
import re
import sys
import threading

import jobs
import pyte

LOOP = """
import sys, time
import effllm.efficientllm_metrics as effllm

effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
for iteration in range(1, 41):
    collector.record_iteration_start()
    for part in range(5):
        time.sleep(0.002)
        sys.stdout.write(f"\\r{iteration:3d}/40 |{'#' * part:10}| bar")
        sys.stdout.flush()
    collector.record_iteration_end(100, 2)
    collector.log_metrics(iteration, 10 / iteration)
effllm.finalize_efficientllm_metrics()
"""
WHOLE = re.compile(
    r"""\ *\d+/40\ \|\#*\ *\|\ bar  # of the training
    |it\ \d+\ .*s.*                 # the window
    |\[EfficientLLM\]\ .*|-{3}.*|=+|\ \ .*""",
    re.VERBOSE,
)


def test_console_lines_between_progress_bar_updates_are_complete(launch, tmp_path):
    keyboard, output = pty.openpty()
    shown = bytearray()

    def read():
        try:
            while text := os.read(keyboard, 65536):
                shown.extend(text)
        except OSError:  # all other processes have closed the terminal
            return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    job = launch._job().start([sys.executable, str(script)], launch.environ({"log_interval": 10}), output)
    os.close(output)
    job.wait()
    jobs.until(lambda: b"  Open " in shown)

    screen = pyte.HistoryScreen(80, 24, history=1000)
    pyte.ByteStream(screen).feed(bytes(shown))
    above = ["".join(line[column].data for column in range(80)).rstrip() for line in screen.history.top]
    lines = [line for line in above + [line.rstrip() for line in screen.display] if line]
    begin = next(at for at, line in enumerate(lines) if line.startswith("[EfficientLLM] measuring "))
    del lines[begin : next(at for at, line in enumerate(lines) if at > begin and WHOLE.fullmatch(line))]  # a long path
    lines = lines[: next(at for at, line in enumerate(lines) if "  Open " in line)]
    torn = [line for line in lines if not WHOLE.fullmatch(line)]
    assert torn == []
    windows = [line for line in lines if line.startswith("it ")]
    assert [line.split()[1] for line in windows] == ["10", "20", "30", "40"]
    start = next(at for at, line in enumerate(lines) if "] Run completed" in line)
    assert len(lines) - start <= 14
