"""Settings of both servers: their types, and how they are read from a YAML file, variables and options."""

from fumehood.configuration.config_loader import (
    ConfigError,
    ConfigSchema,
    LoadedConfig,
    load_settings,
    parse_yaml,
    read_yaml_file,
)
from fumehood.configuration.config_report import format_settings
from fumehood.configuration.setting_types import (
    BYTES_UNIT,
    ByteSize,
    NonNegative,
    NonNegativeByteSize,
    NonNegativeNumber,
    Positive,
    PositiveNumber,
    Seconds,
    SettingsSection,
)

__all__ = [
    "BYTES_UNIT",
    "ByteSize",
    "ConfigError",
    "ConfigSchema",
    "LoadedConfig",
    "NonNegative",
    "NonNegativeByteSize",
    "NonNegativeNumber",
    "Positive",
    "PositiveNumber",
    "Seconds",
    "SettingsSection",
    "format_settings",
    "load_settings",
    "parse_yaml",
    "read_yaml_file",
]
