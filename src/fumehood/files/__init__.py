"""The Files API and the files of requests.

Stores uploads within quotas. `input_file_loader` loads the files and images that requests reference, inline, by id or
by URL; with `url_fetcher` it imports an HTTP client, which reading a configuration must not do.
"""

from fumehood.files.file_settings import InputSettings, UploadSettings
from fumehood.files.upload_file_service import UploadFileService

__all__ = ["InputSettings", "UploadFileService", "UploadSettings"]
