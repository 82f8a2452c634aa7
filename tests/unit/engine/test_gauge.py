"""What steps tell about the device."""

import pytest

from segue.engine.gauge import Gauge


def stepped(rows, seconds_of):
    gauge = Gauge()
    for _ in range(300):
        for count in rows:
            gauge.step(seconds_of(count), count, count)
    return gauge


def test_a_device_whose_steps_take_as_long_with_many_rows_has_room_for_more():
    gauge = stepped([1, 2, 8, 16], lambda count: 0.002)
    assert gauge.idle_share(64) == 1.0


def test_a_device_that_computes_row_by_row_has_none():
    gauge = stepped([1, 2, 8, 16], lambda count: 0.001 * count)
    assert gauge.idle_share(4) == pytest.approx(0.0, abs=0.01)


def test_between_the_two_it_depends_on_how_many_run():
    gauge = stepped([1, 3, 5, 12], lambda count: 0.004 + 0.001 * count)
    assert gauge.idle_share(0) == gauge.idle_share(3) == 1.0
    assert gauge.idle_share(8) == pytest.approx(0.5, rel=0.05)
    assert gauge.idle_share(40) == pytest.approx(0.1, rel=0.05)


def test_steps_of_one_size_say_nothing_and_neither_do_prompts():
    gauge = stepped([6], lambda count: 0.006)
    gauge.step(0.5, 512, 1)
    assert gauge.idle_share(100) == 1.0
    assert gauge.seconds_per_token == pytest.approx(0.5 / 512)


def test_it_follows_a_device_that_changes():
    gauge = stepped([1, 8], lambda count: 0.002)
    for _ in range(2000):
        gauge.step(0.001 * 2, 2, 2)
        gauge.step(0.001 * 9, 9, 9)
    assert gauge.idle_share(9) < 0.05


def test_a_clock_that_stands_still_is_no_step():
    gauge = Gauge()
    gauge.step(0.0, 100, 1)
    gauge.step(0.0, 1, 1)
    assert gauge.seconds_per_token == 0.0 and gauge.idle_share(3) == 1.0
