"""Which files an answer cites, and where."""

from urllib.parse import quote, unquote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.engine.citations import cite_links, cite_unlinked, collect_paths, find_links
from fumehood.protocol.openai.items import (
    ContainerFileCitationAnnotation,
    OutputMessage,
    OutputText,
)
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import OutputTextAnnotationAdded
from fumehood.testing import ScriptedModel, calls, says
from tests.support.echo_tool import EchoTool
from tests.support.engine_harness import ECHO, EngineHarness, make_produced_file
from tests.support.stream_checks import check_invariants


def test_of_very_many_files_that_are_not_linked_the_last_are_cited() -> None:
    files = [make_produced_file(f"{number}.csv") for number in range(1000)]
    text = "The first is [here](sandbox:/mnt/data/0.csv)."
    linked = cite_links(find_links(text), {file.path: file for file in files})
    unlinked = cite_unlinked(files, linked, text)
    assert [citation.file_id for citation in linked] == ["cfile_0.csv"]
    assert [citation.file_id for citation in unlinked] == [
        f"cfile_{number}.csv" for number in range(900, 1000)
    ]


def test_a_file_that_was_written_twice_is_cited_once() -> None:
    assert len(cite_unlinked([make_produced_file(name) for name in "aba"], [], "text")) == 2


# --- where links stand --------------------------------------------------------------------------------

FILES = (
    "a.csv",
    "a b.csv",
    "a (1).csv",
    "é 日本.csv",
    "100%.csv",
    "out/a.csv",
    "it's.csv",
    "_x_.md",
    "[1].txt",
)


def spans(text: str) -> list[tuple[str, str]]:
    """The files that are cited, and what of the text is given as the place: cut out by code points."""
    links = find_links(text)
    wanted = set(collect_paths(links))
    found = {file.path: file for file in map(make_produced_file, FILES) if file.path in wanted}
    return [
        (citation.filename, text[citation.start_index : citation.end_index])
        for citation in cite_links(links, found)
    ]


@pytest.mark.parametrize(
    ("text", "cited"),
    [
        ("[t](sandbox:/mnt/data/a.csv)", "a.csv"),
        ("[t](sandbox:/mnt/data/out/a.csv)", "out/a.csv"),
        ("[t](sandbox:/mnt/data/a%20b.csv)", "a b.csv"),
        ("[t](sandbox:/mnt/data/a b.csv)", "a b.csv"),
        ("[t](<sandbox:/mnt/data/a b.csv>)", "a b.csv"),
        ("[t](sandbox:/mnt/data/a (1).csv)", "a (1).csv"),
        ("[t](sandbox:/mnt/data/a%20%281%29.csv)", "a (1).csv"),
        ("([t](sandbox:/mnt/data/a%20(1).csv))", "a (1).csv"),
        ("[t](sandbox:/mnt/data/%C3%A9%20%E6%97%A5%E6%9C%AC.csv)", "é 日本.csv"),
        ("👩🏽‍🔬 [tâche](sandbox:/mnt/data/é 日本.csv)", "é 日本.csv"),
        ("[t](sandbox:/mnt/data/100%.csv)", "100%.csv"),
        ("[t](sandbox:/mnt/data/100%25.csv)", "100%.csv"),
        ("[t](sandbox:/mnt/data/it's.csv)", "it's.csv"),
        ("[t](sandbox:/mnt/data/_x_.md)", "_x_.md"),
        ("[t](sandbox:/mnt/data/[1].txt)", "[1].txt"),
        ('[t](sandbox:/mnt/data/a.csv "The table")', "a.csv"),
        ("[t](sandbox:/mnt/data/a.csv 'The table')", "a.csv"),
        ("![t](sandbox:/mnt/data/a.csv)", "a.csv"),
        ('<a href="sandbox:/mnt/data/a b.csv">t</a>', "a b.csv"),
        ("<img src=sandbox:/mnt/data/a.csv>", "a.csv"),
        ("`sandbox:/mnt/data/a.csv`", "a.csv"),
        ("`` `sandbox:/mnt/data/a b.csv` ``", "a b.csv"),
        ("```\nsandbox:/mnt/data/a.csv\n```", "a.csv"),
        ("**sandbox:/mnt/data/a.csv**", "a.csv"),
        ("| sandbox:/mnt/data/a.csv|x |", "a.csv"),
        ("|sandbox:/mnt/data/a.csv|", "a.csv"),
        ("See sandbox:/mnt/data/a.csv.", "a.csv"),
        ("See sandbox:/mnt/data/a.csv, then", "a.csv"),
        ("(sandbox:/mnt/data/a.csv)", "a.csv"),
        ("(see sandbox:/mnt/data/a.csv)", "a.csv"),
        ("見よ sandbox:/mnt/data/a.csv。", "a.csv"),
        ("「sandbox:/mnt/data/a.csv」を", "a.csv"),
        ("sandbox:/mnt/data/a.csv", "a.csv"),
    ],
)
def test_a_link_is_cited_from_its_scheme_to_the_end_of_its_path(text: str, cited: str) -> None:
    ((filename, span),) = spans(text)
    assert filename == cited
    assert unquote(span) == f"sandbox:/mnt/data/{cited}" or span == f"sandbox:/mnt/data/{cited}"


