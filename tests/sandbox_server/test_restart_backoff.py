"""Delays between restarts."""

from fumehood.sandbox_server.restart_backoff import RestartBackoff


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_accident_is_made_good_at_once() -> None:
    restarts = RestartBackoff(Clock())
    assert (restarts.recent_failures, restarts.delay()) == (0, 0.0)
    restarts.record_failure()
    restarts.record_failure()
    assert (restarts.recent_failures, restarts.delay()) == (2, 0.0)


def test_pauses_double_up_to_a_bound() -> None:
    clock = Clock()
    restarts = RestartBackoff(clock)
    pauses: list[float] = []
    for _ in range(9):
        restarts.record_failure()
        pauses.append(restarts.delay())
    assert pauses == [0, 0, 1, 2, 4, 8, 16, 30, 30]
    clock.now += 29
    assert restarts.delay() == 1
    clock.now += 1
    assert restarts.delay() == 0


def test_what_is_long_ago_is_forgotten() -> None:
    clock = Clock()
    restarts = RestartBackoff(clock)
    for _ in range(20):
        restarts.record_failure()
    clock.now += 60
    assert (restarts.recent_failures, restarts.delay()) == (0, 0.0)
    restarts.record_failure()
    assert restarts.delay() == 0
