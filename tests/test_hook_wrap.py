"""What hooks put around a framework's functions changes nothing of them, and fails alone."""

import inspect
from types import SimpleNamespace

import pytest

from effllm.hooks import _wrap
from effllm.hooks._wrap import Guard, around


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(_wrap, "_said", set())
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def train_step(forward, data, *, config=None):
    """Take a step."""
    if data == "bad":
        raise ValueError("of the framework")
    return [forward, data, config]


def module():
    return SimpleNamespace(train_step=train_step)


def test_a_wrapped_function_is_called_once_with_what_it_was_given_and_gives_what_it_gave():
    framework, seen = module(), []

    assert around(framework, "train_step", Guard("x"), after=lambda token, call, result: seen.append(result))

    result = framework.train_step("f", "d", config="c")
    assert result == ["f", "d", "c"]
    assert seen == [result] and seen[0] is result


def test_it_looks_like_the_function():
    framework = module()
    around(framework, "train_step", Guard("x"))

    assert framework.train_step.__doc__ == "Take a step."
    assert inspect.signature(framework.train_step) == inspect.signature(train_step)


def test_arguments_are_found_by_name_wherever_they_stand():
    framework, seen = module(), []
    around(
        framework,
        "train_step",
        Guard("x"),
        before=lambda call: seen.append([call.get(n, "-") for n in ("data", "config", "other")]),
    )

    framework.train_step("f", "d")
    framework.train_step(data="d", forward="f", config="c")

    assert seen == [["d", None, "-"], ["d", "c", "-"]]


def test_what_before_returns_goes_to_after():
    framework, seen = module(), []
    around(
        framework, "train_step", Guard("x"), before=lambda call: 7, after=lambda token, call, result: seen.append(token)
    )
    framework.train_step("f", "d")

    assert seen == [7]


def test_an_exception_of_the_framework_passes_and_is_told():
    framework, seen = module(), []
    around(framework, "train_step", Guard("x"), before=lambda call: 7, after=pytest.fail, failed=seen.append)

    with pytest.raises(ValueError, match="of the framework"):
        framework.train_step("f", "bad")
    assert seen == [7]


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_hook_that_fails_says_so_once_and_the_function_goes_on(place, capsys):
    framework, calls = module(), []

    def fails(*_):
        calls.append(place)
        raise RuntimeError("of the hook")

    around(framework, "train_step", Guard("the framework"), **{place: fails})

    assert [framework.train_step("f", n) for n in range(3)] == [["f", n, None] for n in range(3)]
    assert calls == [place]
    said = capsys.readouterr().err
    assert (
        said == "[EfficientLLM] the framework is not measured any more, training goes on: RuntimeError: of the hook\n"
    )


def test_a_rank_that_is_not_the_first_says_nothing(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    _wrap.say_once("a line")

    assert capsys.readouterr().err == ""


def test_wrapping_twice_is_wrapping_once():
    framework, seen = module(), []
    for _ in range(2):
        assert around(framework, "train_step", Guard("x"), before=lambda call: seen.append(1))
    framework.train_step("f", "d")

    assert seen == [1]


def test_what_is_not_there_is_not_wrapped():
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


def test_methods_of_all_kinds_stay_of_their_kind():
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


def test_a_child_class_that_calls_its_parent_is_counted_where_it_was_wrapped():
    class Child(Trainer):
        def step(self, data):
            return ("child", super().step(data))

    seen = []
    original = Trainer.step
    try:
        around(Trainer, "step", Guard("x"), before=lambda call: seen.append(call.get("data")))
        child = Child()
        assert child.step(1) == ("child", (child, 1))
    finally:
        Trainer.step = original
    assert seen == [1]
