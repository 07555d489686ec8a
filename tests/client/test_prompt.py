"""Sections, templates, prompts and tools, before anything is sent."""

import string
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from inline_snapshot import snapshot

from fumehood.client import (
    InMemoryFilesystem,
    MarkdownSection,
    Prompt,
    PromptEvaluationError,
    PromptTemplate,
    ProviderTool,
    Section,
    Tool,
    ToolContext,
    ToolResult,
    VfsToolsSection,
    parse_structured_output,
)
from fumehood.client.errors import OutputParseError, PromptValidationError
from fumehood.client.prompt import NoParams, SupportsDataclass


@dataclass(frozen=True)
class Topic:
    topic: str


@dataclass(frozen=True)
class Loudness:
    loud: bool = False


@dataclass
class Answer:
    words: list[str] = field(metadata={"description": "One by one."})
    sure: float = 1.0


@dataclass
class Unlikely:
    either: Topic | Loudness


def say(params: Topic, *, context: ToolContext) -> ToolResult[Topic]:
    _ = context
    return ToolResult.ok(params, "said")


def invalid_handler(params: Any, *, context: Any) -> None:
    """Its types are not known."""


def handler_without_context(params: Topic) -> ToolResult[Topic]:
    return ToolResult.ok(params)


async def async_handler(params: Topic, *, context: ToolContext) -> ToolResult[Topic]:
    return say(params, context=context)


def text(key: str, template: str = "Text.", **more: Any) -> MarkdownSection[NoParams]:
    return MarkdownSection(title=key.title(), key=key, template=template, **more)


class Silent(Section[Loudness]):
    """Says nothing unless it is loud."""

    def render(self, params: SupportsDataclass | None, depth: int, number: str) -> str:
        return f"LOUD {number}" if isinstance(params, Loudness) and params.loud else ""

    def clone(self, **kwargs: object) -> "Silent":
        return Silent(title=self.title, key=self.key)


class Curious(Silent):
    def render(
        self, params: SupportsDataclass | None, depth: int, number: str, *, path: tuple[str, ...] = ()
    ) -> str:
        return f"I am {'/'.join(path)} at {depth}, {number}"


def prompt(*sections: Section[Any], **more: Any) -> Prompt[None]:
    return Prompt(ns="tests", key="prompt", sections=sections, **more)


def test_sections_are_numbered_and_nested() -> None:
    found = prompt(
        text("one", children=[text("inner", "Deep."), Silent(title="", key="silent"), text("last", "")]),
        Silent(title="", key="silent"),
        text("two", "Costs $5 and $${topic}."),
    ).render()
    assert found.text == snapshot("""\
## 1. One

Text.

### 1.1. Inner

Deep.

### 1.2. Last

## 2. Two

Costs $5 and ${topic}.\
""")
    assert [section.key for section in found.sections] == ["one", "inner", "silent", "last", "silent", "two"]


def test_only_sections_with_text_have_a_number() -> None:
    sections = (Silent(title="", key="silent"), text("two"))
    assert prompt(*sections).render().text.startswith("## 1. Two")
    loud = prompt(*sections).render(Loudness(loud=True)).text
    assert loud.startswith("LOUD 1\n\n## 2. Two")


def test_optional_keywords_are_passed_only_to_sections_that_accept_them() -> None:
    found = prompt(text("one", children=[Curious(title="", key="curious")]), Silent(title="", key="silent"))
    assert found.render().text.endswith("I am one/curious at 1, 1.1")


def test_placeholders_are_filled_once() -> None:
    section = MarkdownSection[Topic](title="Task", key="task", template="About ${topic}.")
    assert prompt(section).render(Topic("${topic} $1 \\1")).text == "## 1. Task\n\nAbout ${topic} $1 \\1."
    with pytest.raises(PromptEvaluationError, match="'task' needs a Topic") as missing:
        prompt(section).render()
    assert (missing.value.phase, missing.value.prompt_name) == ("render", "prompt")
    with pytest.raises(PromptEvaluationError, match="takes Loudness; it takes: Topic"):
        prompt(section).render(Loudness())
    with pytest.raises(PromptEvaluationError, match="the class Topic"):
        prompt(section).render(Topic)  # pyright: ignore[reportArgumentType] - that is the mistake


