"""Who counts the iterations of a process."""

import pytest

from effllm.training import ownership
from effllm.training.ownership import ACCELERATE, CORE, EXPLICIT, FRAMEWORK, OPTIMIZER


@pytest.fixture(autouse=True)
def nobody(monkeypatch):
    monkeypatch.setattr(ownership, "_level", 99)
    monkeypatch.setattr(ownership, "_name", "")


def test_the_first_to_claim_counts_and_may_claim_again():
    assert ownership.claim(OPTIMIZER, "torch")
    assert ownership.claim(OPTIMIZER, "torch")
    assert ownership.holds(OPTIMIZER, "torch")
    assert ownership.holder() == "torch"


@pytest.mark.parametrize(
    ("nearer", "farther"), [(EXPLICIT, FRAMEWORK), (FRAMEWORK, CORE), (CORE, ACCELERATE), (ACCELERATE, OPTIMIZER)]
)
def test_whoever_stands_nearer_to_the_person_takes_over_and_keeps_it(nearer, farther):
    assert ownership.claim(farther, "far")
    assert ownership.claim(nearer, "near")
    assert not ownership.holds(farther, "far")
    assert not ownership.claim(farther, "far")
    assert ownership.holds(nearer, "near")


def test_of_two_that_are_as_near_the_first_counts():
    assert ownership.claim(FRAMEWORK, "one")
    assert not ownership.claim(FRAMEWORK, "other")


def test_what_is_given_up_can_be_claimed_by_anybody():
    ownership.claim(FRAMEWORK, "one")
    ownership.release(FRAMEWORK, "other")  # which has nothing to give up
    assert ownership.holder() == "one"

    ownership.release(FRAMEWORK, "one")
    assert ownership.holder() == ""
    assert ownership.claim(OPTIMIZER, "torch")
