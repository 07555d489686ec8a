"""Tool calls of any vendor as OpenTelemetry message parts.

`from_vendor` and `to_vendor` convert vendor items to canonical parts and back without loss; `to_representation` and
`from_representation` write and read the JSON that OpenTelemetry records. Other functions validate, redact and truncate.
"""

from fumehood.message_parts.canonical_parts import (
    BlobPart,
    FilePart,
    Json,
    JsonObject,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolCallResponsePart,
    UriPart,
)
from fumehood.message_parts.conversion import (
    StreamAssembler,
    UnrecognizedStreamError,
    convert,
    from_vendor,
    list_formats,
    to_vendor,
)
from fumehood.message_parts.execution_timing import EXECUTION_METADATA, build_timing
from fumehood.message_parts.media_digests import replace_inline_data
from fumehood.message_parts.otel_parts import (
    SOURCE_FIELD,
    from_representation,
    infer_finish_reason,
    part_type_name,
    to_messages,
    to_representation,
    upgrade_part,
)
from fumehood.message_parts.part_schema import REPRESENTATIONS, MalformedPartError
from fumehood.message_parts.part_truncation import TRUNCATED_FIELD, TRUNCATED_PART_TYPE, truncate_parts
from fumehood.message_parts.redaction import drop_vendor_items, redact_parts
from fumehood.message_parts.validation import read_published_schema, validate

__all__ = [
    "EXECUTION_METADATA",
    "REPRESENTATIONS",
    "SOURCE_FIELD",
    "TRUNCATED_FIELD",
    "TRUNCATED_PART_TYPE",
    "BlobPart",
    "FilePart",
    "Json",
    "JsonObject",
    "MalformedPartError",
    "Part",
    "ReasoningPart",
    "StreamAssembler",
    "TextPart",
    "ToolCallPart",
    "ToolCallResponsePart",
    "UnrecognizedStreamError",
    "UriPart",
    "build_timing",
    "convert",
    "drop_vendor_items",
    "from_representation",
    "from_vendor",
    "infer_finish_reason",
    "list_formats",
    "part_type_name",
    "read_published_schema",
    "redact_parts",
    "replace_inline_data",
    "to_messages",
    "to_representation",
    "to_vendor",
    "truncate_parts",
    "upgrade_part",
    "validate",
]
