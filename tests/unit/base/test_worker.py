"""What is shared out is done once, and an error or an interrupt stops both hands."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.base.worker import share


@given(st.integers(0, 40))
def test_each_item_is_done_once(count):
    done = []
    share(count, lambda item, hand: done.append(item), "test")
    assert sorted(done) == list(range(count))


def test_both_hands_work_at_the_same_time():
    meeting = threading.Barrier(2, timeout=30)
    hands = []

    def work(item, hand):
        meeting.wait()
        hands.append((hand, threading.current_thread() is threading.main_thread()))

    share(2, work, "test")
    assert sorted(hands) == [(0, True), (1, False)]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_one_hand_stops_the_other(failing, error):
    begun, failed = [], threading.Event()

    def work(item, hand):
        begun.append(item)
        if hand == failing:
            failed.set()
            raise error
        failed.wait(30)
        time.sleep(0.01)

    with pytest.raises(error):
        share(1000, work, "the other hand")
    assert len(begun) < 1000
    assert "the other hand" not in {thread.name for thread in threading.enumerate()}
