"""No file builds objects from bytes, or runs text, by a call that ruff and bandit do not find.

`make check` finds pickle, shelve, marshal, eval, exec, yaml.load, torch.load, and shells.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("effllm", "launch", "integration", "benchmarks", "tests/scripts")

#: Functions of pyzmq, torch.distributed, NumPy, PyYAML, subprocess and Python, and modules that unpickle.
UNSAFE = re.compile(
    r"\b(recv_pyobj|send_pyobj|gather_object|all_gather_object|broadcast_object_list|scatter_object_list"
    r"|(?:np|numpy)\.load|full_load|full_load_all|unsafe_load_all|getoutput|getstatusoutput"
    r"|(?<!\.)compile|__import__|runpy\.\w+)\("
    r"|^\s*(?:import|from) (cloudpickle|joblib|jsonpickle|code)\b",
    re.MULTILINE,
)
#: `effllm run` runs the training script that it is given.
ALLOWED = {"effllm/commands/run.py": {"compile", "runpy.run_path", "runpy.run_module"}}


def unsafe(source):
    return {call or module for call, module in UNSAFE.findall(source)}


def test_no_file_has_an_unsafe_call_that_the_linters_do_not_find():
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): unsafe(path.read_text()) for path in paths}

    assert {name: calls for name, calls in found.items() if calls} == ALLOWED


def test_search_finds_unsafe_sources_and_no_safe_source():
    found = [
        "socket.recv_pyobj()",
        "dist.gather_object(1)",
        "np.load('f', allow_pickle=True)",
        "  from joblib import x",
    ]
    assert [source for source in (*found, "compile(text, 'f', 'exec')") if not unsafe(source)] == []
    assert [source for source in ("re.compile('x')", "json.load(f)", "import codecs") if unsafe(source)] == []
