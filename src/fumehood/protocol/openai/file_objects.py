"""Uploaded files: API objects and stored records."""

from typing import Literal

import msgspec

from fumehood.protocol.name_sanitizing import sanitize_name

type UploadPurpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
"""The purposes that a client may name."""

type FilePurpose = Literal[
    "assistants",
    "assistants_output",
    "batch",
    "batch_output",
    "fine-tune",
    "fine-tune-results",
    "vision",
    "user_data",
    "evals",
]


class UploadedFileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A stored upload; times are seconds since 1970.

    filename: the last component of the client's name, sanitized; files are never looked up by it.
    blob: the name of its content.
    """

    id: str
    tenant: str
    filename: str
    bytes: int
    purpose: FilePurpose
    created_at: float
    expires_at: float | None = None
    blob: str


class FileUploadMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The form fields of an upload; the name is not sanitized yet.

    expires_after: seconds; None keeps it until it is deleted.
    """

    filename: str
    purpose: UploadPurpose
    expires_after: int | None = None


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """An upload in the API."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: FilePurpose
    status: Literal["uploaded", "processed", "error"] = "processed"
    status_details: str | None = None


def to_file_object(record: UploadedFileRecord) -> FileObject:
    return FileObject(
        id=record.id,
        bytes=record.bytes,
        created_at=int(record.created_at),
        expires_at=None if record.expires_at is None else int(record.expires_at),
        filename=sanitize_name(record.filename),
        purpose=record.purpose,
    )
