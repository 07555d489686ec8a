"""Errors of the provider about containers: expired, or unknown to it."""

from typing import Any

from fumehood.client.errors import ContainerExpiredError, ContainerNotFoundError

_HINT = "make another one, or use AutoContainerConfig"


class ContainerGoneError(Exception):
    """The provider says that a container is expired or missing. Never leaves the adapter.

    is_expired: it says expired; otherwise it does not know the container. body: what it sent.
    """

    def __init__(self, message: str, *, is_expired: bool = False, body: object = None) -> None:
        super().__init__(message)
        self.is_expired = is_expired
        self.body = body


def read_gone_error(error: Any) -> ContainerGoneError | None:
    """Return what an error of the SDK says about a container that is gone; None if it says something else."""
    status = getattr(error, "status_code", None)
    words = str(error).lower()
    if getattr(error, "code", None) == "model_not_found":  # whatever the model is called
        return None
    is_expired = "expired" in words
    if "container" not in words or not (status == 404 or (status == 400 and is_expired)):
        return None
    return ContainerGoneError(error.message, is_expired=is_expired, body=error.body)


def build_container_error(
    container_id: str, gone: ContainerGoneError, hint: str = _HINT
) -> ContainerExpiredError | ContainerNotFoundError:
    """Return the error for the caller. hint: what to do about it."""
    if gone.is_expired:
        return ContainerExpiredError(
            container_id, gone, f"The container {container_id!r} has expired; {hint}."
        )
    return ContainerNotFoundError(
        container_id,
        gone,
        f"The provider has no container {container_id!r}: it was deleted, or never was in this account; {hint}.",
    )
