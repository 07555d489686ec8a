"""Finds links to sandbox files in a text, and makes citations of them.

Models write `[table](sandbox:/mnt/data/table.csv)`. A citation spans `sandbox:/mnt/data/table.csv`, in code points.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from fumehood.protocol.openai.items import ContainerFileCitationAnnotation, ProducedFile

_SCHEME = "sandbox:"
_MARK = _SCHEME + "/"
_MAX_LINKS = 1_000
_MAX_UNLINKED = 100  # the file list of the container has them all
# Bounds the search, so that a text full of unclosed links stays linear.
_MAX_TARGET_LENGTH = 1_024
_TRAILING = ".,;:!?*_`"
_TITLE = re.compile(r""" ["']""")
# Characters that rarely occur in names and often follow one: table cell borders, CJK punctuation.
_BREAK = re.compile("[|<>\uff0c\u3002\u3001\uff1b\uff1a\uff01\uff1f\u300d\u300f\u3011\u300b\uff09]")
_CLOSING = {"(": ")", "<": ">", "[": "]", '"': '"', "'": "'", "`": "`"}
# Patterns that end a link or open a nested bracket, by the character before the link.
_ENDS = {"": re.compile(r"\s")} | {
    opening: re.compile(f"[\n{re.escape(opening + closing)}]") for opening, closing in _CLOSING.items()
}


@dataclass(frozen=True, slots=True)
class SandboxLink:
    """The position of a link in a text, and its candidate paths, likeliest first."""

    start: int
    paths: tuple[str, ...]

    def end(self, path: str) -> int:
        return self.start + len(_SCHEME) + len(path)


def find_links(text: str) -> list[SandboxLink]:
    links: list[SandboxLink] = []
    start = text.find(_MARK)
    while start >= 0 and len(links) < _MAX_LINKS:
        opening = text[start - 1] if start else ""
        target = _find_target(text, start + len(_SCHEME), opening)
        links.append(SandboxLink(start, _list_candidate_paths(target)))
        start = text.find(_MARK, start + len(_MARK))
    return links


def _find_target(text: str, start: int, opening: str) -> str:
    """The text from `start` to the end of the link: its closing bracket, or white space if it has none."""
    closing = _CLOSING.get(opening, "")
    opening = opening if closing else ""
    window = text[start : start + _MAX_TARGET_LENGTH]
    depth = 0
    for found in _ENDS[opening].finditer(window):
        if found[0] == closing and depth:
            depth -= 1
        elif closing != opening == found[0]:
            depth += 1
        else:
            return window[: found.start()]
    return window


def _list_candidate_paths(target: str) -> tuple[str, ...]:
    # A title may follow the address: (sandbox:/mnt/data/a.csv "The table").
    targets = [target, _TITLE.split(target, 1)[0], _BREAK.split(target, 1)[0]]
    shorter = [text.rstrip(_TRAILING) for text in targets]
    bare = [text.rstrip(")]>\"'") for text in shorter]
    return tuple(dict.fromkeys(path for path in (*targets, *shorter, *bare) if path))


def collect_paths(links: Sequence[SandboxLink]) -> list[str]:
    """All candidate paths of the links, as written and percent-decoded."""
    return list(
        dict.fromkeys(name for link in links for path in link.paths for name in (path, unquote(path)))
    )


def cite_links(
    links: Sequence[SandboxLink], files: Mapping[str, ProducedFile]
) -> list[ContainerFileCitationAnnotation]:
    """Cite each link that points to one of the files, given by path."""
    citations: list[ContainerFileCitationAnnotation] = []
    for link in links:
        for path in link.paths:
            file = files.get(path) or files.get(unquote(path))
            if file is not None:
                citations.append(_make_citation(file, link.start, link.end(path)))
                break
    return citations


def cite_unlinked(
    files: Sequence[ProducedFile], cited: Sequence[ContainerFileCitationAnnotation], text: str
) -> list[ContainerFileCitationAnnotation]:
    """Cite the latest files that the text does not link, each with zero width at its end."""
    linked = {citation.file_id for citation in cited}
    latest = {file.file_id: file for file in files if file.file_id not in linked}
    return [_make_citation(file, len(text), len(text)) for file in [*latest.values()][-_MAX_UNLINKED:]]


def _make_citation(file: ProducedFile, start: int, end: int) -> ContainerFileCitationAnnotation:
    return ContainerFileCitationAnnotation(
        container_id=file.container_id,
        file_id=file.file_id,
        filename=file.filename,
        start_index=start,
        end_index=end,
    )
