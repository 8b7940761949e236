"""The report of `make check` fails if a package is larger than its budget."""

import code_report
import pytest


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Return a clone with a package of 100 lines, a module of 1 line at the top level, and budgets for both."""
    package = tmp_path / "effllm" / "devices" / "node"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "rapl.py").write_text("x = 1\n" * 100)
    (tmp_path / "effllm" / "cli.py").write_text("x = 1\n")
    monkeypatch.setattr(code_report, "BUDGETS", {"devices": 100, "top level": 1})
    return tmp_path


def test_package_as_large_as_its_budget_passes(clone, capsys):
    assert code_report.main(clone) == 0
    assert "budget" not in capsys.readouterr().out.replace("(budgets: 101)", "")


def test_package_above_its_budget_fails_with_the_excess(clone, capsys):
    (clone / "effllm" / "devices" / "nvml.py").write_text("x = 1\n" * 7)

    assert code_report.main(clone) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "effllm/devices: 107 lines are 7 above the budget of 100" in lines
    assert "the reason, which a user must be able to accept" in lines[-1]


def test_module_at_the_top_level_and_new_package_have_budgets_too(clone, capsys):
    (clone / "effllm" / "cli.py").write_text("x = 1\n" * 3)
    (clone / "effllm" / "new").mkdir()
    (clone / "effllm" / "new" / "__init__.py").write_text("x = 1\n")

    assert code_report.main(clone) == 1
    printed = capsys.readouterr().out
    assert "effllm/new: 1 lines are 1 above the budget of 0" in printed
    assert "effllm/top level: 3 lines are 2 above the budget of 1" in printed


@pytest.mark.parametrize(("unused", "is_printed"), [(50, False), (51, True)])
def test_package_far_below_its_budget_is_named_without_a_failure(clone, capsys, monkeypatch, unused, is_printed):
    monkeypatch.setitem(code_report.BUDGETS, "devices", 100 + unused)

    assert code_report.main(clone) == 0
    assert ("effllm/devices: lower the budget to 100" in capsys.readouterr().out) is is_printed
