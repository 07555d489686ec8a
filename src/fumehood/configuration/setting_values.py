"""Converts and checks the values of settings by their types."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAliasType, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from fumehood.configuration.setting_types import BYTES_UNIT

_SIZE_PATTERN = re.compile(r"(\d{1,15}) ?([kmgt])(?:ib|b)?", re.IGNORECASE)
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE_EXPECTED = "expected a number of bytes, or a size such as 512m or 4g"
_MAX_QUOTED = 200


class InvalidSettingText(ValueError):
    """The text of a variable is not a value of the setting's type; the message does not quote it."""


# ---- types ------------------------------------------------------------------------------------------------------


def is_section(kind: Any) -> bool:
    """Whether settings of this type have settings below them."""
    return hasattr(kind, "__struct_fields__") or hasattr(kind, "__dataclass_fields__")


def get_setting_types(kind: Any) -> dict[str, Any]:
    """The names and types of the settings of a section."""
    return get_type_hints(kind, include_extras=True)


def unwrap_optional(kind: Any) -> tuple[Any, bool]:
    """The type without `| None`, and whether it had that."""
    kind = _resolve_alias(kind)
    if get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind):
        return _resolve_alias(next(part for part in get_args(kind) if part is not NoneType)), True
    return kind, False


def _resolve_alias(kind: Any) -> Any:
    while True:
        if isinstance(kind, TypeAliasType):
            kind = kind.__value__
        elif get_origin(kind) is Annotated and is_section(get_args(kind)[0]):
            kind = get_args(kind)[0]
        else:
            return kind


def _is_byte_size(kind: Any) -> bool:
    metadata = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return any(isinstance(part, Meta) and part.extra == BYTES_UNIT for part in metadata)


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (tuple, list)


def _is_mapping(kind: Any) -> bool:
    return get_origin(kind) in (dict, Mapping)


# ---- text of variables ------------------------------------------------------------------------------------------


def parse_text(kind: Any, text: str) -> object:
    """Convert the text of a variable to what the file would hold. Raises InvalidSettingText."""
    plain, optional = unwrap_optional(kind)
    stripped = text.strip()
    structured = _is_list(plain) or _is_mapping(plain) or is_section(plain)
    if optional and stripped.lower() in (("null", "none") if structured else ("", "null", "none")):
        return None
    if structured:
        return _parse_structured_text(plain, stripped)
    if plain is str or get_origin(plain) is Literal:
        return text
    if plain is Path:
        return stripped
    if _is_byte_size(plain) and _SIZE_PATTERN.fullmatch(stripped):
        return stripped
    if plain is bool:
        stripped = {"on": "true", "off": "false"}.get(stripped.lower(), stripped)
    try:
        return msgspec.convert(stripped, plain, strict=False)
    except msgspec.ValidationError as error:
        message = describe_validation_error(str(error))[1]
        if _is_byte_size(plain) and not stripped.lstrip("-").isdecimal():
            message = _SIZE_EXPECTED
        raise InvalidSettingText(message) from None


def _parse_structured_text(kind: Any, text: str) -> object:
    """Lists of plain values may be written with commas, tables of text as name=value."""
    if _is_list(kind) and not is_section(get_args(kind)[0]) and not text.startswith("["):
        return _convert_parts([part.strip() for part in text.split(",") if part.strip()], kind)
    if _is_mapping(kind) and not text.startswith("{"):
        pairs = [part.partition("=") for part in text.split(",") if part.strip()]
        if any(not sign for _, sign, _ in pairs):
            raise InvalidSettingText("expected name=value with commas between them, or JSON")
        return {name.strip(): value.strip() for name, _, value in pairs}
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise InvalidSettingText("it should hold JSON") from None


def _convert_parts(parts: list[str], kind: Any) -> object:
    try:
        return list(cast("tuple[object, ...]", msgspec.convert(parts, kind, strict=False)))
    except msgspec.ValidationError as error:
        raise InvalidSettingText(describe_validation_error(str(error))[1]) from None


# ---- checks -----------------------------------------------------------------------------------------------------


def normalise_setting(value: object, kind: Any, path: str) -> tuple[object, Iterator[tuple[str, str]]]:
    """Convert spellings that the type does not know, such as sizes; and the problems, as path and message."""
    plain, optional = unwrap_optional(kind)
    if value is None and optional:
        return None, iter(())
    if _is_byte_size(plain) and isinstance(value, str):
        size = _SIZE_PATTERN.fullmatch(value.strip())
        if size is None:
            return value, iter([(path, f"{_SIZE_EXPECTED}.")])
        value = int(size[1]) * _UNITS[size[2].lower()]
    if get_origin(plain) is Literal:
        return _normalise_choice(value, get_args(plain), path)
    return value, _find_problems(value, kind, path)


def _normalise_choice(
    value: object, choices: tuple[str, ...], path: str
) -> tuple[object, Iterator[tuple[str, str]]]:
    """YAML reads a bare `on` or `off` as a boolean."""
    if isinstance(value, bool):
        value = next((name for name in choices if name == ("on" if value else "off")), value)
    if isinstance(value, str) and value in choices:
        return value, iter(())
    found = f"{value[:_MAX_QUOTED]!r} is not one of" if isinstance(value, str) else "expected one of"
    return value, iter([(path, f"{found} {', '.join(choices)}.")])


def _find_problems(value: object, kind: Any, path: str) -> Iterator[tuple[str, str]]:
    try:
        converted = msgspec.convert(value, kind, dec_hook=decode_path)
    except msgspec.ValidationError as error:
        below, message = describe_validation_error(str(error))
        yield f"{path}{below}", f"{message}."
        return
    if isinstance(converted, float) and not math.isfinite(converted):
        yield path, "expected a finite number."


def decode_path(kind: type, value: object) -> object:
    """The `dec_hook` for settings that are paths, which are absolute."""
    if kind is not Path:
        return value
    if not isinstance(value, str | Path) or not Path(value).is_absolute():
        raise ValueError("expected an absolute path")
    return Path(value)


def describe_validation_error(text: str) -> tuple[str, str]:
    """msgspec's path below the value, such as `[0].name`, and its message."""
    message, _, path = text.partition(" - at ")
    message = message.replace("`", "").replace("Expected", "expected", 1).replace("Invalid", "invalid", 1)
    return path.strip("`").removeprefix("$"), message
