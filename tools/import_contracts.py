"""Contract types for import-linter that tolerate modules not written yet."""

from collections.abc import Iterable
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

type Chain = tuple[str, ...]


def _within(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def _strings(value: Any) -> list[str]:
    return [str(item) for item in value] if value else []


class _ChainContract(Contract):
    """A contract broken by chains of imports, each shown from importer to imported."""

    def broken_chains(self, graph: ImportGraph) -> Iterable[Chain]:
        raise NotImplementedError

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002 - their signature
        chains = sorted(set(self.broken_chains(graph)))
        return ContractCheck(kept=not chains, metadata={"chains": chains})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for chain in check.metadata["chains"]:
            output.print_error(" -> ".join(chain))


class BoundaryContract(_ChainContract):
    """What `sources` may reach, directly or through others.

    allowed: if given, the only modules of the root package that may be reached, besides the source itself.
    forbidden: modules, also of other distributions, that may not be reached.
    """

    sources: Any = fields.ListField(subfield=fields.StringField())
    allowed: Any = fields.ListField(subfield=fields.StringField(), required=False)
    forbidden: Any = fields.ListField(subfield=fields.StringField(), required=False)

    def broken_chains(self, graph: ImportGraph) -> Iterable[Chain]:
        forbidden = _strings(self.forbidden)
        for source in _strings(self.sources):
            if source not in graph.modules:
                continue
            root = source.split(".")[0]
            own = [source, *_strings(self.allowed)]
            for reached in graph.find_upstream_modules(source, as_package=True):
                strange = self.allowed is not None and _within(reached, [root]) and not _within(reached, own)
                if strange or _within(reached, forbidden):
                    yield _chain(graph, source, reached)


class ReservedContract(_ChainContract):
    """`packages` are imported by `importers` and by nobody else."""

    packages: Any = fields.ListField(subfield=fields.StringField())
    importers: Any = fields.ListField(subfield=fields.StringField())

    def broken_chains(self, graph: ImportGraph) -> Iterable[Chain]:
        packages, importers = _strings(self.packages), _strings(self.importers)
        for module in graph.modules:
            if not _within(module, packages):
                continue
            for importer in graph.find_modules_that_directly_import(module):
                if not _within(importer, [*importers, *packages]):
                    yield (importer, module)


def _chain(graph: ImportGraph, source: str, reached: str) -> Chain:
    """The shortest way from any module of `source` to `reached`."""
    starts = {source, *graph.find_descendants(source)}
    found = (graph.find_shortest_chain(importer=start, imported=reached) for start in sorted(starts))
    return min((chain for chain in found if chain), key=len, default=(source, reached))
