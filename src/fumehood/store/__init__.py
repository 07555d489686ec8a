"""What is kept, and how."""

from fumehood.store.database_doctor import DatabaseNotFound, DatabaseReport, examine_database, find_database
from fumehood.store.disk_blob_store import DiskBlobStore
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.store.sqlite_store import SqliteStore, StoreOpenError

__all__ = [
    "DatabaseNotFound",
    "DatabaseReport",
    "DiskBlobStore",
    "GarbageCollectedBlobs",
    "SqliteStore",
    "StoreOpenError",
    "examine_database",
    "find_database",
]
