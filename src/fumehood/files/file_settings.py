"""Settings of uploads and of files in requests."""

from fumehood.configuration import ByteSize, Positive, Seconds, SettingsSection
from fumehood.interfaces import FileTotals


class UploadSettings(SettingsSection, frozen=True):
    """Limits of uploads.

    file_bytes: the largest file. tenant_bytes, tenant_files: all files of one tenant.
    concurrent_uploads: of one tenant.
    extra_types: accepted beside the usual types.
    """

    file_bytes: ByteSize = 2 << 30
    tenant_bytes: ByteSize = 64 << 30
    tenant_files: Positive = 10_000
    concurrent_uploads: Positive = 16
    extra_types: tuple[str, ...] = ()

    @property
    def tenant_quota(self) -> FileTotals:
        return FileTotals(self.tenant_files, self.tenant_bytes)


class InputSettings(SettingsSection, frozen=True):
    """Files and images in requests.

    image_bytes, file_bytes: the largest that are sent to a model. Code can read larger files.
    fetch_urls: whether the gateway fetches URLs; pass_urls: whether it passes them on to the model server.
    fetch_bytes: the largest fetched file. fetch_timeout: total time, including name resolution.
    fetch_private_networks: private networks that URLs may name nevertheless.
    """

    image_bytes: ByteSize = 20 << 20
    file_bytes: ByteSize = 32 << 20
    fetch_urls: bool = False
    fetch_bytes: ByteSize = 20 << 20
    fetch_timeout: Seconds = 20.0
    fetch_private_networks: tuple[str, ...] = ()
    pass_urls: bool = False
