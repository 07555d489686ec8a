"""What the gateway and the client tell of themselves through OpenTelemetry."""

from fumehood.telemetry.otlp_pipeline import OtlpPipeline, OtlpPipelineSettings

__all__ = [
    "OtlpPipeline",
    "OtlpPipelineSettings",
]
