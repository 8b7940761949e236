"""No file unpickles or evaluates data, or starts a shell: the tests search for unsafe calls by name."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    str(path.relative_to(ROOT)): path
    for folder in ("effllm", "launch", "integration", "benchmarks", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
} | {"setup.py": ROOT / "setup.py"}

#: Modules that create objects from bytes; such bytes can call any function.
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "jsonpickle", "marshal", "shelve", "joblib", "code"}

#: Names of unsafe functions, in any module: pyzmq, torch.distributed, pandas, yaml, subprocess.
NAMES = {
    "recv_pyobj", "send_pyobj", "gather_object", "all_gather_object", "broadcast_object_list", "scatter_object_list",
    "read_pickle", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "getoutput", "getstatusoutput",
}  # fmt: skip

#: Whole names.
CALLS = {
    "eval", "exec", "compile", "__import__", "yaml.load", "yaml.load_all", "torch.load", "numpy.load", "np.load",
    "os.system", "os.popen", "builtins.eval", "builtins.exec", "runpy.run_path", "runpy.run_module",
}  # fmt: skip

SAFE_LOADERS = {"SafeLoader", "CSafeLoader", "yaml.SafeLoader", "yaml.CSafeLoader"}

#: Unsafe calls that are allowed, with the reason.
ALLOWED = {
    "effllm/commands/run.py": dict.fromkeys(
        ("exec", "compile", "runpy.run_path", "runpy.run_module"), "the training script that it is asked to run"
    ),
    "tests/processes/test_instruments_page.py": dict.fromkeys(
        ("exec", "compile"), "the examples of docs/instruments.md"
    ),
    "tests/processes/test_run_folder_page.py": {"exec": "runs the examples of a page of this repository"},
    "tests/nvml_library.py": {"pickle": "what a test and a child of its own say to each other through a pipe"},
}


LAST_NAMES = NAMES | {name.rpartition(".")[2] for name in CALLS}


def called(nodes):
    """Yield the names of the forbidden calls of a file."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if "shell" in keywords and ast.unparse(keywords["shell"]) != "False":
            yield "shell=True"
        if getattr(node.func, "attr", getattr(node.func, "id", None)) not in LAST_NAMES:
            continue
        name = ast.unparse(node.func)
        if name in ("yaml.load", "yaml.load_all"):
            loaders = [*node.args[1:], *(value for key, value in keywords.items() if key == "Loader")]
            if SAFE_LOADERS & {ast.unparse(loader) for loader in loaders}:
                continue
        if name in CALLS or name.rpartition(".")[2] in NAMES:
            yield name


def imported(nodes):
    """Yield the names of the forbidden imports of a file."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for alias in node.names:
                if module.split(".")[0] in MODULES or alias.name in NAMES or f"{module}.{alias.name}" in CALLS:
                    yield f"{module}.{alias.name}"


#: A file without these words has no unsafe call; most files need not be parsed.
WORDS = re.compile(rf"\b(?:{'|'.join(MODULES | LAST_NAMES | {'shell'})})\b")


def unsafe(source):
    if not WORDS.search(source):
        return set()
    nodes = list(ast.walk(ast.parse(source)))
    return {*called(nodes), *imported(nodes)}


def test_nothing_is_unpickled_evaluated_or_given_to_a_shell():
    found = {name: unsafe(path.read_text()) for name, path in FILES.items()}

    assert {name: calls for name, calls in found.items() if calls} == {name: set(ALLOWED[name]) for name in ALLOWED}


def test_searched_files_exist():
    assert {"effllm/network/transport.py", "benchmarks/__main__.py", "tests/scripts/loop.py", "setup.py"} <= set(FILES)
    assert any(name.startswith("integration/") for name in FILES)


UNSAFE = [
    "import pickle",
    "from dill import loads",
    "import marshal as m",
    "eval('1')",
    "exec(text)",
    "compile(text, 'f', 'exec')",
    "socket.recv_pyobj()",
    "socket.send_pyobj(1)",
    "dist.gather_object(1)",
    "torch.distributed.broadcast_object_list([1])",
    "from torch.distributed import all_gather_object",
    "torch.load('f')",
    "yaml.load(text)",
    "yaml.load(text, Loader=yaml.FullLoader)",
    "yaml.unsafe_load(text)",
    "from yaml import load",
    "subprocess.run('ls', shell=True)",
    "subprocess.run('ls', shell=flag)",
    "os.system('ls')",
    "from os import popen",
    "np.load('f', allow_pickle=True)",
    "pandas.read_pickle('f')",
]
SAFE = [
    "model.eval()",
    "yaml.safe_load(t)",
    "yaml.load(t, Loader=yaml.SafeLoader)",
    "re.compile('x')",
    "run(c, shell=False)",
]


def test_search_finds_unsafe_sources_and_no_safe_source():
    assert [source for source in UNSAFE if not unsafe(source)] == []
    assert [source for source in SAFE if unsafe(source)] == []
