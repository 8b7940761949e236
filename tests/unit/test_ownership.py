"""The owner that counts the iterations of a process."""

import pytest

from effllm.trainer import ownership
from effllm.trainer.ownership import ACCELERATE, CORE, EXPLICIT, FRAMEWORK, OPTIMIZER


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
