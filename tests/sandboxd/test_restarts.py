"""How zygotes that die follow each other; imports `fumehood.sandboxd`."""

from fumehood.sandboxd.restarts import Restarts


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_accident_is_made_good_at_once() -> None:
    restarts = Restarts(Clock())
    assert (restarts.recent, restarts.pause()) == (0, 0.0)
    restarts.died()
    restarts.died()
    assert (restarts.recent, restarts.pause()) == (2, 0.0)


def test_pauses_double_up_to_a_bound() -> None:
    clock = Clock()
    restarts = Restarts(clock)
    pauses: list[float] = []
    for _ in range(9):
        restarts.died()
        pauses.append(restarts.pause())
    assert pauses == [0, 0, 1, 2, 4, 8, 16, 30, 30]
    clock.now += 29
    assert restarts.pause() == 1
    clock.now += 1
    assert restarts.pause() == 0


def test_what_is_long_ago_is_forgotten() -> None:
    clock = Clock()
    restarts = Restarts(clock)
    for _ in range(20):
        restarts.died()
    clock.now += 60
    assert (restarts.recent, restarts.pause()) == (0, 0.0)
    restarts.died()
    assert restarts.pause() == 0
