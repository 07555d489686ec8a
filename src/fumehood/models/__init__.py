"""What writes: clients of model servers, and stand-ins."""

from fumehood.models.model_settings import ModelSettings, check_url, read_secret

__all__ = [
    "ModelSettings",
    "check_url",
    "read_secret",
]
