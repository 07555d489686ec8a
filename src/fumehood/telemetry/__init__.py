"""Spans, metrics and events for OpenTelemetry.

`OtlpPipeline` instruments the gateway and exports over OTLP; `ClientTelemetry` observes the typed client.
Both need the extra `fumehood[otel]` and are imported on first use, because neither loads what the other needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fumehood.telemetry.client_telemetry import ClientTelemetry
    from fumehood.telemetry.otlp_pipeline import OtlpPipeline, OtlpPipelineSettings

__all__ = [
    "ClientTelemetry",
    "OtlpPipeline",
    "OtlpPipelineSettings",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "client_telemetry" if name == "ClientTelemetry" else "otlp_pipeline"
    return getattr(import_module(f"{__name__}.{module}"), name)
