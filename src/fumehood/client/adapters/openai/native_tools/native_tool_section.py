"""The base of sections for native tools."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self, cast

from fumehood.client.adapters.openai.config import NATIVE_TOOLS
from fumehood.client.adapters.openai.wire import NATIVE_NAMES
from fumehood.client.dbc import require, require_strings
from fumehood.client.errors import PromptValidationError
from fumehood.client.prompt._types import ParamsT_co, SupportsDataclass
from fumehood.client.prompt.section import Section
from fumehood.client.type_validation import check_arguments


class NativeToolSection(Section[ParamsT_co]):
    """A prompt section without text and without tools of ours; its parameters are the settings of a native tool."""

    native_name: str

    @check_arguments
    def __init__(
        self,
        *,
        default_params: ParamsT_co | None = None,
        model: str | None = None,
        openai_native_tools: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """model: if given, it is checked here; else the adapter checks it."""
        super().__init__(
            title=self.native_name.replace("_", " ").capitalize(),
            key=f"openai_{self.native_name}",
            default_params=default_params or self.type_argument(0)(),
            tools=(),
            accepts_overrides=False,
        )
        self.model = model
        self.native_tools(self.default_params)  # validates the settings
        if model is not None:
            check_native_tools(model, [self.native_name], merge_native_tool_lists(openai_native_tools))

    @abstractmethod
    def build_settings(self, params: Any) -> Mapping[str, object]:
        """Return the settings as they are sent. Raises PromptValidationError if they are malformed."""

    def native_tools(self, params: SupportsDataclass | None) -> Sequence[Mapping[str, object]]:
        return [{"type": "built_in", "name": self.native_name, **self.build_settings(params)}]

    def render(self, params: SupportsDataclass | None, depth: int, number: str) -> str:
        _ = params, depth, number
        return ""

    def clone(self, **kwargs: object) -> Self:
        settings: dict[str, Any] = {"default_params": self.default_params, "model": self.model, **kwargs}
        return type(self)(**settings)


def merge_native_tool_lists(added: object) -> Mapping[str, Collection[str]]:
    """Merge the known native tools of models with additional ones. Raises PromptValidationError."""
    if added is None:
        return NATIVE_TOOLS
    lists = cast(Mapping[str, Collection[str]], added) if isinstance(added, Mapping) else None
    if lists is None:
        raise PromptValidationError(f"openai_native_tools is {added!r}; it has to map models to their tools.")
    for model, names in lists.items():
        where = f"openai_native_tools[{model!r}]"
        require_strings(names, where)
        unknown = sorted({*names} - {*NATIVE_NAMES})
        require(not unknown, f"{where} has {', '.join(unknown)}; there is: {', '.join(NATIVE_NAMES)}.")
    return {**NATIVE_TOOLS, **lists}


def check_native_tools(
    model: str,
    names: Collection[str],
    lists: Mapping[str, Collection[str]],
    *,
    strict: bool = False,
    prompt_name: str = "",
) -> None:
    """Raise PromptValidationError if the model lacks one of these native tools.

    lists: tools by model name or prefix, of which the longest match counts. strict: a model without an entry has none.
    """
    found = max((prefix for prefix in lists if model.startswith(prefix)), key=len, default=None)
    if found is None and not strict:
        return
    has = lists[found] if found is not None else ()
    for name in names:
        require(
            name in has,
            f"The model {model!r} does not advertise the native tool {name!r} (it has: "
            f"{', '.join(sorted(has)) or 'none'}); choose another model or extend openai_native_tools.",
            prompt_name=prompt_name,
        )
