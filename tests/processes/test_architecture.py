"""Layers of packages: modules import only from lower layers, the import of effllm is cheap, and no call is unsafe."""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import effllm

PACKAGE = Path(effllm.__file__).parent
MODULES = {
    ".".join(("effllm", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# A package may import only the packages to its left.  Packages between two "<" do not import each other.
LAYERS = """
config < records < metrics, memory < views.text < store < network, devices < energy < sinks, job
< trainer, agent, server < instruments < hooks, sensor_profile < analysis < views < attach < effllm < commands
< efficientllm_metrics, cli < __main__
"""
LEVELS = {name.strip(): level for level, names in enumerate(LAYERS.split("<")) for name in names.split(",")}

# Modules that the training process imports; they may import only the standard library, and must not fail.
IN_TRAINING = [
    "effllm",
    "effllm.trainer.collector",
    "effllm.trainer.loop",
    "effllm.trainer.inference",
    "effllm.trainer.recorder",
    "effllm.trainer.watched_recorder",
    "effllm.records.ring",
    "effllm.config.settings",
    "effllm.config.place",
    "effllm.network.secret",
    "effllm.network.discovery",
    "effllm.attach",
    "effllm.hooks",
    "effllm.instruments.energy",
    "effllm.instruments.metrics",
    "effllm.instruments.profiling",
    "effllm.instruments.results_csv",
    "effllm.instruments.run_results",
    "effllm.instruments.token_counter",
]


def package(module):
    """Return the package of a module; for a module at the top level, return the name of the module."""
    if module.startswith("effllm.views.text"):  # the texts of the console and of the store
        return "views.text"
    return module.split(".")[1] if "." in module else module


@cache
def nodes(module):
    """Return the nodes of a module's source."""
    return list(ast.walk(ast.parse(MODULES[module].read_text())))


def imports(module):
    """Yield the effllm modules that a module imports, at its top level or inside functions."""
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "effllm")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names if (node.module or "").split(".")[0] == "effllm" else ():
                inner = f"{node.module}.{alias.name}"
                if (node.module, alias.name) != ("effllm", "__version__"):
                    yield inner if inner in MODULES else node.module


def test_agent_does_not_import_the_aggregator():
    heavy = {"numpy", "tensorboard", "effllm.server.process", "effllm.job.account"}

    assert heavy & modules_imported_by("effllm.agent.agent") == set()


def test_module_search_finds_known_modules_and_imports():
    assert {"effllm", "effllm.records.rank", "effllm.devices", "effllm.devices.nvml"} <= set(MODULES)
    assert "effllm.records.rank" in set(imports("effllm.job.account"))
    assert "effllm.metrics" in set(imports("effllm.job.reporting")), "from effllm import metrics"


def test_packages_import_only_from_packages_of_lower_layers():
    not_left = [
        f"{module} imports from {other}, which is not left of {own}"
        for module in MODULES
        for own in [package(module)]
        for other in {package(name) for name in imports(module)} - {own}
        if LEVELS[other] >= LEVELS[own]
    ]

    assert not_left == []


def test_modules_do_not_import_each_other_in_a_cycle():
    order = list(TopologicalSorter({module: set(imports(module)) for module in MODULES}).static_order())

    assert set(order) == set(MODULES)


ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def uses_of_the_environment(module):
    """Yield the names of ``os`` for the environment that a module uses or imports."""
    for node in nodes(module):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and ast.unparse(node.value) == "os":
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from ENVIRONMENT & {alias.name for alias in node.names}


def test_only_the_module_switches_reads_the_environment():
    used = {module: set(uses_of_the_environment(module)) for module in MODULES}

    assert {module: names for module, names in used.items() if names} == {"effllm.config.switches": {"environ"}}


def test_no_module_has_a_generic_name_such_as_utils():
    words = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "base", "core"}

    assert [module for module in MODULES if set(module.split(".")) & words] == []


def test_names_of_test_files_are_unique():
    """The folders of tests are no packages: two files of one name would be one module."""
    times = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))

    assert [name for name, count in times.items() if count > 1] == []


def modules_imported_by(*modules):
    """Return the modules that a new interpreter loads for an import of ``modules``."""
    program = f"import sys; had = set(sys.modules); import {', '.join(modules)}; print(*(set(sys.modules) - had))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_training_process_imports_only_the_standard_library():
    tops = {name.split(".")[0] for name in modules_imported_by(*IN_TRAINING)}

    assert tops - {"effllm"} - sys.stdlib_module_names == set()


def test_import_of_the_package_imports_no_other_module_of_effllm():
    assert {name for name in modules_imported_by("effllm") if name.startswith("effllm.")} == set()


def test_collector_does_not_import_records_or_sockets():
    assert not {"effllm.records.rank", "effllm.network.transport", "zmq", "msgspec"} & modules_imported_by(
        "effllm.trainer.collector"
    )


def test_effllm_and_the_original_module_export_the_same_objects():
    original = importlib.import_module("effllm.efficientllm_metrics")

    for name in set(effllm._HOMES) - {"EfficientLLMCallback"}:  # the callback needs transformers
        home = importlib.import_module(effllm._HOMES[name])
        assert getattr(effllm, name) is getattr(original, name) is getattr(home, name), name


def test_function_dir_returns_the_public_names():
    original = importlib.import_module("effllm.efficientllm_metrics")

    assert sorted(dir(effllm)) == sorted(effllm.__all__)
    assert sorted(dir(original)) == sorted(original.__all__) == sorted(set(effllm.__all__) - {"__version__"})
    assert len(set(effllm.__all__)) == len(effllm.__all__)


def test_unknown_name_raises_an_attribute_error():
    for package in ("effllm", "effllm.efficientllm_metrics"):
        with pytest.raises(AttributeError, match="has no attribute 'metrics_manager'"):
            importlib.import_module(package).metrics_manager  # noqa: B018 - the access is the test


ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("effllm", "launch", "integration", "benchmarks", "tests/scripts")

# `make check` finds pickle, shelve, marshal, eval, exec, yaml.load, torch.load, and shells.
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
