"""Deadlines of slow senders."""

from hypothesis import given
from hypothesis import strategies as st

from fumehood.http_server.slow_clients import TransferDeadline

pauses = st.lists(st.floats(0, 29.9), min_size=1, max_size=200)


@given(pauses)
def test_who_sends_as_much_as_he_has_to_is_waited_for(waits: list[float]) -> None:
    pace = TransferDeadline(30, 1000)
    for wait in waits:
        assert wait <= pace.remaining_seconds
        pace.extend(int(wait * 1000) + 1, wait)


@given(st.floats(0.001, 1), st.integers(1, 1 << 30))
def test_who_drips_is_left_however_much_he_sent_before(wait: float, before: int) -> None:
    pace, waited = TransferDeadline(30, 1000), 0.0
    pace.extend(before)
    while pace.remaining_seconds >= wait:
        pace.extend(int(wait * 500), wait)
        waited += wait
    assert waited <= 60


def test_nobody_is_waited_for_longer_than_that_at_once() -> None:
    pace = TransferDeadline(30, 1000)
    pace.extend(1 << 30, 29)
    assert pace.remaining_seconds == 30
    pace.extend(1, 29)
    assert pace.remaining_seconds < 1.1


def test_dripping_may_be_allowed() -> None:
    pace = TransferDeadline(30, 0)
    for _ in range(100):
        pace.extend(1, 29)
    assert pace.remaining_seconds == 30
