"""The Makefile on machines without its requirements: one line has the reason."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases import cases

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def clone(tmp_path):
    """Return a folder with the files of a clone that make reads before it builds."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def make(clone, *arguments):
    inherited = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON")}
    return subprocess.run(
        ["make", *arguments], cwd=clone, env=inherited, capture_output=True, text=True, timeout=200, check=False
    )


def python_where(clone, statement):
    """Make a python that runs ``statement`` before every program; return the argument for make."""
    python = clone / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; {statement}\n$2"\n')
    python.chmod(0o755)
    return f"PYTHON={python}"


TESTS = [
    "test-unit",
    "test",
    "test-faults",
    "test-trainer",
    "test-frameworks",
    "test-llama-factory",
    "test-spark",
    "test-all",
]


@cases("target", ["demo", *TESTS, "check", "docs", "bench"])
def test_python_older_than_3_10_is_rejected(clone, target):
    done = make(clone, target, python_where(clone, "sys.version_info = (3, 9, 18)"))

    assert done.returncode != 0
    assert done.stderr.startswith(f"make: Python 3.10 or newer is needed, but {clone}/python is 3.9: ")


def test_missing_python_is_reported_with_its_name(clone):
    done = make(clone, "check", "PYTHON=python-of-nowhere")

    assert done.stderr.startswith("make: there is no python-of-nowhere: ")


def test_python_without_venv_is_reported_with_the_package_to_install(clone):
    done = make(clone, "check", python_where(clone, "sys.modules['ensurepip'] = None"))

    assert done.returncode != 0
    assert "apt install python3-venv" in done.stderr.splitlines()[0]
    assert not (clone / ".venv").exists()


def test_every_pinned_requirement_is_declared_in_pyproject(clone):
    requirement = re.compile(r'"([\w-]+)(?:>=[^"]*)?"')
    declared = {name.lower() for name in requirement.findall((clone / "pyproject.toml").read_text())}
    pinned = set(re.findall(r"^([\w-]+)==", (clone / "constraints.txt").read_text(), re.MULTILINE))

    assert {name for name in pinned if name.lower() not in declared} == set()
