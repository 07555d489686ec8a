"""Which files an answer cites, and where; imports `fumehood.engine`."""

from fumehood.engine.citations import cite_links, cite_unlinked, find_links
from fumehood.protocol.items import ProducedFile


def produced(number: int) -> ProducedFile:
    return ProducedFile(
        file_id=f"cfile_{number}",
        container_id="cntr_1",
        filename=f"{number}.csv",
        path=f"/mnt/data/{number}.csv",
        bytes=1,
    )


def test_of_very_many_files_that_are_not_linked_the_last_are_cited() -> None:
    files = [produced(number) for number in range(1000)]
    text = "The first is [here](sandbox:/mnt/data/0.csv)."
    linked = cite_links(find_links(text), {file.path: file for file in files})
    unlinked = cite_unlinked(files, linked, text)
    assert [citation.file_id for citation in linked] == ["cfile_0"]
    assert [citation.file_id for citation in unlinked] == [f"cfile_{number}" for number in range(900, 1000)]


def test_a_file_that_was_written_twice_is_cited_once() -> None:
    assert len(cite_unlinked([produced(1), produced(2), produced(1)], [], "text")) == 2
