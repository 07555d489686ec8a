"""`fumehood containers`: looks into containers of any server, fills and removes them."""

from pathlib import Path
from typing import Annotated

import typer

from fumehood.cli.api_client import (
    DEFAULT_URL,
    EPILOG,
    ApiClient,
    ApiObject,
    BaseUrlOption,
    CommandFailed,
    ForceOption,
    JsonOption,
    LimitOption,
    OutputOption,
    TableColumns,
    delete_all,
    download_file,
    exit_on_error,
    format_size,
    format_text,
    format_time,
    get_rows,
    print_json,
    print_list,
    print_message,
    print_object,
    quote_path_segment,
    sanitize_text,
)
from fumehood.cli.options import MemorySizeChoice

_MAX_FILES = 100_000
_DATA_DIRECTORY = "/mnt/data/"

_CONTAINER_COLUMNS: TableColumns = {
    "ID": lambda row: format_text(row, "id"),
    "STATUS": lambda row: format_text(row, "status"),
    "MEMORY": lambda row: format_text(row, "memory_limit"),
    "CREATED": lambda row: format_time(row, "created_at"),
    "LAST USED": lambda row: format_time(row, "last_active_at"),
    "NAME": lambda row: format_text(row, "name"),
}
_FILE_COLUMNS: TableColumns = {
    "ID": lambda row: format_text(row, "id"),
    "BYTES": lambda row: format_size(row, "bytes"),
    "CREATED": lambda row: format_time(row, "created_at"),
    "BY": lambda row: format_text(row, "source"),
    "PATH": lambda row: format_text(row, "path"),
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
    with exit_on_error():
        found, more = ApiClient(base_url).list_objects("/containers", limit, name=name)
    print_list(found, more, _CONTAINER_COLUMNS, as_json=json, empty_message="There are no containers.")


@app.command("show")
def show(
    container: ContainerArgument, base_url: BaseUrlOption = DEFAULT_URL, json: JsonOption = False
) -> None:
    """Show one container."""
    with exit_on_error():
        found = ApiClient(base_url).get(f"/containers/{quote_path_segment(container)}")
    print_object(found, as_json=json)


@app.command("create")
def create(
    base_url: BaseUrlOption = DEFAULT_URL,
    name: Annotated[str, typer.Option(metavar="NAME", help="What lists call it.")] = "from the command line",
    memory: Annotated[
        MemorySizeChoice, typer.Option(help="How much memory it has.")
    ] = MemorySizeChoice.GIB_1,
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
    body: ApiObject = {"name": name, "memory_limit": memory.value}
    if minutes is not None:
        body["expires_after"] = {"anchor": "last_active_at", "minutes": minutes}
    if file:
        body["file_ids"] = file
    with exit_on_error():
        made = ApiClient(base_url).post("/containers", body)
    if json:
        print_json([made])
    else:
        print(format_text(made, "id"))


@app.command("rm", short_help="Delete containers with all their files.")
def remove(
    containers: Annotated[
        list[str], typer.Argument(metavar="CONTAINER", show_default=False, help="Their ids.")
    ],
    base_url: BaseUrlOption = DEFAULT_URL,
) -> None:
    """Delete containers with all their files; what runs in them is stopped."""
    with exit_on_error():
        delete_all(ApiClient(base_url), containers, "/containers")


@app.command("files")
def list_container_files(
    container: ContainerArgument,
    base_url: BaseUrlOption = DEFAULT_URL,
    limit: LimitOption = 100,
    json: JsonOption = False,
) -> None:
    """Show the files of a container."""
    with exit_on_error():
        found, more = ApiClient(base_url).list_objects(
            f"/containers/{quote_path_segment(container)}/files", limit
        )
    print_list(found, more, _FILE_COLUMNS, as_json=json, empty_message="There are no files in it.")


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
    with exit_on_error():
        server = ApiClient(base_url)
        below = f"/containers/{quote_path_segment(container)}/files"
        found = _find_file(server, below, file)
        path = f"{below}/{quote_path_segment(str(found.get('id')))}/content"
        download_file(server, path, str(found.get("path") or ""), output, force=force)


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
    with exit_on_error():
        fields = {"unpack": "true"} if unpack else {}
        made = ApiClient(base_url).upload(
            f"/containers/{quote_path_segment(container)}/files", fields, file, name or file.name
        )
    if json:
        print_json([made])
    else:
        more = len(get_rows(made, "fumehood:unpacked")) - 1
        others = f" and {more} more" if more > 0 else ""
        print_message(f"Put {format_text(made, 'path') or sanitize_text(file.name)}{others}.")


def _find_file(server: ApiClient, files_path: str, file: str) -> ApiObject:
    """The file of that id, or at that path; raises Refused."""
    if file.startswith("cfile_") and "/" not in file:
        return server.get(f"{files_path}/{quote_path_segment(file)}")
    wanted = file if file.startswith(_DATA_DIRECTORY) else f"{_DATA_DIRECTORY}{file}"
    found, _ = server.list_objects(files_path, _MAX_FILES)
    for row in found:
        if row.get("path") == wanted:
            return row
    raise CommandFailed(f"There is no file {sanitize_text(wanted)} in this container.")
