"""Reads settings from a YAML file, environment variables and options, and checks them.

Both servers use it, each with a `ConfigSchema`.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from fumehood.configuration.setting_values import (
    InvalidSettingText,
    decode_path,
    describe_validation_error,
    get_setting_types,
    is_section,
    normalise_setting,
    parse_text,
    unwrap_optional,
)

_MAX_QUOTED = 200
_COMMAND_LINE = "the command line"


class ConfigError(ValueError):
    """Settings that cannot be used.

    Each of `problems` is a sentence: the source, the setting, and what to do. It never contains a value that could be a
    secret.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def _explain_nothing(_: str) -> str | None:
    return None


def _find_nothing(_: Any) -> Iterator[str]:
    return iter(())


def _accept_file(_file: Path, _status: os.stat_result, _content: Mapping[str, Any]) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSchema[T]:
    """The settings of one server.

    settings: the class whose fields are the settings.
    prefix: of environment variables; the rest is the path of a setting, with two underscores between levels.
    example: what a file contains, for the error about one that does not.
    is_setting_variable: whether the rest of a variable's name names a setting; others are ignored.
    explain_unknown: advice about a name that is no setting; None if there is none but the similar names.
    find_problems: problems of settings that are valid one by one, each beginning with the path of the setting.
    check_file: raises ConfigError if the file, with this content, must not be used.
    """

    settings: type[T]
    prefix: str
    example: str
    is_setting_variable: Callable[[str], bool]
    explain_unknown: Callable[[str], str | None] = _explain_nothing
    find_problems: Callable[[T], Iterator[str]] = _find_nothing
    check_file: Callable[[Path, os.stat_result, Mapping[str, Any]], None] = _accept_file


@dataclass(frozen=True, slots=True)
class LoadedConfig[T]:
    """Settings, and the variables that set some of them."""

    settings: T
    variables: tuple[str, ...]


@dataclass(slots=True)
class _SettingsTree:
    """Values by path, and where those came from that are not from the file."""

    values: dict[str, Any]
    where: str
    sources: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[str] = field(default_factory=list[str])

    def set(self, path: Sequence[str], value: object, source: str) -> None:
        tree = self.values
        for name in path[:-1]:
            below: object = tree.get(name)
            if not isinstance(below, dict):
                below = tree[name] = {}
            tree = cast("dict[str, Any]", below)
        tree[path[-1]] = value
        self.sources[".".join(path)] = source

    def has(self, path: Sequence[str]) -> bool:
        tree: Any = self.values
        for name in path:
            if not isinstance(tree, dict) or name not in tree:
                return False
            tree = tree[name]  # pyright: ignore[reportUnknownVariableType]
        return True

    def add_problem(self, problem: str) -> None:
        """Add a problem that begins with the path of its setting."""
        found = [path for path in self.sources if re.match(rf"{re.escape(path)}\b", problem)]
        source = self.sources[max(found, key=len)] if found else self.where
        self.problems.append(f"{source}: {problem}")

    def check(self) -> None:
        if self.problems:
            raise ConfigError(*self.problems)


def load_settings[T](
    schema: ConfigSchema[T],
    file: Path | None,
    environ: Mapping[str, str],
    *,
    options: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> LoadedConfig[T]:
    """Read the settings and check them. Raises ConfigError with all problems.

    options: values by dotted path; they override variables, which override the file.
    defaults: values by dotted path that the file overrides.
    """
    values: dict[str, Any] = {}
    if file is not None:
        values, status = read_yaml_file(file, schema.example)
        schema.check_file(file, status, values)
    tree = _SettingsTree(values, "the configuration" if file is None else str(file))
    variables = _set_variables(schema, tree, environ)
    for dotted, value in (options or {}).items():
        tree.set(dotted.split("."), value, _COMMAND_LINE)
    for dotted, value in (defaults or {}).items():
        if not tree.has(path := dotted.split(".")):
            tree.set(path, value, "the default")
    tree.values = _normalise_section(schema, tree, tree.values, schema.settings, "")
    tree.check()
    try:
        settings = msgspec.convert(tree.values, schema.settings, dec_hook=decode_path)
    except msgspec.ValidationError as error:
        path, message = describe_validation_error(str(error))
        tree.add_problem(f"{path.removeprefix('.')}: {message}." if path else f"{message}.")
        tree.check()
        raise
    for problem in schema.find_problems(settings):
        tree.add_problem(problem)
    tree.check()
    return LoadedConfig(settings, variables)


# ---- the file ---------------------------------------------------------------------------------------------------


def read_yaml_file(
    file: Path, example: str = "settings, as `name: value`"
) -> tuple[dict[str, Any], os.stat_result]:
    """The sections of a YAML file, and its status when it was read. Raises ConfigError."""
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            text = opened.read().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.") from None
    except UnicodeError:
        raise ConfigError(f"{file} is not UTF-8 text.") from None
    return parse_yaml(text, file, example), status


def parse_yaml(text: str, file: Path, example: str) -> dict[str, Any]:
    """The sections of a YAML text. Raises ConfigError."""
    import yaml

    try:
        node = cast("Any", yaml.compose(text, yaml.SafeLoader))  # pyright: ignore[reportUnknownMemberType]
        if node is None:
            return {}
        _check_duplicates(node, file)
        content: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" at line {mark.line + 1}"
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise ConfigError(f"{file} is not YAML{line}: {problem}.{_advise_toml(file)}") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} should hold {example}.{_advise_toml(file)}")
    return cast("dict[str, Any]", content)


