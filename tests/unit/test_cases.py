"""A test with the decorator `cases` runs all cases and reports all failures."""

import pytest
from cases import cases


def test_all_cases_run_and_all_failures_are_reported():
    seen = []

    @cases("number, name", [(1, "a"), (2, "b"), (3, "c")])
    def check(number, name):
        seen.append(name)
        assert number == 2, "odd"

    with pytest.raises(AssertionError) as caught:
        check()
    assert seen == ["a", "b", "c"]
    assert str(caught.value).startswith("2 of 3 cases failed\ncase 0, number, name = 1, 'a': AssertionError: odd\n")
    assert "case 2, number, name = 3, 'c'" in str(caught.value)
    assert str(caught.value.__cause__).startswith("odd")
