"""The Files API and the files of requests.

Stores uploads within quotas, and loads the files and images that requests reference, inline, by id or by URL. Here are
the settings alone, so that reading a configuration does not import an HTTP client.
"""

from fumehood.files.file_settings import InputSettings, UploadSettings

__all__ = ["InputSettings", "UploadSettings"]
