"""`fumehood files`: uploads of any server; imports typer and siblings."""

from pathlib import Path
from typing import Annotated

import typer

from fumehood.cli.remote import (
    DEFAULT_URL,
    EPILOG,
    BaseUrlOption,
    Columns,
    ForceOption,
    JsonOption,
    LimitOption,
    OutputOption,
    Server,
    part,
    print_json,
    print_list,
    print_object,
    remove_all,
    save,
    size_of,
    text_of,
    time_of,
    told,
)

_COLUMNS: Columns = {
    "ID": lambda row: text_of(row, "id"),
    "BYTES": lambda row: size_of(row, "bytes"),
    "CREATED": lambda row: time_of(row, "created_at"),
    "EXPIRES": lambda row: time_of(row, "expires_at"),
    "PURPOSE": lambda row: text_of(row, "purpose"),
    "NAME": lambda row: text_of(row, "filename"),
}

app = typer.Typer(
    help="Files that were uploaded to a server.", no_args_is_help=True, rich_markup_mode=None, epilog=EPILOG
)

FileArgument = Annotated[str, typer.Argument(metavar="FILE", show_default=False, help="Its id.")]


@app.command("list")
def list_files(
    base_url: BaseUrlOption = DEFAULT_URL,
    purpose: Annotated[
        str | None, typer.Option(metavar="PURPOSE", help="Only those of that purpose.")
    ] = None,
    limit: LimitOption = 100,
    json: JsonOption = False,
) -> None:
    """Show the files that were uploaded."""
    with told():
        found, more = Server(base_url).listed("/files", limit, purpose=purpose)
    print_list(found, more, _COLUMNS, as_json=json, none="There are no files.")


@app.command("show")
def show(file: FileArgument, base_url: BaseUrlOption = DEFAULT_URL, json: JsonOption = False) -> None:
    """Show what is known of one file."""
    with told():
        found = Server(base_url).get(f"/files/{part(file)}")
    print_object(found, as_json=json)


@app.command("upload")
def upload(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH", show_default=False, exists=True, dir_okay=False, help="Files of this machine."
        ),
    ],
    base_url: BaseUrlOption = DEFAULT_URL,
    purpose: Annotated[str, typer.Option(metavar="PURPOSE", help="What they are for.")] = "user_data",
    expires_after: Annotated[
        int | None, typer.Option(metavar="SECONDS", min=1, help="How long they are kept.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Upload files; their ids are printed."""
    fields = {"purpose": purpose}
    if expires_after is not None:
        fields |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(expires_after)}
    with told():
        server = Server(base_url)
        for file in files:
            made = server.upload("/files", fields, file, file.name)
            if json:
                print_json([made])
            else:
                print(text_of(made, "id"))


@app.command("get")
def get(
    file: FileArgument,
    output: OutputOption = None,
    base_url: BaseUrlOption = DEFAULT_URL,
    force: ForceOption = False,
) -> None:
    """Save a file here, under its own name or another."""
    with told():
        server = Server(base_url)
        found = server.get(f"/files/{part(file)}")
        save(server, f"/files/{part(file)}/content", str(found.get("filename") or ""), output, force=force)


@app.command("rm")
def remove(
    files: Annotated[list[str], typer.Argument(metavar="FILE", show_default=False, help="Their ids.")],
    base_url: BaseUrlOption = DEFAULT_URL,
) -> None:
    """Delete files. Copies that containers have stay."""
    with told():
        remove_all(Server(base_url), files, "/files")
