"""`fumehood containers`: manages containers and their files, on any server with the Containers API."""

from pathlib import Path
from typing import Annotated

import typer

from fumehood.cli.api_client import (
    DEFAULT_URL,
    EPILOG,
    ApiClient,
    ApiObject,
    BaseUrlOption,
    ForceOption,
    LimitOption,
    OutputOption,
    delete_all,
    download_file,
    get_rows,
    quote_path_segment,
)
from fumehood.cli.options import CommandFailed, MemorySizeChoice, exit_on_error
from fumehood.cli.terminal_output import (
    JsonOption,
    TableColumns,
    format_size,
    format_text,
    format_time,
    print_json,
    print_list,
    print_message,
    print_object,
    sanitize_text,
)

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
    help="Manage containers of a server, and their files.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=EPILOG,
)

ContainerArgument = Annotated[
    str, typer.Argument(metavar="CONTAINER", show_default=False, help="The container id.")
]


@app.command("list")
@exit_on_error()
def list_containers(
    base_url: BaseUrlOption = DEFAULT_URL,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="List only containers with this name.")
    ] = None,
    limit: LimitOption = 100,
    json: JsonOption = False,
) -> None:
    """List containers, including expired ones."""
    found, more = ApiClient(base_url).list_objects("/containers", limit, name=name)
    print_list(found, more, _CONTAINER_COLUMNS, as_json=json, empty_message="There are no containers.")


@app.command("show")
@exit_on_error()
def show(
    container: ContainerArgument, base_url: BaseUrlOption = DEFAULT_URL, json: JsonOption = False
) -> None:
    """Show one container."""
    found = ApiClient(base_url).get(f"/containers/{quote_path_segment(container)}")
    print_object(found, as_json=json)


@app.command("create")
@exit_on_error()
def create(
    base_url: BaseUrlOption = DEFAULT_URL,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="The name of the container.")
    ] = "from the command line",
    memory: Annotated[MemorySizeChoice, typer.Option(help="The memory limit.")] = "1g",
    minutes: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default="the server's", help="Expire after this many idle minutes."
        ),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="An uploaded file to copy into it; repeatable."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Create a container and print its id."""
    body: ApiObject = {"name": name, "memory_limit": memory}
    if minutes is not None:
        body["expires_after"] = {"anchor": "last_active_at", "minutes": minutes}
    if file:
        body["file_ids"] = file
    created = ApiClient(base_url).post("/containers", body)
    if json:
        print_json([created])
    else:
        print(format_text(created, "id"))


@app.command("rm", short_help="Delete containers with all their files.")
@exit_on_error()
def remove(
    containers: Annotated[
        list[str], typer.Argument(metavar="CONTAINER", show_default=False, help="Container ids.")
    ],
    base_url: BaseUrlOption = DEFAULT_URL,
) -> None:
    """Delete containers with all their files, and stop what runs in them."""
    delete_all(ApiClient(base_url), containers, "/containers")


@app.command("files")
@exit_on_error()
def list_container_files(
    container: ContainerArgument,
    base_url: BaseUrlOption = DEFAULT_URL,
    limit: LimitOption = 100,
    json: JsonOption = False,
) -> None:
    """List the files of a container."""
    found, more = ApiClient(base_url).list_objects(
        f"/containers/{quote_path_segment(container)}/files", limit
    )
    print_list(found, more, _FILE_COLUMNS, as_json=json, empty_message="The container has no files.")


@app.command("get")
@exit_on_error()
def get(
    container: ContainerArgument,
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", show_default=False, help="The file id, or its path below /mnt/data."),
    ],
    output: OutputOption = None,
    base_url: BaseUrlOption = DEFAULT_URL,
    force: ForceOption = False,
) -> None:
    """Download a file of a container."""
    server = ApiClient(base_url)
    files_path = f"/containers/{quote_path_segment(container)}/files"
    found = _find_file(server, files_path, file)
    path = f"{files_path}/{quote_path_segment(str(found.get('id')))}/content"
    download_file(server, path, str(found.get("path") or ""), output, force=force)


@app.command("put")
@exit_on_error()
def put(
    container: ContainerArgument,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", show_default=False, exists=True, dir_okay=False, help="A local file."),
    ],
    name: Annotated[
        str | None,
        typer.Option("--as", metavar="PATH", show_default="its own name", help="The path below /mnt/data."),
    ] = None,
    unpack: Annotated[
        bool, typer.Option("--unpack", help="Unpack an archive there; Fumehood servers only.")
    ] = False,
    base_url: BaseUrlOption = DEFAULT_URL,
    json: JsonOption = False,
) -> None:
    """Upload a file into a container."""
    fields = {"unpack": "true"} if unpack else {}
    created = ApiClient(base_url).upload(
        f"/containers/{quote_path_segment(container)}/files", fields, file, name or file.name
    )
    if json:
        print_json([created])
    else:
        more = len(get_rows(created, "fumehood:unpacked")) - 1
        others = f" and {more} more" if more > 0 else ""
        print_message(f"Put {format_text(created, 'path') or sanitize_text(file.name)}{others}.")


def _find_file(server: ApiClient, files_path: str, file: str) -> ApiObject:
    """Find a file by its id or path. Raises CommandFailed."""
    if file.startswith("cfile_") and "/" not in file:
        return server.get(f"{files_path}/{quote_path_segment(file)}")
    path = file if file.startswith(_DATA_DIRECTORY) else f"{_DATA_DIRECTORY}{file}"
    found, _ = server.list_objects(files_path, _MAX_FILES)
    for row in found:
        if row.get("path") == path:
            return row
    raise CommandFailed(f"The container has no file {sanitize_text(path)}.")