def _advise_toml(file: Path) -> str:
    return " Settings are YAML, not TOML." if file.suffix == ".toml" else ""


def _check_duplicates(node: Any, file: Path) -> None:
    """Reject a setting that the file has twice; YAML would use the last one. Raises ConfigError."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        for element in node.value:
            _check_duplicates(element, file)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise ConfigError(f"{file} has {key.value[:_MAX_QUOTED]} twice, again at line {line}.")
                seen.add(key.value)
            _check_duplicates(value, file)


# ---- variables --------------------------------------------------------------------------------------------------


def _set_variables[T](
    schema: ConfigSchema[T], tree: _SettingsTree, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Put the values of variables into the tree; returns the variables that name settings."""
    variables: list[str] = []
    for variable, text in sorted(environ.items()):
        rest = variable.removeprefix(schema.prefix)
        if rest == variable or not schema.is_setting_variable(rest):
            continue
        variables.append(variable)
        path = rest.lower().split("__")
        try:
            tree.set(path, parse_text(_find_setting_type(schema, path), text), variable)
        except InvalidSettingText as error:
            tree.problems.append(f"{variable}: {error}.")
        except _UnknownSetting as error:
            tree.problems.append(f"{variable}: {error}")
    return tuple(variables)


class _UnknownSetting(Exception):
    pass


def _find_setting_type[T](schema: ConfigSchema[T], path: Sequence[str]) -> Any:
    """The type of the setting at a path. Raises _UnknownSetting."""
    kind: Any = schema.settings
    for depth, name in enumerate(path):
        if not is_section(kind):
            raise _UnknownSetting(f"{'.'.join(path[:depth])} has no settings below it.")
        known = get_setting_types(kind)
        if name not in known:
            raise _UnknownSetting(_describe_unknown_setting(schema, name, known, ".".join(path[:depth])))
        kind = known[name]
    return kind


# ---- names and values -------------------------------------------------------------------------------------------


def _normalise_section[T](
    schema: ConfigSchema[T], tree: _SettingsTree, section: Mapping[str, Any], kind: Any, path: str
) -> dict[str, Any]:
    """The section with normalised values and without empty sections below it; problems go to the tree."""
    known = get_setting_types(kind)
    normalised: dict[str, Any] = {}
    for name, value in section.items():
        full = f"{path}.{name}" if path else str(name)
        if name not in known:
            where = next((source for key, source in tree.sources.items() if key == full), tree.where)
            tree.problems.append(f"{where}: {_describe_unknown_setting(schema, str(name), known, path)}")
            continue
        below, _ = unwrap_optional(known[name])
        if value is None and (is_section(below) or getattr(below, "__origin__", None) is tuple):
            continue  # an empty section
        normalised[name] = _normalise_value(schema, tree, value, known[name], full)
    return normalised


def _normalise_value[T](
    schema: ConfigSchema[T], tree: _SettingsTree, value: object, kind: Any, path: str
) -> object:
    plain, _ = unwrap_optional(kind)
    if is_section(plain) and isinstance(value, dict):
        return _normalise_section(schema, tree, cast("dict[str, Any]", value), plain, path)
    arguments = getattr(plain, "__args__", ())
    if isinstance(value, list) and arguments and is_section(unwrap_optional(arguments[0])[0]):
        return [
            _normalise_value(schema, tree, element, arguments[0], f"{path}[{number}]")
            for number, element in enumerate(cast("list[object]", value))
        ]
    if is_section(plain):
        tree.add_problem(f"{path}: expected a section with settings below it.")
        return {}
    normalised, problems = normalise_setting(cast("object", value), kind, path)
    for below, message in problems:
        tree.add_problem(f"{below}: {message}")
    return normalised


def _describe_unknown_setting[T](
    schema: ConfigSchema[T], name: str, known: Mapping[str, Any], path: str
) -> str:
    full = f"{path}.{name}" if path else name
    if f"{name}_env" in known:
        return (
            f"{full} must not be in the configuration: put it into a variable, and name that in {name}_env."
        )
    if advice := schema.explain_unknown(full):
        return f"there is no setting {full[:_MAX_QUOTED]}; {advice}"
    import difflib  # here, because most configurations do not need it

    close = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}."
    return f"there is no setting {full[:_MAX_QUOTED]}; {advice}"
