"""The table of faults is complete and has the newest results of the tests."""

import reliability


def test_every_fault_of_the_table_has_a_test():
    assert set(reliability.FAULTS) <= {name for name, tests in reliability.marked().items() if tests}


def test_every_fault_mark_of_a_test_names_a_fault_of_the_table():
    assert [name for name in reliability.marked() if name not in reliability.FAULTS] == []


def test_reliability_page_equals_the_page_generated_from_results():
    assert reliability.PAGE.read_text() == reliability.page()


def test_result_of_a_row_is_the_sum_over_its_tests():
    assert reliability._result([{"passed": 3, "skipped": 1}, {"passed": 2}]) == "5, 1 skipped"
    assert reliability._result([{"passed": 3}]) == "3"
    assert reliability._result([]) == "0"