@pytest.mark.parametrize(
    "text",
    [
        "[t](sandbox:/mnt/data/b.csv)",
        "[t](sandbox:/mnt/data/a.csv.bak)",
        "[t](sandbox:/mnt/data/A.csv)",
        "[t](sandbox:/mnt/data/out/../a.csv)",
        "[t](sandbox:/etc/passwd)",
        "[t](sandbox:/mnt/data/%ff.csv)",
        "[t](sandbox:a.csv)",
        "[t](/mnt/data/a.csv)",
        "[t](sandbox:/)",
        "sandbox:/",
        "[t](sandbox:/mnt/data/)",
    ],
)
def test_links_to_what_is_not_there_are_no_citations(text: str) -> None:
    assert spans(text) == []


def test_a_file_that_is_linked_several_times_is_cited_each_time() -> None:
    link = "[t](sandbox:/mnt/data/a.csv)"
    text = f"é{link}{link} and [u](sandbox:/mnt/data/b.csv), sandbox:/mnt/data/a%20b.csv {link}"
    links = find_links(text)
    files = {file.path: file for file in (make_produced_file("a.csv"), make_produced_file("a b.csv"))}
    found = cite_links(links, files)
    assert [(one.filename, one.start_index) for one in found] == [
        ("a.csv", 5),
        ("a.csv", 5 + len(link)),
        ("a b.csv", text.index("sandbox:/mnt/data/a%20b")),
        ("a.csv", text.rindex("sandbox:")),
    ]
    assert (
        cite_unlinked([make_produced_file("a.csv"), make_produced_file("c.csv")], found, text)[0].filename
        == "c.csv"
    )


@given(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=30),
    st.text(st.characters(categories=("L", "N")), min_size=1, max_size=20),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=30),
    st.booleans(),
)
def test_indexes_count_code_points(before: str, name: str, after: str, quoted: bool) -> None:
    path = f"/mnt/data/{name}"
    written = quote(path) if quoted else path
    text = f"{before}[x](sandbox:{written}){after}"
    file = make_produced_file(name)
    found = [one for one in cite_links(find_links(text), {path: file}) if one.start_index >= len(before)]
    assert text[found[0].start_index : found[0].end_index] == f"sandbox:{written}"
    assert found[0].start_index == len(before) + len("[x](")


async def test_citations_survive_streams_storage_and_replay() -> None:
    text = "é [t](sandbox:/mnt/data/a%20b.csv) `sandbox:/mnt/data/old.txt`"
    echo = EchoTool(
        files=[make_produced_file("a b.csv"), make_produced_file("c.png")],
        known_files=[make_produced_file("old.txt")],
    )
    turn = (calls("echo", {}), says(text, deltas=7))
    async with ScriptedModel(*turn, *turn, says("Yes."), says("Yes.")) as model:
        engine = EngineHarness(model, [echo])
        events = await engine.stream(tools=[ECHO])
        streamed = check_invariants(events)
        cited = annotations(streamed)
        assert [(one.filename, text[one.start_index : one.end_index]) for one in cited] == [
            ("a b.csv", "sandbox:/mnt/data/a%20b.csv"),
            ("old.txt", "sandbox:/mnt/data/old.txt"),
            ("c.png", ""),
        ]
        assert [event.annotation for event in events if isinstance(event, OutputTextAnnotationAdded)] == cited
        assert annotations(await engine.create(tools=[ECHO])) == cited
        stored = await engine.store.get_response("", streamed.id)
        assert stored is not None
        assert annotations(stored) == cited

        continued = await engine.create(previous_response_id=streamed.id)
        items = [msgspec.to_builtins(item) for item in streamed.output]
        replayed = await engine.create(input=[*items, {"role": "user", "content": "Sure?"}])
    for response in (continued, replayed):
        entries = await engine.store.list_input_items("", response.id)
        assert entries is not None
        (message,) = [entry for entry in entries if b'"assistant"' in entry.raw]
        assert msgspec.json.decode(message.raw, type=OutputMessage).content[0] == OutputText(
            text=text, annotations=[*cited]
        )


def annotations(response: Response) -> list[ContainerFileCitationAnnotation]:
    message = response.output[-1]
    assert isinstance(message, OutputMessage)
    part = message.content[0]
    assert isinstance(part, OutputText)
    return [one for one in part.annotations if isinstance(one, ContainerFileCitationAnnotation)]
