"""Phases are told to whoever listens, with the times they took; imports `phases`."""

import asyncio

import pytest

from fumehood.phases import Phase, heard_by, phase


def test_where_nobody_listens_there_is_one_phase_for_all() -> None:
    with phase("a") as one:
        one.note("status", "ok")
        one.began_with("b", 1)
    assert phase("c") is one
    assert (one.facts, one.error, one.took) == ({}, "", 0)
    with pytest.raises(ValueError), phase("d"):
        raise ValueError
    assert one.error == ""


def test_a_phase_is_told_once_when_it_is_over() -> None:
    told: list[Phase] = []
    with heard_by(told.append):
        with phase("acquire") as acquiring:
            acquiring.note("start", "warm")
            assert told == []
            acquiring.end()
            assert told == [acquiring]
            took = acquiring.took
        with pytest.raises(ValueError), phase("run"):
            raise ValueError("with a secret")
    assert [(over.name, over.facts, over.error) for over in told] == [
        ("acquire", {"start": "warm"}, ""),
        ("run", {}, "ValueError"),
    ]
    assert acquiring.took == took > 0
    assert told[0].began_at + told[0].took <= told[1].began_at + told[1].took


def test_a_phase_may_have_begun_with_another() -> None:
    told: list[Phase] = []
    with heard_by(told.append), phase("run") as running:
        began_at = running.began_at
        running.began_with("packages", 0)
        running.began_with("packages", 1)
        running.began_with("more", 1 << 60)
    packages, more, run = told
    assert (packages.name, packages.began_at, packages.took) == ("packages", began_at, 1)
    # Nobody is believed who has measured more than there was.
    assert (more.name, more.began_at, more.took < 1 << 40) == ("more", began_at + 1, True)
    assert run.began_at == began_at + 1 + more.took


async def test_tasks_are_listened_to_by_their_own_listeners() -> None:
    outer: list[str] = []

    async def work(name: str) -> list[str]:
        inner: list[str] = []
        with heard_by(lambda over: inner.append(over.name)), phase(name):
            await asyncio.sleep(0)
        return inner

    with heard_by(lambda over: outer.append(over.name)):
        assert await asyncio.gather(work("a"), work("b")) == [["a"], ["b"]]
    assert outer == ["a", "b"]
    assert phase("c").name == ""
