"""The Files API and the files of requests.

Stores uploads within quotas, and loads the files and images that requests reference, inline, by id or by URL.
"""

from fumehood.files.input_file_loader import InputFileLoader, InputLimits
from fumehood.files.uploaded_files import UploadedFiles, UploadSettings
from fumehood.files.url_fetcher import FetchLimits, UrlFetcher, UrlPassthrough

__all__ = [
    "FetchLimits",
    "InputFileLoader",
    "InputLimits",
    "UploadSettings",
    "UploadedFiles",
    "UrlFetcher",
    "UrlPassthrough",
]
