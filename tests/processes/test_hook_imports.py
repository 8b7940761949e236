"""Hooks run after the import of a module, for every kind of import statement; imports are not changed."""

import importlib
import subprocess
import sys
import textwrap

import pytest

from effllm.hooks import _imports


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that writes a module; after the test, imported modules are removed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    finders = list(sys.meta_path)

    def write(name, source=""):
        path = tmp_path.joinpath(*name.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()

    yield write
    sys.meta_path[:] = finders
    _imports._waiting_hooks.clear()
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_hook_of_an_imported_module_runs_immediately(package):
    package("already_there")
    module = importlib.import_module("already_there")
    seen = []

    _imports.when_imported("already_there", seen.append)

    assert seen == [module]


def test_hook_runs_once_after_the_code_of_its_module(package):
    package("comes_later", "def step(): return 1")
    seen = []
    _imports.when_imported("comes_later", lambda module: seen.append(module.step()))
    assert seen == []

    importlib.import_module("comes_later")
    importlib.import_module("comes_later")

    assert seen == [1]


def test_from_import_statement_gets_the_hooked_function(package):
    package("library", "def step(): return 1")
    package("script", "from library import step\nresult = step()")
    _imports.when_imported("library", lambda module: setattr(module, "step", lambda: 2))

    assert importlib.import_module("script").result == 2


def test_hook_added_during_an_import_runs_at_the_end_of_the_import(package):
    package("half", "import asks\ndef step(): return 1")
    package(
        "asks",
        "from effllm.hooks import _imports\nseen = []\n_imports.when_imported('half', lambda m: seen.append(m.step()))",
    )

    importlib.import_module("half")

    assert sys.modules["asks"].seen == [1]
    assert type(sys.modules["half"].__spec__) is importlib.machinery.ModuleSpec


def test_hooks_of_a_package_and_of_its_module_both_run(package):
    package("family.__init__", "from family.child import name")
    package("family.child", "name = 'child'")
    seen = []
    for name in ("family.child", "family"):
        _imports.when_imported(name, lambda module: seen.append(module.__name__))

    importlib.import_module("family")

    assert seen == ["family.child", "family"]


def test_failed_import_raises_its_own_error_and_can_be_repeated(package):
    package("fails", "raise ValueError('as ever')")
    seen = []
    _imports.when_imported("fails", seen.append)

    with pytest.raises(ValueError, match="as ever"):
        importlib.import_module("fails")
    assert seen == []

    package("fails", "fine = True")
    sys.path_importer_cache.clear()
    assert importlib.import_module("fails").fine


def test_missing_module_raises_the_usual_import_error(package):
    _imports.when_imported("no_such_module", pytest.fail)

    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("no_such_module")
    assert importlib.util.find_spec("no_such_module") is None


def test_loader_of_a_hooked_module_is_restored(package):
    package("plain", "x = 1")
    _imports.when_imported("plain", lambda module: None)

    module = importlib.import_module("plain")

    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert "exec_module" not in vars(module.__loader__)
    assert importlib.reload(module) is module
    assert "x = 1" in module.__loader__.get_source("plain")


def test_module_with_a_hook_can_be_run_with_python_m(package, tmp_path):
    package("runs", "print('ran', __name__)")
    program = (
        "import runpy; from effllm.hooks import _imports; _imports.when_imported('runs', print);"
        "runpy.run_module('runs', run_name='__main__')"
    )

    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert done.stdout == "ran __main__\n"
