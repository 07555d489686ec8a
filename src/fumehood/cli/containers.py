"""`fumehood containers`: looks into containers of any server, fills and removes them; imports typer and siblings."""

from pathlib import Path
from typing import Annotated

import typer

from fumehood.cli.options import Memory
from fumehood.cli.remote import (
    DEFAULT_URL,
    EPILOG,
    BaseUrlOption,
    Columns,
    ForceOption,
    JsonOption,
    LimitOption,
    Object,
    OutputOption,
    Refused,
    Server,
    cleaned,
    note,
    part,
    print_json,
    print_list,
    print_object,
    remove_all,
    rows_of,
    save,
    size_of,
    text_of,
    time_of,
    told,
)

_ALL = 100_000
_DATA = "/mnt/data/"

_CONTAINER_COLUMNS: Columns = {
    "ID": lambda row: text_of(row, "id"),
    "STATUS": lambda row: text_of(row, "status"),
    "MEMORY": lambda row: text_of(row, "memory_limit"),
    "CREATED": lambda row: time_of(row, "created_at"),
    "LAST USED": lambda row: time_of(row, "last_active_at"),
    "NAME": lambda row: text_of(row, "name"),
}
_FILE_COLUMNS: Columns = {
    "ID": lambda row: text_of(row, "id"),
    "BYTES": lambda row: size_of(row, "bytes"),
    "CREATED": lambda row: time_of(row, "created_at"),
    "BY": lambda row: text_of(row, "source"),
    "PATH": lambda row: text_of(row, "path"),
}

app = typer.Typer(
    help="Containers of a server, and the files in them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=EPILOG,
)

ContainerArgument = Annotated[str, typer.Argument(metavar="CONTAINER", show_default=False, help="Its id.")]


@app.command("list")
def list_containers(
    base_url: BaseUrlOption = DEFAULT_URL,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Only those of that name.")] = None,
    limit: LimitOption = 100,
    json: JsonOption = False,
) -> None:
    """Show containers, expired ones too."""
    with told():
        found, more = Server(base_url).listed("/containers", limit, name=name)
    print_list(found, more, _CONTAINER_COLUMNS, as_json=json, none="There are no containers.")


@app.command("show")
def show(
    container: ContainerArgument, base_url: BaseUrlOption = DEFAULT_URL, json: JsonOption = False
) -> None:
    """Show one container."""
    with told():
        found = Server(base_url).get(f"/containers/{part(container)}")
    print_object(found, as_json=json)


@app.command("create")
def create(
    base_url: BaseUrlOption = DEFAULT_URL,
    name: Annotated[str, typer.Option(metavar="NAME", help="What lists call it.")] = "from the command line",
    memory: Annotated[Memory, typer.Option(help="How much memory it has.")] = Memory.ONE,
    minutes: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default="the server's", help="How long it lives without being used."
        ),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID", help="An upload that is in it from the beginning; may be given several times."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make a container; its id is printed."""
    body: Object = {"name": name, "memory_limit": memory.value}
    if minutes is not None:
        body["expires_after"] = {"anchor": "last_active_at", "minutes": minutes}
    if file:
        body["file_ids"] = file
    with told():
        made = Server(base_url).post("/containers", body)
    if json:
        print_json([made])
    else:
        print(text_of(made, "id"))


@app.command("rm", short_help="Delete containers with all their files.")
def remove(
    containers: Annotated[
        list[str], typer.Argument(metavar="CONTAINER", show_default=False, help="Their ids.")
    ],
    base_url: BaseUrlOption = DEFAULT_URL,
) -> None:
    """Delete containers with all their files; what runs in them is stopped."""
    with told():
        remove_all(Server(base_url), containers, "/containers")


@app.command("files")
def files(
    container: ContainerArgument,
    base_url: BaseUrlOption = DEFAULT_URL,
    limit: LimitOption = 100,
    json: JsonOption = False,
) -> None:
    """Show the files of a container."""
    with told():
        found, more = Server(base_url).listed(f"/containers/{part(container)}/files", limit)
    print_list(found, more, _FILE_COLUMNS, as_json=json, none="There are no files in it.")


@app.command("get")
def get(
    container: ContainerArgument,
    file: Annotated[
        str, typer.Argument(metavar="FILE", show_default=False, help="Its id, or its path below /mnt/data.")
    ],
    output: OutputOption = None,
    base_url: BaseUrlOption = DEFAULT_URL,
    force: ForceOption = False,
) -> None:
    """Save a file of a container here, under its own name or another."""
    with told():
        server = Server(base_url)
        below = f"/containers/{part(container)}/files"
        found = _found(server, below, file)
        path = f"{below}/{part(str(found.get('id')))}/content"
        save(server, path, str(found.get("path") or ""), output, force=force)


@app.command("put")
def put(
    container: ContainerArgument,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", show_default=False, exists=True, dir_okay=False, help="A file of this machine."
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="PATH", show_default="its own name", help="Where it is put, below /mnt/data."
        ),
    ] = None,
    unpack: Annotated[
        bool, typer.Option("--unpack", help="Unpack an archive there; Fumehood's servers only.")
    ] = False,
    base_url: BaseUrlOption = DEFAULT_URL,
    json: JsonOption = False,
) -> None:
    """Send a file into a container."""
    with told():
        fields = {"unpack": "true"} if unpack else {}
        made = Server(base_url).upload(
            f"/containers/{part(container)}/files", fields, file, name or file.name
        )
    if json:
        print_json([made])
    else:
        more = len(rows_of(made, "fumehood:unpacked")) - 1
        others = f" and {more} more" if more > 0 else ""
        note(f"Put {text_of(made, 'path') or cleaned(file.name)}{others}.")


def _found(server: Server, below: str, file: str) -> Object:
    """The file of that id, or at that path; raises Refused."""
    if file.startswith("cfile_") and "/" not in file:
        return server.get(f"{below}/{part(file)}")
    wanted = file if file.startswith(_DATA) else f"{_DATA}{file}"
    found, _ = server.listed(below, _ALL)
    for row in found:
        if row.get("path") == wanted:
            return row
    raise Refused(f"There is no file {cleaned(wanted)} in this container.")
