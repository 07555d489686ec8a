"""Sections, the parts of a prompt."""

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Generic, Self, cast

from fumehood.client.dbc import require
from fumehood.client.prompt._types import ParamsT_co, RuntimeGeneric, SupportsDataclass
from fumehood.client.prompt.attachments import Attachment, InputFile, InputImage, find_attachments
from fumehood.client.prompt.tool import AnyTool
from fumehood.client.type_validation import check_arguments, shorten_repr

_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")
# `${name}` is a placeholder, `$${name}` is the text `${name}`; any other dollar sign is literal.
_PLACEHOLDER = re.compile(r"\$(\$)?\{(\w+)\}")


class Section(RuntimeGeneric, ABC, Generic[ParamsT_co]):  # noqa: UP046 - its TypeVar has a default
    """A part of a prompt: text, files and pictures, tools, and child sections.

    Its parameters are a dataclass, the type argument of the class: `Section[Params]`.
    """

    @check_arguments
    def __init__(
        self,
        *,
        title: str,
        key: str,
        default_params: ParamsT_co | None = None,
        children: Sequence["PromptSection"] = (),
        enabled: Callable[[Any], bool] | None = None,
        tools: Sequence[AnyTool] = (),
        accepts_overrides: bool = True,
        attachments: Sequence[Attachment] = (),
    ) -> None:
        """enabled: called with the parameters; a disabled section is left out with all its children.

        attachments: files and pictures that the model gets with the text.
        """
        require(_KEY.match(key), f"The section key {key!r} is not 1 to 64 of a-z, 0-9, '.', '_' and '-'.")
        kind: Any = self.type_argument(0)
        require(
            kind is None or hasattr(kind, "__dataclass_fields__"),
            f"The section {key!r} has {kind!r} for its parameters, which is no dataclass.",
        )
        require(
            default_params is None
            or (
                hasattr(default_params, "__dataclass_fields__") and isinstance(default_params, kind or object)
            ),
            f"The section {key!r} takes {kind or 'a dataclass'}; default_params is {shorten_repr(default_params)}.",
        )
        self.title = title
        self.key = key
        self.children = tuple(children)
        self.accepts_overrides = accepts_overrides
        self.default_params = default_params
        self._enabled = enabled
        self._tools = tuple(tools)
        self._attachments = tuple(attachments)

    @property
    def params_type(self) -> type[Any] | None:
        """The dataclass of its parameters, or None."""
        default = self.default_params
        return self.type_argument(0) or (None if default is None else type(default))

    def tools(self) -> tuple[AnyTool, ...]:
        return self._tools

    def attachments(self, params: SupportsDataclass | None) -> tuple[Attachment, ...]:
        """Return its files and pictures, then those in fields of its parameters."""
        return (*self._attachments, *find_attachments(params))

    def native_tools(self, params: SupportsDataclass | None) -> Sequence[Mapping[str, object]]:  # noqa: ARG002
        """Return the native tools of the provider that it uses, as `{"type": "built_in", "name": …, **settings}`."""
        return ()

    def is_enabled(self, params: SupportsDataclass | None) -> bool:
        return self._enabled is None or self._enabled(params)

    def placeholders(self) -> frozenset[str]:
        """Return the names of the placeholders in its text."""
        return frozenset()

    @abstractmethod
    def render(self, params: SupportsDataclass | None, depth: int, number: str) -> str:
        """Return its text without children; an empty text takes up no number.

        depth: 0 at the top. number: "2" or "2.1". A section may also accept the keywords `path` (keys from the top down
        to it) and `session`.
        """

    @abstractmethod
    def clone(self, **kwargs: object) -> "Section[ParamsT_co]":
        """Return a copy with other settings."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"


type PromptSection = Section[SupportsDataclass]


class MarkdownSection(Section[ParamsT_co]):
    """A heading and a text with placeholders `${name}` for its parameters."""

    @check_arguments
    def __init__(
        self,
        *,
        title: str,
        key: str,
        template: str,
        default_params: ParamsT_co | None = None,
        children: Sequence[PromptSection] = (),
        enabled: Callable[[Any], bool] | None = None,
        tools: Sequence[AnyTool] = (),
        accepts_overrides: bool = True,
        attachments: Sequence[Attachment] = (),
    ) -> None:
        super().__init__(
            title=title,
            key=key,
            default_params=default_params,
            children=children,
            enabled=enabled,
            tools=tools,
            accepts_overrides=accepts_overrides,
            attachments=attachments,
        )
        self.template = template

    def placeholders(self) -> frozenset[str]:
        return find_placeholders(self.template)

    def render(self, params: SupportsDataclass | None, depth: int, number: str) -> str:
        return format_markdown(self.title, fill_placeholders(self.template, params), depth, number)

    def with_template(self, template: str) -> Self:
        """Return the section with another text, for one rendering."""
        other = copy.copy(self)
        other.template = template
        return other

    def clone(self, **kwargs: object) -> Self:
        settings: dict[str, Any] = {**self.settings(), **kwargs}
        return type(self)(**settings)

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the constructor, for `clone`."""
        return {
            "title": self.title,
            "key": self.key,
            "template": self.template,
            "default_params": self.default_params,
            "children": self.children,
            "enabled": self._enabled,
            "tools": self._tools,
            "accepts_overrides": self.accepts_overrides,
            "attachments": self._attachments,
        }


def format_markdown(title: str, body: str, depth: int, number: str) -> str:
    """Format a heading with its text."""
    heading = f"{'#' * (depth + 2)} {number}. {title}"
    body = body.strip()
    return f"{heading}\n\n{body}" if body else heading


def find_placeholders(template: str) -> frozenset[str]:
    return frozenset(found[2] for found in _PLACEHOLDER.finditer(template) if not found[1])


def fill_placeholders(template: str, params: SupportsDataclass | None) -> str:
    """Replace placeholders once: a `${…}` in a value is kept as it is."""
    values: dict[str, Any] = {}
    if params is not None:
        values = {field.name: getattr(params, field.name) for field in fields(cast(Any, params))}

    def put(found: re.Match[str]) -> str:
        if found[1] or found[2] not in values:
            return found[0].removeprefix("$") if found[1] else found[0]
        return _format_value(values[found[2]])

    return _PLACEHOLDER.sub(put, template)


def _format_value(value: object) -> str:
    """Return the text of a parameter; several files are shown by their names."""
    several = cast("list[object]", value) if isinstance(value, list | tuple) else []
    if several and all(isinstance(one, InputFile | InputImage) for one in several):
        return ", ".join(map(str, several))
    return f"{value}"