def test_binding_gives_another_prompt() -> None:
    section = MarkdownSection[Topic](
        title="Task", key="task", template="${topic}", default_params=Topic("cats")
    )
    cats = prompt(section)
    dogs = cats.bind(Topic("dogs"))
    assert (
        cats.render().text[-4:],
        dogs.render().text[-4:],
        dogs.bind(Topic("owls")).render().text[-4:],
    ) == (
        "cats",
        "dogs",
        "owls",
    )


def test_a_parameter_that_only_a_tool_declares_is_accepted() -> None:
    tool = Tool[Loudness, Topic](name="shout", description="Shout.", handler=None)
    assert prompt(text("one", tools=[tool])).render(Loudness()).tools == (tool,)


@pytest.mark.parametrize(
    ("sections", "expected_error"),
    [
        ((text("one"), text("one")), "'one' is there twice"),
        ((text("one", "${who}"),), "placeholder ${who}, for which it has no parameters"),
        (
            (MarkdownSection[Topic](title="T", key="t", template="${who}"),),
            "placeholder ${who}, for which Topic has no field",
        ),
        (
            tuple(text(key, tools=[Tool(name="t", description="x", handler=say)]) for key in ("a", "b")),
            "Two tools are called 't'",
        ),
        (("text",), "sections is ('text',); it has to be several in a tuple or list, each Section"),
    ],
)
def test_malformed_templates_are_rejected_at_construction(
    sections: tuple[Any, ...], expected_error: str
) -> None:
    with pytest.raises(PromptValidationError) as refused:
        PromptTemplate(ns="n", key="k", sections=sections)
    assert expected_error in str(refused.value)
    assert refused.value.phase == "configuration"


def test_overrides_are_by_key_and_checked() -> None:
    inner = MarkdownSection[Topic](title="In", key="in", template="${topic}", default_params=Topic("x"))
    sections = (text("one", children=[inner]), text("fixed", accepts_overrides=False))
    changed = prompt(*sections, overrides={"one/in": "Only ${topic}!"})
    assert "Only x!" in changed.render().text
    for overrides, expected_error in (
        ({"two": ""}, "no section 'two' to override; there is: fixed, one, one/in"),
        ({"fixed": ""}, "accepts no overrides"),
        ({"one": "${topic}"}, "cannot fill: topic"),
    ):
        with pytest.raises(PromptValidationError, match=expected_error):
            prompt(*sections, overrides=overrides)


def test_disabled_sections_and_their_tools_are_left_out() -> None:
    tool = Tool(name="t", description="x", handler=say)
    hidden = MarkdownSection[Loudness](
        title="H", key="h", template="Hidden.", enabled=lambda params: params.loud, tools=[tool]
    )
    assert (prompt(hidden).render().text, prompt(hidden).render().tools) == ("", ())
    assert prompt(hidden).render(Loudness(loud=True)).tools == (tool,)


def test_a_section_can_be_cloned_with_changes() -> None:
    section = MarkdownSection[Topic](title="Task", key="task", template="${topic}", default_params=Topic("x"))
    clone = section.clone(default_params=Topic("y"), key="other")
    assert isinstance(clone, MarkdownSection)
    assert (clone.key, clone.default_params, clone.params_type, section.key) == (
        "other",
        Topic("y"),
        Topic,
        "task",
    )


# --- tools --------------------------------------------------------------------------------------------


def test_tools_know_their_types() -> None:
    by_argument = Tool[Topic, Answer](name="t", description="x", handler=None)
    by_handler = Tool(name="t", description="x", handler=say)
    assert (by_argument.params_type, by_argument.result_type) == (Topic, Answer)
    assert (by_handler.params_type, by_handler.result_type) == (Topic, Topic)
    assert isinstance(by_argument, Tool)
    by_async_handler = Tool(name="t", description="x", handler=async_handler)
    assert (by_async_handler.params_type, by_async_handler.result_type) == (Topic, Topic)


class Searching[R](Tool[Topic, R]):
    """A generic tool, of which one argument is left open."""


