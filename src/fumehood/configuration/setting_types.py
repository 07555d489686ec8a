"""Types of settings, with the bounds that are checked when a configuration is loaded."""

from typing import Annotated

import msgspec
from msgspec import Meta

BYTES_UNIT = {"unit": "bytes"}

type Positive = Annotated[int, Meta(ge=1)]
type NonNegative = Annotated[int, Meta(ge=0)]
type PositiveNumber = Annotated[float, Meta(gt=0)]
type NonNegativeNumber = Annotated[float, Meta(ge=0)]
type Seconds = Annotated[float, Meta(gt=0, le=86_400)]
# Numbers of bytes, which may be written as 512m or 4g.
type ByteSize = Annotated[int, Meta(ge=1, extra=BYTES_UNIT)]
type NonNegativeByteSize = Annotated[int, Meta(ge=0, extra=BYTES_UNIT)]


class SettingsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the configuration. A package defines the sections that it reads; `config` puts them together."""
