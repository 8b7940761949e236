"""effllm/records/: values derived from the fields of a record."""

from builders import row


def test_iteration_time_is_steps_and_waits_without_phases():
    report = row(busy_s=9.0, wait_s=1.0, phases_s={"evaluation": 5.0})

    assert (report.time_s, report.wall_s) == (10.0, 15.0)


def test_report_without_an_iteration_has_zero_iterations():
    assert row(iteration_first=11, iteration_last=20).iterations == 10
    assert row(iteration_first=11, iteration_last=10).iterations == 0
