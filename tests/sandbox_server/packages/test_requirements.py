"""Accepted and refused requirements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from fumehood.protocol.sandbox.sandbox_errors import InstallFailed
from fumehood.sandbox_server.packages.requirements import find_unmet, parse_requirements


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["Foo_Bar"], ("foo-bar",)),
        (["foo.bar", "Foo-Bar"], ("foo-bar",)),
        (["b", "a"], ("a", "b")),
        (["foo [B, a] >= 2, <3"], ("foo[a,b]<3,>=2",)),
        (["foo<3,>=2"], ("foo<3,>=2",)),
        (["", "   ", "# a comment", "foo  # the one"], ("foo",)),
        (["foo; python_version >= '3'"], ("foo",)),
        (["foo; sys_platform == 'win32'"], ()),
        (["foo; extra == 'x'"], ()),
        (["foo==1.0.*", "bar!=2"], ("bar!=2", "foo==1.0.*")),
    ],
)
def test_normal_form(lines: list[str], expected: tuple[str, ...]) -> None:
    assert parse_requirements(lines) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("-r other.txt", "options"),
        ("--index-url http://evil.example", "options"),
        ("-e .", "options"),
        ("--extra-index-url=http://evil.example", "options"),
        ("foo --hash=sha256:00", "options"),
        ("foo --config-settings=x", "options"),
        ("foo @ http://evil.example/foo.whl", "URLs"),
        ("foo@file:///etc/passwd", "URLs"),
        ("http://evil.example/foo.whl", "URLs"),
        ("git+https://evil.example/foo", "URLs"),
        ("file:foo.whl", "URLs"),
        ("./foo", "paths"),
        ("../foo", "paths"),
        ("/etc/passwd", "paths"),
        ("~/foo", "paths"),
        (".", "paths"),
        ("foo/bar", "paths"),
        ("foo\\bar", "paths"),
        ("foo-1.0-py3-none-any.whl", "paths"),
        ("foo-1.0.tar.gz", "paths"),
        ("${HOME}", "variables"),
        ("foo==$VERSION", "variables"),
        ("%PATH%", "variables"),
        ("foo\nbar", "control characters"),
        ("foo\r--index-url x", "control characters"),
        ("foo\x00", "control characters"),
        ("foo\x1b[31m", "control characters"),
        ("foo\u202e", "control characters"),
        ("foo\ud800", "control characters"),
        ("x" * 501, "longer than 500"),
        ("x" * 101, "a name has at most"),
        ("foo_", "start and end"),
        ("foo__>=1", "start and end"),
        ("foo[a_]", "start and end"),
        ("foo===1.0", "==="),
        ("foo bar", "not a requirement"),
        ("foo>=", "not a requirement"),
        ("foo; nonsense == '1'", "not a requirement"),
        ("fo o", "not a requirement"),
        ("föö", "not a requirement"),
    ],
)
def test_refused_with_the_line_and_the_reason(line: str, reason: str) -> None:
    with pytest.raises(InstallFailed, match=reason) as caught:
        parse_requirements(["fine", line])
    assert caught.value.param == "requirements"
    assert caught.value.message.isprintable()
    assert line[:3].isprintable() is (line[:3] in caught.value.message)
    assert len(caught.value.message) < 400


def test_not_too_many() -> None:
    with pytest.raises(InstallFailed, match="More than 100"):
        parse_requirements([f"p{number}" for number in range(101)])


@given(st.lists(st.text(max_size=40), max_size=5))
def test_whatever_is_taken_is_a_name_with_versions(lines: list[str]) -> None:
    try:
        wanted = parse_requirements(lines)
    except InstallFailed:
        return
    for text in wanted:
        requirement = Requirement(text)
        assert requirement.url is None
        assert requirement.marker is None
        assert text.isprintable()
        assert not text.startswith("-")
        assert not set(text) & set("/\\@:$ \t\n;")
    assert parse_requirements(wanted) == wanted


def test_what_is_there_already_is_not_missing() -> None:
    present = {"numpy": "2.5.4", "foo-bar": "1.0rc1"}
    wanted = ["numpy", "numpy>=2", "numpy<2", "foo-bar>=1.0rc1", "foo-bar[x]", "other"]
    assert find_unmet(wanted, present) == ["numpy<2", "foo-bar[x]", "other"]
