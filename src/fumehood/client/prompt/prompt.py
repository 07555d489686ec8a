"""Prompt templates made of sections, and prompts that bind parameters to them."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, cast, overload

from fumehood.client.dbc import require
from fumehood.client.prompt._types import OutputT_co, RuntimeGeneric, SupportsDataclass
from fumehood.client.prompt.attachments import Attachment, InputFile, InputImage
from fumehood.client.prompt.section import MarkdownSection, PromptSection, Section, find_placeholders
from fumehood.client.prompt.structured_output import StructuredOutput, describe_output_type
from fumehood.client.prompt.tool import AnyTool, ProviderTool, ToolPolicy, index_tools_by_name
from fumehood.client.resources import Resources
from fumehood.client.type_validation import check_arguments

if TYPE_CHECKING:
    from fumehood.client.runtime.session import SessionProtocol

# "required" and the like, or {"type": "function", "name": …}, {"type": "code_interpreter"}, {"type": "built_in", …}.
type ToolChoice = Literal["auto", "required", "none"] | Mapping[str, object]


@dataclass(frozen=True)
class RenderedPrompt(Generic[OutputT_co]):  # noqa: UP046 - its TypeVar has a default
    """A prompt as an adapter needs it.

    tools: all tools with handlers, including provider tools. native_tools: tools that the provider runs, each
    `{"type": "built_in", "name": …, **settings}`. sections: the enabled sections, parents first.
    attachments: files and pictures for the model: those of sections in their order, then those bound to the prompt.
    """

    prompt_name: str
    text: str
    tools: tuple[AnyTool, ...] = ()
    native_tools: tuple[Mapping[str, object], ...] = ()
    output: StructuredOutput | None = None
    output_type: Any = None
    tool_choice: ToolChoice | None = None
    sections: tuple[PromptSection, ...] = field(default=(), repr=False)
    attachments: tuple[Attachment, ...] = ()


class PromptTemplate(RuntimeGeneric, Generic[OutputT_co]):  # noqa: UP046 - its TypeVar has a default
    """Named sections in order. `PromptTemplate[Answer](…)` asks for an `Answer`.

    Raises PromptValidationError for duplicate keys, two tools of one name, placeholders without a field, and output
    types without a schema.
    """

    @check_arguments
    def __init__(
        self,
        *,
        ns: str,
        key: str,
        sections: Sequence[PromptSection] = (),
        name: str | None = None,
        tool_choice: ToolChoice | None = None,
        policies: Sequence[ToolPolicy] = (),
    ) -> None:
        require(ns.strip() and key.strip(), "A prompt needs a namespace and a key (ns=, key=).")
        self.ns = ns
        self.key = key
        self.name = name or key
        self.sections = tuple(sections)
        self.tool_choice: ToolChoice | None = tool_choice
        self.policies = tuple(policies)
        self.output_type: Any = self.type_argument(0)
        self.output = describe_output_type(self.output_type)
        self._check()

    def _check(self) -> None:
        seen: set[tuple[str, ...]] = set()
        tools: list[AnyTool] = []
        for path, section in walk_sections(self.sections):
            where = f"The section {'/'.join(path)!r}"
            require(path not in seen, f"{where} is there twice.", prompt_name=self.name)
            seen.add(path)
            missing = section.placeholders() - _field_names(section.params_type)
            require(
                not missing,
                f"{where} has the placeholder ${{{min(missing, default='')}}}, for which "
                + (
                    f"{section.params_type.__name__} has no field."
                    if section.params_type
                    else "it has no parameters."
                ),
                prompt_name=self.name,
            )
            tools += section.tools()
        index_tools_by_name(tools)

    def accepted_types(self) -> set[type[Any]]:
        """Return the parameter types that its sections and tools use."""
        found: set[type[Any]] = set()
        for _, section in walk_sections(self.sections):
            found |= {tool.params_type for tool in section.tools()}
            if section.params_type is not None:
                found.add(section.params_type)
        return found


class Prompt(RuntimeGeneric, Generic[OutputT_co]):  # noqa: UP046 - its TypeVar has a default
    """A template with parameters, overrides and resources. Immutable: `bind` returns another prompt."""

    @overload
    def __init__(
        self,
        template: PromptTemplate[OutputT_co],
        *,
        overrides: Mapping[str, str] | None = None,
        tool_choice: ToolChoice | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        *,
        ns: str,
        key: str,
        sections: Sequence[PromptSection] = (),
        name: str | None = None,
        overrides: Mapping[str, str] | None = None,
        tool_choice: ToolChoice | None = None,
        policies: Sequence[ToolPolicy] = (),
    ) -> None: ...
    @check_arguments
    def __init__(
        self,
        template: PromptTemplate[OutputT_co] | None = None,
        *,
        overrides: Mapping[str, str] | None = None,
        tool_choice: ToolChoice | None = None,
        **built: Any,
    ) -> None:
        """overrides: texts that replace those of sections, by key (`parent/child` below the top)."""
        require(
            template is None or not built, f"The template has its own {min(built, default='')!r} already."
        )
        if template is None:
            made: Any = PromptTemplate if not self.type_arguments else PromptTemplate[self.type_argument(0)]
            template = cast(PromptTemplate[OutputT_co], made(**built))
        self.template = template
        self.name = template.name
        self.sections = template.sections
        self.tool_choice: ToolChoice | None = template.tool_choice if tool_choice is None else tool_choice
        self.overrides = dict(overrides or {})
        self.params: tuple[SupportsDataclass, ...] = ()
        self.attachments: tuple[Attachment, ...] = ()
        self.resources: tuple[Resources, ...] = ()
        self._check_overrides()

    def bind(
        self,
        *params: SupportsDataclass,
        resources: Resources | None = None,
    ) -> Self:
        """Return the prompt with further parameters; a later one replaces one of the same type.

        Files and pictures among them are added to the prompt's input: `bind(question, InputFile(path="sales.csv"))`.
        """
        accepted = self.template.accepted_types()
        by_type: dict[type[Any], SupportsDataclass] = {type(one): one for one in self.params}
        attached: list[Attachment] = []
        for one in params:
            if isinstance(one, InputFile | InputImage):
                attached.append(one)
                continue
            require(
                type(one) in accepted,
                f"No section and no tool of the prompt takes {_describe_type(one)}; "
                f"it takes: {_format_types(accepted)}.",
                prompt_name=self.name,
                phase="render",
            )
            by_type[type(one)] = one
        bound = copy.copy(self)
        bound.params = tuple(by_type.values())
        bound.attachments = (*self.attachments, *attached)
        if resources is not None:
            bound.resources = (*self.resources, resources)
        return bound

    def render(
        self, *params: SupportsDataclass, session: "SessionProtocol | None" = None
    ) -> RenderedPrompt[OutputT_co]:
        """Return the text, tools and output type. Raises PromptValidationError if a parameter is missing."""
        if params:
            return self.bind(*params).render(session=session)
        rendering = _Rendering(self, {type(one): one for one in self.params}, session)
        texts = rendering.render_sections(self.sections, 0, "", ())
        return RenderedPrompt[OutputT_co](
            prompt_name=self.name,
            text="\n\n".join(texts),
            tools=tuple(index_tools_by_name(rendering.tools).values()),
            native_tools=merge_native_tools(rendering.native_tools, prompt_name=self.name),
            output=self.template.output,
            output_type=self.template.output_type,
            tool_choice=self.tool_choice,
            sections=tuple(rendering.sections),
            attachments=tuple(dict.fromkeys((*rendering.attachments, *self.attachments))),
        )

    def _check_overrides(self) -> None:
        sections = {"/".join(path): section for path, section in walk_sections(self.sections)}
        for key, text in self.overrides.items():
            section = sections.get(key)
            require(
                section is not None,
                f"There is no section {key!r} to override; there is: {', '.join(sorted(sections))}.",
                prompt_name=self.name,
            )
            require(
                isinstance(section, MarkdownSection) and section.accepts_overrides,
                f"The section {key!r} accepts no overrides.",
                prompt_name=self.name,
            )
            missing = find_placeholders(text) - _field_names(section.params_type if section else None)
            require(
                not missing,
                f"The override of {key!r} has placeholders that the section cannot fill: {', '.join(sorted(missing))}.",
                prompt_name=self.name,
            )


class _Rendering:
    """Collects text and tools while it walks through the sections."""

    def __init__(
        self,
        prompt: Prompt[Any],
        params: Mapping[type[Any], SupportsDataclass],
        session: "SessionProtocol | None",
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.session = session
        self.tools: list[AnyTool] = []
        self.native_tools: list[Mapping[str, object]] = []
        self.sections: list[PromptSection] = []
        self.attachments: list[Attachment] = []

    def render_sections(
        self, sections: Sequence[PromptSection], depth: int, prefix: str, path: tuple[str, ...]
    ) -> list[str]:
        found: list[str] = []
        number = 1
        for section in sections:
            params = self._resolve_params(section)
            if not section.is_enabled(params):
                continue
            here = (*path, section.key)
            self._collect_tools(section, params)
            text = self._render_section(section, params, depth, f"{prefix}{number}", here)
            below = self.render_sections(section.children, depth + 1, f"{prefix}{number}.", here)
            if text.strip() or below:
                number += 1
                found += [part for part in (text, *below) if part.strip()]
        return found

    def _resolve_params(self, section: PromptSection) -> SupportsDataclass | None:
        kind = section.params_type
        if kind is None:
            return None
        if kind in self.params:
            return self.params[kind]
        if section.default_params is not None:
            return section.default_params
        try:
            return kind()
        except TypeError:
            require(
                False,
                f"The section {section.key!r} needs a {kind.__name__}: pass one to evaluate(), render() or bind().",
                prompt_name=self.prompt.name,
                phase="render",
            )
            raise

    def _collect_tools(self, section: PromptSection, params: SupportsDataclass | None) -> None:
        self.sections.append(section)
        self.attachments += section.attachments(params)
        self.native_tools += section.native_tools(params)
        for tool in section.tools():
            self.tools.append(tool)
            if isinstance(tool, ProviderTool):
                self.native_tools.append(cast(ProviderTool[Any, Any, Any], tool).envelope())

    def _render_section(
        self,
        section: PromptSection,
        params: SupportsDataclass | None,
        depth: int,
        number: str,
        path: tuple[str, ...],
    ) -> str:
        if (override := self.prompt.overrides.get("/".join(path))) is not None:
            section = cast(MarkdownSection[Any], section).with_template(override)
        more = {"path": path, "session": self.session}
        taken = _accepted_keywords(type(section).render)
        render: Callable[..., str] = section.render
        return render(params, depth, number, **{name: more[name] for name in taken})


def walk_sections(
    sections: Sequence[PromptSection], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], PromptSection]]:
    """Yield every section with the path of its keys, parents first."""
    for section in sections:
        require(isinstance(cast(object, section), Section), f"{section!r} is no section.")
        here = (*path, section.key)
        yield here, section
        yield from walk_sections(section.children, here)


def merge_native_tools(
    tools: Sequence[Mapping[str, object]], *, prompt_name: str = ""
) -> tuple[Mapping[str, object], ...]:
    """Return each tool once; an entry without settings adds nothing.

    Raises PromptValidationError for one tool with different settings.
    """
    found: dict[object, Mapping[str, object]] = {}
    for tool in tools:
        known = found.get(tool.get("name"))
        if known is None or known.keys() <= {"type", "name"}:
            found[tool.get("name")] = tool
            continue
        require(
            tool.keys() <= {"type", "name"} or dict(known) == dict(tool),
            f"The native tool {tool.get('name')!r} is asked for twice, with different settings: "
            f"{known!r} and {tool!r}.",
            prompt_name=prompt_name,
        )
    return tuple(found.values())


@lru_cache(maxsize=512)
def _accepted_keywords(render: Callable[..., str]) -> tuple[str, ...]:
    """Return which optional keywords a section's `render` accepts."""
    return tuple(name for name in ("path", "session") if name in inspect.signature(render).parameters)


def _field_names(kind: type[Any] | None) -> set[str]:
    return set() if kind is None else {one.name for one in fields(kind)}


def _describe_type(value: object) -> str:
    return (
        f"the class {value.__name__} (an instance is wanted)"
        if isinstance(value, type)
        else type(value).__name__
    )


def _format_types(kinds: set[type[Any]]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds)) or "none"
