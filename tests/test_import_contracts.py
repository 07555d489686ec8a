"""The contract types of tools/import_contracts.py, on made-up graphs."""

from typing import Any

import grimp
from importlinter import Contract

from tools.import_contracts import BoundaryContract, ReservedContract


def graph(*imports: str) -> grimp.ImportGraph:
    made = grimp.ImportGraph()
    for line in imports:
        importer, imported = line.split(" > ")
        for module in (importer, imported):
            made.add_module(module)
        made.add_import(importer=importer, imported=imported)
    return made


def chains(contract: type[Contract], made: grimp.ImportGraph, **options: Any) -> list[tuple[str, ...]]:
    check = contract(name="c", session_options={}, contract_options=options).check(made, verbose=False)
    assert check.kept is not bool(check.metadata["chains"])
    return check.metadata["chains"]


def test_boundary_follows_indirect_imports() -> None:
    made = graph("app.jail.a > app.wire", "app.wire > app.store")
    assert chains(BoundaryContract, made, sources=["app.jail"], allowed=["app.wire"]) == []
    made.add_module("app.jail")
    assert chains(BoundaryContract, made, sources=["app.jail"], allowed=["app.wire"]) == [
        ("app.jail.a", "app.wire", "app.store")
    ]


def test_boundary_with_nothing_allowed() -> None:
    made = graph("app.jail > app.wire", "app.jail.b > app.jail", "app.jail > json")
    assert chains(BoundaryContract, made, sources=["app.jail"], allowed=[]) == [("app.jail", "app.wire")]


def test_boundary_forbids_other_distributions() -> None:
    made = graph("app.core > app.wire", "app.wire > httpx", "app.core > httpx2")
    assert chains(BoundaryContract, made, sources=["app.core"], forbidden=["httpx"]) == [
        ("app.core", "app.wire", "httpx")
    ]


def test_sources_that_do_not_exist_yet_are_skipped() -> None:
    made = graph("app.a > app.b")
    assert chains(BoundaryContract, made, sources=["app.later"], allowed=[]) == []


def test_reserved_package_has_one_importer() -> None:
    made = graph("app.k8s > lightkube", "app.engine > lightkube", "lightkube.core > lightkube")
    assert chains(ReservedContract, made, packages=["lightkube"], importers=["app.k8s"]) == [
        ("app.engine", "lightkube")
    ]
