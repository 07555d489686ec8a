"""The lines of a specification that ask for something, each of which needs a row in `tests/specifications.toml`."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

_LIST_ITEM = re.compile(r"\s*(?:\d+\.|[-*>])\s")
_TABLE_RULE = re.compile(r"\|[-| :]+\|\Z")
_DEMAND = re.compile(r"\b(?:must|should)\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=\.)\s+(?=[A-Z`*])")
_BOLD_ID = re.compile(r"- \*\*((?:FR|SC)-\d+)\*\*")
# What a docstring lists: steps, entries under `Args:` and `Attributes:`, and examples.
_DOCUMENTED = re.compile(
    r"^(?:(?:\d+\.|-) .+| {4}\w+: .+(?:\n {8}.+)*| *>>> .+(?:\n *(?:>>>|\.\.\.).*)*)", re.MULTILINE
)
# Specification 003 numbers its requirements itself; other lists of it are numbered here, by their headings.
_ID_PREFIXES = {
    r"Session ": "CL-",
    r"User Story (\d+)": r"US\1-",
    r"Edge Cases": "EC-",
    r"Assumptions": "AS-",
    r"Dependencies": "DE-",
    r"In Scope": "IN-",
    r"Out of Scope": "OUT-",
}


@dataclass(frozen=True)
class SpecificationLine:
    """text: on one line. id: as in specification 003, such as `FR-001` or `US1-2`; empty if there is none."""

    text: str
    id: str = ""


def flatten(text: str) -> str:
    """Write a text on one line."""
    return " ".join(text.split())


def read_lines(specification: str) -> Iterator[SpecificationLine]:
    """Yield list items, rows of tables, sentences with "must" or "should", and fenced blocks with what they declare."""
    heading, number = "", 0
    for block in _split_blocks(specification):
        if block.startswith("#"):
            heading, number = block.lstrip("# "), 0
            continue
        if block.startswith("```"):
            yield from map(SpecificationLine, _read_fence(block))
            continue
        if block.startswith("|") or _LIST_ITEM.match(block):
            number += 1
            yield SpecificationLine(flatten(block), _identify(block, heading, number))
        for sentence in _SENTENCE_END.split(flatten(block)):
            if _DEMAND.search(sentence):
                yield SpecificationLine(sentence)


def _split_blocks(text: str) -> list[str]:
    """Split at blank lines, headings, list items, rows of tables and fences; drop headings of tables."""
    blocks = [""]
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
            if fenced:
                blocks.append(line)
            else:
                blocks.append("")
        elif fenced:
            blocks[-1] += f"\n{line}"
        elif _TABLE_RULE.match(line):
            blocks[-1] = ""
        elif line.startswith(("#", "|")) or _LIST_ITEM.match(line) or not line.strip():
            blocks.append(line)
        else:
            blocks[-1] += f"\n{line}"
    return [block for block in blocks if block.strip()]


def _identify(block: str, heading: str, number: int) -> str:
    if written := _BOLD_ID.match(block):
        return written[1]
    for pattern, prefix in _ID_PREFIXES.items():
        if found := re.match(pattern, heading):
            return f"{found.expand(prefix)}{number}"
    return ""


def _read_fence(block: str) -> Iterator[str]:
    """Yield the whole block; of Python also functions without a body, and what docstrings list."""
    opening, _, code = block.partition("\n")
    yield flatten(code)
    if opening != "```python":
        return
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.body[-1]) == "...":
            yield flatten(ast.get_source_segment(code, node) or "")
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from map(flatten, _DOCUMENTED.findall(ast.get_docstring(node) or ""))
