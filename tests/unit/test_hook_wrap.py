"""Wrappers around a framework's functions change no behaviour; a failing hook does not affect the framework."""

import inspect
from types import SimpleNamespace

import pytest

from effllm.hooks import _wrap
from effllm.hooks._wrap import Guard, around
from effllm.trainer import ownership
from effllm.trainer.ownership import ACCELERATE, CORE, EXPLICIT, FRAMEWORK, OPTIMIZER


@pytest.fixture(autouse=True)
def reset_warnings(monkeypatch):
    monkeypatch.setattr(_wrap, "_printed", set())
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def train_step(forward, data, *, config=None):
    """Take a step."""
    if data == "bad":
        raise ValueError("of the framework")
    return [forward, data, config]


def module():
    return SimpleNamespace(train_step=train_step)


def test_wrapped_function_keeps_its_arguments_and_result():
    framework, seen = module(), []

    assert around(
        framework, "train_step", Guard("x"), before=lambda call: 7, after=lambda *given: seen.append(given[::2])
    )

    result = framework.train_step("f", "d", config="c")
    assert result == ["f", "d", "c"]
    assert seen == [(7, result)] and seen[0][1] is result
    assert framework.train_step.__doc__ == "Take a step."
    assert inspect.signature(framework.train_step) == inspect.signature(train_step)


def test_arguments_are_found_by_name_in_any_position():
    framework, seen = module(), []

    def look(call):
        seen.append([call.get(name, "-") for name in ("data", "config", "other")])

    around(framework, "train_step", Guard("x"), before=look)

    framework.train_step("f", "d")
    framework.train_step(data="d", forward="f", config="c")

    assert seen == [["d", None, "-"], ["d", "c", "-"]]


def test_exception_of_the_framework_is_raised_after_the_failed_hook():
    framework, seen = module(), []
    around(framework, "train_step", Guard("x"), before=lambda call: 7, after=pytest.fail, failed=seen.append)

    with pytest.raises(ValueError, match="of the framework"):
        framework.train_step("f", "bad")
    assert seen == [7]


@pytest.mark.parametrize("place", ["before", "after"])
def test_failing_hook_warns_once_and_the_function_continues(place, capsys):
    framework, calls = module(), []

    def fails(*_):
        calls.append(place)
        raise RuntimeError("of the hook")

    around(framework, "train_step", Guard("the framework"), **{place: fails})

    assert [framework.train_step("f", n) for n in range(3)] == [["f", n, None] for n in range(3)]
    assert calls == [place]
    assert capsys.readouterr().err == (
        "[EfficientLLM] the framework is not measured any more, training goes on: RuntimeError: of the hook\n"
    )


def test_only_the_first_rank_warns_of_a_failing_hook(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    _wrap.print_once("a line")

    assert capsys.readouterr().err == ""


def test_second_wrapping_has_no_effect():
    framework, seen = module(), []
    for _ in range(2):
        assert around(framework, "train_step", Guard("x"), before=lambda call: seen.append(1))
    framework.train_step("f", "d")

    assert seen == [1]


def test_missing_function_is_not_wrapped():
    assert not around(module(), "renamed", Guard("x"))
    assert not around(SimpleNamespace(renamed=3), "renamed", Guard("x"))


class Trainer:
    def step(self, data):
        return (self, data)

    @staticmethod
    def free(data):
        return data

    @classmethod
    def made(cls, data):
        return (cls, data)


def test_wrapped_static_and_class_methods_keep_their_kind():
    class Framework(Trainer):
        step, free, made = Trainer.step, staticmethod(Trainer.free), classmethod(Trainer.made.__func__)

    seen = []
    for name in ("step", "free", "made"):
        assert around(Framework, name, Guard("x"), before=lambda call: seen.append(call.get("data")))

    trainer = Framework()
    assert trainer.step(1) == (trainer, 1)
    assert Framework.free(2) == trainer.free(2) == 2
    assert Framework.made(3) == (Framework, 3)
    assert seen == [1, 2, 2, 3]


def test_child_class_that_calls_its_parent_is_counted_once(monkeypatch):
    class Child(Trainer):
        def step(self, data):
            return ("child", super().step(data))

    seen = []
    monkeypatch.setattr(Trainer, "step", Trainer.step)  # restored after the test
    around(Trainer, "step", Guard("x"), before=lambda call: seen.append(call.get("data")))
    child = Child()

    assert child.step(1) == ("child", (child, 1))
    assert seen == [1]


@pytest.fixture(autouse=True)
def unowned(monkeypatch):
    monkeypatch.setattr(ownership, "_level", 99)
    monkeypatch.setattr(ownership, "_name", "")


def test_first_claim_gets_the_ownership_and_can_be_repeated():
    assert ownership.claim(OPTIMIZER, "torch")
    assert ownership.claim(OPTIMIZER, "torch")
    assert ownership.holds(OPTIMIZER, "torch")
    assert ownership.holder() == "torch"


@pytest.mark.parametrize(
    ("nearer", "farther"), [(EXPLICIT, FRAMEWORK), (FRAMEWORK, CORE), (CORE, ACCELERATE), (ACCELERATE, OPTIMIZER)]
)
def test_more_explicit_owner_gets_and_keeps_the_ownership(nearer, farther):
    assert ownership.claim(farther, "far")
    assert ownership.claim(nearer, "near")
    assert not ownership.holds(farther, "far")
    assert not ownership.claim(farther, "far")
    assert ownership.holds(nearer, "near")


def test_first_of_two_equal_owners_gets_the_ownership():
    assert ownership.claim(FRAMEWORK, "one")
    assert not ownership.claim(FRAMEWORK, "other")


def test_released_ownership_can_be_claimed():
    ownership.claim(FRAMEWORK, "one")
    ownership.release(FRAMEWORK, "other")  # no effect: "other" is not the holder
    assert ownership.holder() == "one"

    ownership.release(FRAMEWORK, "one")
    assert ownership.holder() == ""
    assert ownership.claim(OPTIMIZER, "torch")
