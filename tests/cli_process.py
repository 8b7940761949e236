"""Runs the command line in real processes, in a separate folder for each test."""

import json
import os
import subprocess
import sys

import jobs


class CommandLine:
    """Starts ``python -m effllm`` in one folder, with a terminal width of 80 columns."""

    def __init__(self, folder):
        self.folder = folder
        self._started = []

    def environ(self, **variables):
        return {**os.environ, "COLUMNS": "80", **variables}

    def run(self, *arguments, **variables):
        return subprocess.run(
            [sys.executable, "-m", "effllm", *arguments],
            env=self.environ(**variables),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def start(self, *arguments, **variables):
        process = subprocess.Popen(
            [sys.executable, "-m", "effllm", *arguments],
            env=self.environ(**variables),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
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
