"""What clients upload, and what becomes of it; its modules import `interfaces`, `protocol` and `serving`."""

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
