"""Storage of the gateway: all records in one SQLite file, all large contents as blobs in one directory.

`SqliteStore` is a `Store`, `DiskBlobStore` a `BlobStore`; `GarbageCollectedBlobs` deletes blobs that no record refers
to. `aes_gcm_sealer` encrypts the state that clients carry. docs/storage.md describes what is guaranteed.
"""

from fumehood.store.database_check import DatabaseNotFound, DatabaseReport, examine_database, find_database
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
