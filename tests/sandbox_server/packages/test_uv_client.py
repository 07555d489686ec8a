"""Parsing and explaining uv's output, and redacting the index's credentials."""

import time
from pathlib import Path

import pytest

from fumehood.sandbox_server.packages.layer_store import PinnedPackage
from fumehood.sandbox_server.packages.package_index_config import PackageIndexConfig
from fumehood.sandbox_server.packages.uv_client import ResolutionFailed, explain_failure, parse_pins

_A, _B = "a" * 64, "b" * 64


def test_pins_with_their_hashes() -> None:
    text = f"Foo_Bar==1.0 \\\n    --hash=sha256:{_B} \\\n    --hash=sha256:{_A}\nbaz==2.0.post1\n# no\n"
    assert parse_pins(text) == [
        PinnedPackage("baz", "2.0.post1"),
        PinnedPackage("foo-bar", "1.0", (f"sha256:{_A}", f"sha256:{_B}")),
    ]


@pytest.mark.parametrize(
    "line", ["foo @ http://evil.example/x.whl", "foo>=1", "-e .", "--index-url x", "foo", "foo==1,==2"]
)
def test_nothing_else_is_taken_for_a_pin(line: str) -> None:
    with pytest.raises(ResolutionFailed):
        parse_pins(f"{line}\n")


@pytest.mark.parametrize(
    ("uv_output", "expected"),
    [
        (
            (
                "error: No solution found when resolving dependencies\n  cause: Because foo was not found in the "
                "package registry and you require foo, we can conclude that your requirements are unsatisfiable."
            ),
            "there is no package foo on the index",
        ),
        (
            (
                "  × No solution found when resolving dependencies:\n  ╰─▶ Because all versions of foo have no usable "
                "wheels and you require foo, we can\n      conclude that your requirements are unsatisfiable."
            ),
            (
                "foo has no wheel for this Python and platform, and packages that must be built from source are not "
                "installed"
            ),
        ),
        (
            (
                "error: No solution found\n cause: Because only foo<=4 is available and you require foo>99, we can "
                "conclude that your requirements are unsatisfiable.\n\nhint: try something"
            ),
            "only foo<=4 is available and you require foo>99",
        ),
        (
            "error: Request failed\n cause: error sending request for url (http://127.0.0.1:9/simple/foo/)",
            "the package index cannot be reached",
        ),
        (
            "error: Failed to fetch\n cause: HTTP status client error (403 Forbidden) for url (http://x/)",
            "the package index refused the request (403 Forbidden)",
        ),
        ("", "uv gave no reason"),
        ("x" * 5000, "x" * 600),
    ],
)
def test_reasons_in_plain_words(uv_output: str, expected: str) -> None:
    assert explain_failure(uv_output) == expected


def test_credentials_are_scrubbed_however_they_are_quoted() -> None:
    proxy = "http://proxyuser:proxypass@proxy.example:3128"
    index = PackageIndexConfig.from_environment(
        "https://someone:s3cr3t-pass@index.example/simple",
        None,
        {"HTTPS_PROXY": proxy, "no_proxy": "localhost"},
    )
    uv_output = index.redact(
        "https://someone:s3cr3t-pass@index.example/simple s3cr3t-pass proxypass https://other:thing@x/ \x1b[31m"
    )
    for secret in ("s3cr3t", "someone", "proxypass", "thing", "\x1b"):
        assert secret not in uv_output
    assert "s3cr3t" not in index.identity
    assert "index.example/simple" in index.identity
    assert index.environment()["HTTPS_PROXY"] == proxy


@pytest.mark.parametrize("unit", ["x", "a.", "x://", "://x", "has no ", "Because ", "@", "(", " \n"])
def test_what_is_said_is_bounded_and_read_in_no_time(unit: str) -> None:
    uv_output = unit * (1_000_000 // len(unit))
    began = time.process_time()
    assert len(PackageIndexConfig.from_environment(None, None, {}).redact(uv_output)) == 2001
    assert len(explain_failure(uv_output)) <= 700
    assert not ResolutionFailed(uv_output).has_no_solution
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, None),
        ({"PIP_INDEX_URL": "p", "UV_INDEX_URL": "i"}, "i"),
        ({"UV_DEFAULT_INDEX": "d", "UV_INDEX_URL": "i"}, "d"),
        ({"UV_DEFAULT_INDEX": "d", "FUMEHOOD_INDEX_URL": "f"}, "f"),
        ({"FUMEHOOD_INDEX_URL": ""}, None),
    ],
)
def test_the_index_that_counts(environ: dict[str, str], url: str | None) -> None:
    assert PackageIndexConfig.from_environment(None, None, environ).url == url
    assert PackageIndexConfig.from_environment("mine", Path("/links"), environ).url == "mine"
