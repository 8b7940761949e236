"""effllm/config/spawn.py: child processes import from the paths of the trainer, but never from the current folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import effllm

PACKAGE = Path(effllm.__file__).parent

REPORT = "import json, sys; open({path!r}, 'w').write(json.dumps([list(sys.flags), sys.path]))"
PARENT = """
import json, os, sys
from effllm.config.spawn import spawn
print(json.dumps([list(sys.flags), sys.path]), flush=True)
code = spawn("timeit", ["-n1", "-r1", sys.argv[1]], []).wait()  # the one module whose main takes a program
sys.exit(code)
"""
since_3_11 = pytest.mark.skipif(sys.version_info < (3, 11), reason="safe paths need Python 3.11")


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ([], {}),
        (["-I"], {}),
        (["-E"], {}),
        (["-s"], {}),
        pytest.param(["-P"], {}, marks=since_3_11),
        pytest.param([], {"PYTHONSAFEPATH": "1"}, marks=since_3_11),
        ([], {"PYTHONNOUSERSITE": "1"}),
    ],
)
def test_modules_are_imported_from_the_paths_of_the_trainer(tmp_path, options, variables):
    given = tmp_path / "given"
    given.mkdir()
    path = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, *options, "-c", PARENT, REPORT.format(path=str(path))],
        env={**os.environ, "PYTHONPATH": str(given), **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    trainers_flags, trainers_path = json.loads(done.stdout)
    flags, (_, *modules_path) = json.loads(path.read_text())  # timeit adds "." before all paths

    assert flags == trainers_flags
    assert (str(given) in modules_path) == (str(given) in trainers_path)
    assert not {"", ".", str(tmp_path)} & set(map(str, modules_path))


@since_3_11
@pytest.mark.faults
def test_modules_on_pythonpath_are_found_if_safe_path_is_set(launch, tmp_path):
    first = tmp_path / "first"
    first.mkdir()
    import msgspec

    (first / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    job = launch.python("loop.py", environ={"PYTHONSAFEPATH": "1", "PYTHONPATH": str(first)}).done()

    assert job.ledger.summary.tokens == 2000


def test_child_imports_effllm_from_the_folder_of_its_parent(tmp_path):
    package = tmp_path / "effllm"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "beside.py").write_text("import pathlib\ndef main(arguments): pathlib.Path(arguments[0]).touch()\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from effllm.config.spawn import spawn; "
    code += "sys.exit(spawn('beside', [sys.argv[1]], []).wait())"

    subprocess.run([sys.executable, "-c", code, str(tmp_path / "done")], cwd="/", check=True)

    assert (tmp_path / "done").exists()