class Hosted[C, R](ProviderTool[NoParams, R, C]):
    """The same in another order."""


class Shouting[R, P](Section[P]):  # pyright: ignore[reportInvalidTypeArguments] - its bound is not the matter here
    def render(self, params: SupportsDataclass | None, depth: int, number: str) -> str:
        return ""

    def clone(self, **kwargs: object) -> "Shouting[R, P]":
        return self


def test_generic_subclasses_know_their_types() -> None:
    found = Searching[Answer](name="t", description="x", handler=None)
    assert (found.params_type, found.result_type) == (Topic, Answer)
    assert Searching(name="t", description="x", handler=say).result_type is Topic
    hosted = Hosted[Loudness, Answer](
        name="t",
        description="x",
        provider="p",
        native_type="web_search",
        config=Loudness(),
        handle_provider_output=lambda data, context, kind: ToolResult(data.type, kind([])),
    )
    assert (hosted.params_type, hosted.result_type) == (NoParams, Answer)
    assert Shouting[Answer, Topic](title="t", key="k").params_type is Topic


@pytest.mark.parametrize(
    ("settings", "expected_error"),
    [
        ({"name": "Two words"}, "'Two words' is not 1 to 64"),
        ({"name": "t\n"}, "is not 1 to 64"),
        ({"description": " "}, "has 0 characters"),
        ({"description": "x" * 1025}, "has 1025 characters"),
        ({"handler": invalid_handler}, "are no dataclass"),
        ({"handler": 5}, "handler is 5; it has to be a function or None"),
        ({"handler": handler_without_context}, r"'t' is not a function \(params, \*, context\)"),
    ],
)
def test_malformed_tools_are_refused(settings: dict[str, Any], expected_error: str) -> None:
    given: dict[str, Any] = {"name": "t", "description": "x", "handler": say}
    given |= settings
    with pytest.raises(PromptValidationError, match=expected_error):
        Tool(**given)


def test_a_provider_tool_needs_a_handler() -> None:
    with pytest.raises(PromptValidationError, match="neither a handler nor handle_provider_output"):
        ProviderTool[NoParams, Topic, Loudness](
            name="t", description="x", provider="openai", native_type="web_search", config=Loudness()
        )


def test_a_provider_tool_is_listed_as_a_native_tool() -> None:
    tool = ProviderTool[Topic, Topic, Loudness](
        name="t", description="x", provider="p", native_type="web_search", config=Loudness(), handler=say
    )
    found = prompt(text("one", tools=[tool])).render()
    assert found.tools == (tool,)
    assert found.native_tools == ({"type": "built_in", "name": "web_search", "loud": False},)


def test_success_is_a_constructor_and_a_bool() -> None:
    made = ToolResult.success(Topic("x"))
    assert made.success is True
    assert (made.value, made.message) == (Topic("x"), "")
    assert made == ToolResult.ok(Topic("x")) == ToolResult("", Topic("x"))
    failed = ToolResult.error("no")
    assert (failed.success, failed.value, failed.message) == (False, None, "no")
    assert ToolResult("m", success=False).success is False
    assert repr(failed) == "ToolResult(message='no', value=None, success=False)"


def test_file_tools_work_on_any_filesystem() -> None:
    files = InMemoryFilesystem()
    section = VfsToolsSection(filesystem=files)
    tools = {tool.name: tool for tool in section.tools()}
    context: Any = None

    def run(name: str, **arguments: Any) -> Any:
        tool = tools[name]
        assert tool.handler is not None
        return tool.handler(tool.params_type(**arguments), context=context)

    assert run("write_file", path="a/b.txt", content="hi").success
    assert run("read_file", path="a/b.txt").value.text == "hi"
    assert run("list_files").value.paths == ["a"]
    assert run("glob_files", pattern="**/*.txt").value.paths == ["a/b.txt"]
    for name, path in (("read_file", "missing"), ("read_file", "../x"), ("list_files", "a/b.txt")):
        assert not run(name, path=path).success
    assert not run("write_file", path="a", content="").success
    assert "read_file" in prompt(section).render().text
    assert prompt(section.clone(), overrides={"vfs": "Mine."}).render().text.endswith("Mine.")


