"""Runs the command line, in real processes or in the process of the test, in a separate folder for each test."""

import contextlib
import io
import json
import os
import subprocess
import sys

import jobs
import pytest

from effllm import cli

QUIET = {"EFFICIENTLLM_SINKS": "none", "EFFICIENTLLM_DEVICE": "simulated", "EFFICIENTLLM_COLLECTION_INTERVAL": "0.1"}
LOOP = """
import os, sys, time
import effllm
collector = effllm.initialize_efficientllm_metrics(1000)
for _ in range(10):
    collector.record_iteration_start()
    collector.record_iteration_end(100, 1)
"""


class CommandLine:
    """Starts ``python -m effllm`` in one folder, with a terminal width of 80 columns."""

    def __init__(self, folder):
        self.folder = folder
        self._started = []

    def environ(self, **variables):
        return {**os.environ, "COLUMNS": "80", **variables}

    def run(self, *arguments, **variables):
        command = [sys.executable, "-m", "effllm", *arguments]
        options = {"env": self.environ(**variables), "cwd": self.folder, "timeout": 100}
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)

    def call(self, *arguments, **variables):
        """Return the same as `run`, in a tenth of the time: for commands that only read and print."""
        out, errors = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", ["effllm", *arguments])
            for name, value in {"COLUMNS": "80", **variables}.items():
                patch.setenv(name, value)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
                try:
                    code = cli.main()
                except SystemExit as end:
                    code = end.code
        return subprocess.CompletedProcess(arguments, code or 0, out.getvalue(), errors.getvalue())

    def start(self, *arguments, **variables):
        command = [sys.executable, "-m", "effllm", *arguments]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, env=self.environ(**variables), cwd=self.folder, **streams)
        self._started.append(process)
        return process

    def script(self, text, name="train.py"):
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def summary(self, folder="efficientllm_runs"):
        """Return the only summary; wait until its run has ended."""

        def over():
            found = [json.loads(path.read_text()) for path in (self.folder / folder).glob("*/summary.json")]
            return [one for one in found if one["status"] != "running"]

        [summary] = jobs.until(over)
        return summary

    def close(self):
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def read_until(process, text):
    """Return the output lines of a process up to the first line with ``text``."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"it ended without {text!r}: {''.join(lines)}")
