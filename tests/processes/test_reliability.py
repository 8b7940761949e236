"""The table of faults is complete and has the newest results of the tests."""

import reliability


def test_every_fault_has_a_test():
    assert set(reliability.FAULTS) <= {name for name, tests in reliability.marked().items() if tests}


def test_every_mark_has_the_name_of_a_fault():
    assert [name for name in reliability.marked() if name not in reliability.FAULTS] == []


def test_page_is_generated_from_the_table_and_the_results():
    assert reliability.PAGE.read_text() == reliability.page()


def test_result_of_a_row_is_the_sum_of_its_tests():
    ran_on = {"python": "3.11", "kernel": "Linux 6.1"}
    ran = [{"passed": 3, "skipped": 1, **ran_on}, {"passed": 2, **ran_on}]

    assert reliability._result(ran) == "5 passed, 1 skipped (Python 3.11, Linux 6.1)"
    assert reliability._result([]) == ""