# --- typed answers ------------------------------------------------------------------------------------


def test_answers_are_read_as_their_type() -> None:
    one = PromptTemplate[Answer](ns="n", key="k")
    many = PromptTemplate[list[Answer]](ns="n", key="k")
    assert parse_structured_output('{"words": ["a"], "sure": null}', Prompt(one).render()) == Answer(["a"])
    fenced = '```json\n{"items": [{"words": []}]}\n```'
    assert parse_structured_output(fenced, Prompt(many).render()) == [Answer([])]
    assert parse_structured_output('[{"words": []}]', Prompt(many).render()) == [Answer([])]
    assert (
        parse_structured_output("just text", Prompt(PromptTemplate[str](ns="n", key="k")).render())
        == "just text"
    )
    assert parse_structured_output("just text", prompt().render()) is None
    for wrong in ("", "{}", '{"words": 1}', "nonsense"):
        with pytest.raises(OutputParseError) as refused:
            parse_structured_output(wrong, Prompt(one).render())
        assert refused.value.provider_payload == wrong
        assert refused.value.phase == "response"


def test_the_schema_of_a_list_is_an_object() -> None:
    wanted = PromptTemplate[list[Answer]](ns="n", key="k").output
    assert wanted is not None
    assert wanted.schema.strict
    assert wanted.schema.body == snapshot(
        {
            "type": "object",
            "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/Answer"}}},
            "required": ["items"],
            "additionalProperties": False,
            "$defs": {
                "Answer": {
                    "title": "Answer",
                    "type": "object",
                    "properties": {
                        "words": {"type": "array", "items": {"type": "string"}, "description": "One by one."},
                        "sure": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    },
                    "required": ["words", "sure"],
                    "additionalProperties": False,
                }
            },
        }
    )


def test_output_types_that_cannot_be_described_are_refused() -> None:
    with pytest.raises(PromptValidationError, match="neither a dataclass nor a list of one"):
        PromptTemplate[int](ns="n", key="k")
    with pytest.raises(PromptValidationError, match="cannot be described to a model"):
        PromptTemplate[Unlikely](ns="n", key="k")
    with pytest.raises(PromptValidationError, match="needs a namespace and a key"):
        PromptTemplate(ns=" ", key="k")


def test_the_parameters_of_a_section_are_a_dataclass() -> None:
    with pytest.raises(PromptValidationError, match="'t' has <class 'int'> for its parameters"):
        MarkdownSection[int](title="T", key="t", template="x")  # pyright: ignore[reportInvalidTypeArguments]
    with pytest.raises(PromptValidationError, match=r"takes .*Topic.*; default_params is Loudness"):
        MarkdownSection[Topic](title="T", key="t", template="x", default_params=Loudness())  # pyright: ignore[reportArgumentType]


def test_prompt_builds_its_template() -> None:
    made = Prompt[Answer](ns="n", key="k", name="called", sections=[text("one")], tool_choice="required")
    assert (made.name, made.template.output_type, made.tool_choice) == ("called", Answer, "required")
    assert Prompt(made.template, tool_choice="none").render().tool_choice == "none"
    with pytest.raises(PromptValidationError, match="has its own 'ns' already"):
        Prompt(made.template, ns="other")  # pyright: ignore[reportCallIssue] - that is the mistake


def test_rendering_many_sections_is_cheap() -> None:
    """In CPU, against the standard library's templates in the same run."""
    template = "About ${topic}, and more about ${topic}. " * 5
    sections = [
        MarkdownSection[Topic](title="S", key=f"s{number}", template=template) for number in range(50)
    ]
    bound = prompt(*sections).bind(Topic("owls"))
    plain = [string.Template(template)] * 50

    def seconds(act: Callable[[], object]) -> float:
        start = time.process_time()
        act()
        return time.process_time() - start

    pairs = [
        (seconds(bound.render), seconds(lambda: [one.substitute(topic="owls") for one in plain]))
        for _ in range(30)
    ]
    ours, theirs = (min(times) for times in zip(*pairs, strict=True))
    assert ours <= 4 * theirs
