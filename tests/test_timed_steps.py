"""Phases are told to whoever listens, with the times they took."""

import asyncio

import pytest

from fumehood.timed_steps import TimedStep, listen_to_timings, start_timing


def test_where_nobody_listens_nothing_is_told() -> None:
    with start_timing("a") as one:
        one.split_off_start("b", 1)
    assert (one.attributes, one.error, one.duration_ns) == ({}, "", 0)


def test_a_phase_is_told_once_when_it_is_over() -> None:
    told: list[TimedStep] = []
    with listen_to_timings(told.append):
        with start_timing("acquire") as acquiring:
            acquiring.set_attribute("start", "warm")
            assert told == []
            acquiring.end()
            assert told == [acquiring]
            took = acquiring.duration_ns
        with pytest.raises(ValueError), start_timing("run"):
            raise ValueError("with a secret")
    assert [(over.name, over.attributes, over.error) for over in told] == [
        ("acquire", {"start": "warm"}, ""),
        ("run", {}, "ValueError"),
    ]
    assert acquiring.duration_ns == took > 0
    assert told[0].started_at_ns + told[0].duration_ns <= told[1].started_at_ns + told[1].duration_ns


def test_a_phase_may_have_begun_with_another() -> None:
    told: list[TimedStep] = []
    with listen_to_timings(told.append), start_timing("run") as running:
        began_at = running.started_at_ns
        running.split_off_start("packages", 0)
        running.split_off_start("packages", 1)
        running.split_off_start("more", 1 << 60)
    packages, more, run = told
    assert (packages.name, packages.started_at_ns, packages.duration_ns) == ("packages", began_at, 1)
    # Nobody is believed who has measured more than there was.
    assert (more.name, more.started_at_ns, more.duration_ns < 1 << 40) == ("more", began_at + 1, True)
    assert run.started_at_ns == began_at + 1 + more.duration_ns


async def test_tasks_are_listened_to_by_their_own_listeners() -> None:
    outer: list[str] = []

    async def work(name: str) -> list[str]:
        inner: list[str] = []
        with listen_to_timings(lambda over: inner.append(over.name)), start_timing(name):
            await asyncio.sleep(0)
        return inner

    with listen_to_timings(lambda over: outer.append(over.name)):
        assert await asyncio.gather(work("a"), work("b")) == [["a"], ["b"]]
    start_timing("c").end()
    assert outer == ["a", "b"]
