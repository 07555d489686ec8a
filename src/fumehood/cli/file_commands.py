"""`fumehood files`: manages uploaded files, on any server with the Files API."""

from pathlib import Path
from typing import Annotated

import typer

from fumehood.cli.api_client import (
    DEFAULT_URL,
    EPILOG,
    ApiClient,
    BaseUrlOption,
    ForceOption,
    LimitOption,
    OutputOption,
    delete_all,
    download_file,
    quote_path_segment,
)
from fumehood.cli.options import exit_on_error
from fumehood.cli.terminal_output import (
    JsonOption,
    TableColumns,
    format_size,
    format_text,
    format_time,
    print_json,
    print_list,
    print_object,
)

_COLUMNS: TableColumns = {
    "ID": lambda row: format_text(row, "id"),
    "BYTES": lambda row: format_size(row, "bytes"),
    "CREATED": lambda row: format_time(row, "created_at"),
    "EXPIRES": lambda row: format_time(row, "expires_at"),
    "PURPOSE": lambda row: format_text(row, "purpose"),
    "NAME": lambda row: format_text(row, "filename"),
}

app = typer.Typer(
    help="Manage files uploaded to a server.", no_args_is_help=True, rich_markup_mode=None, epilog=EPILOG
)

FileArgument = Annotated[str, typer.Argument(metavar="FILE", show_default=False, help="The file id.")]


@app.command("list")
@exit_on_error()
def list_files(
    base_url: BaseUrlOption = DEFAULT_URL,
    purpose: Annotated[
        str | None, typer.Option(metavar="PURPOSE", help="List only files with this purpose.")
    ] = None,
    limit: LimitOption = 100,
    json: JsonOption = False,
) -> None:
    """List uploaded files."""
    found, more = ApiClient(base_url).list_objects("/files", limit, purpose=purpose)
    print_list(found, more, _COLUMNS, as_json=json, empty_message="There are no files.")


@app.command("show")
@exit_on_error()
def show(file: FileArgument, base_url: BaseUrlOption = DEFAULT_URL, json: JsonOption = False) -> None:
    """Show the metadata of a file."""
    found = ApiClient(base_url).get(f"/files/{quote_path_segment(file)}")
    print_object(found, as_json=json)


@app.command("upload")
@exit_on_error()
def upload(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="PATH", show_default=False, exists=True, dir_okay=False, help="Local files."),
    ],
    base_url: BaseUrlOption = DEFAULT_URL,
    purpose: Annotated[str, typer.Option(metavar="PURPOSE", help="The purpose of the files.")] = "user_data",
    expires_after: Annotated[
        int | None, typer.Option(metavar="SECONDS", min=1, help="Delete them after this time.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Upload files and print their ids."""
    fields = {"purpose": purpose}
    if expires_after is not None:
        fields |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(expires_after)}
    server = ApiClient(base_url)
    for file in files:
        created = server.upload("/files", fields, file, file.name)
        if json:
            print_json([created])
        else:
            print(format_text(created, "id"))


@app.command("get")
@exit_on_error()
def get(
    file: FileArgument,
    output: OutputOption = None,
    base_url: BaseUrlOption = DEFAULT_URL,
    force: ForceOption = False,
) -> None:
    """Download a file."""
    server = ApiClient(base_url)
    found = server.get(f"/files/{quote_path_segment(file)}")
    download_file(
        server,
        f"/files/{quote_path_segment(file)}/content",
        str(found.get("filename") or ""),
        output,
        force=force,
    )


@app.command("rm")
@exit_on_error()
def remove(
    files: Annotated[list[str], typer.Argument(metavar="FILE", show_default=False, help="File ids.")],
    base_url: BaseUrlOption = DEFAULT_URL,
) -> None:
    """Delete files. Copies in containers stay."""
    delete_all(ApiClient(base_url), files, "/files")
