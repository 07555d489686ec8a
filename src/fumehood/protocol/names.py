"""Names that others chose, made fit for people and models to read; imports the standard library.

File names come from uploads, archives and code that nobody trusts. Whoever puts one into a prompt, a citation, a header
or a log passes it through `clean_name` first; files are found by their ids, so what it changes is lost to nobody.
"""

import unicodedata

LONGEST_NAME = 200

# Control characters, invisible ones and those that turn the direction of text, halves of pairs, private and
# unassigned ones, ends of lines and paragraphs.
_UNFIT = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_INSTEAD = "\N{REPLACEMENT CHARACTER}"
_CUT = "…"


def clean_name(name: str, longest: int = LONGEST_NAME) -> str:
    """The name on one line, visible and bounded; of a longer one the beginning and the end are kept."""
    if len(name) > longest:
        tail = longest // 3
        name = name[: longest - tail - len(_CUT)] + _CUT + name[-tail:]
    if name.isascii() and name.isprintable():
        return name
    return "".join(_INSTEAD if unicodedata.category(character) in _UNFIT else character for character in name)
