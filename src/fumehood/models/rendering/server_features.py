"""What a model server accepts of a conversation."""

from dataclasses import astuple, dataclass
from functools import cached_property

from fumehood.protocol.conversation import COMPACTION_TYPE
from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.client_tools_as_functions import CLIENT_TOOL_BY_ITEM


@dataclass(frozen=True, kw_only=True)
class ServerFeatures:
    """Which items and inputs a model server accepts; what it does not accept is sent in another form.

    custom_tools: custom tool calls; otherwise they are sent as function calls.
    foreign_items: items of other servers' tools; otherwise they are sent as function calls.
    client_tools: types of client tools whose items it accepts; those of the others are sent as function calls.
    """

    takes_images: bool = False
    takes_files: bool = False
    developer_role: bool = False
    replay_reasoning: bool = False
    custom_tools: bool = False
    foreign_items: bool = False
    client_tools: tuple[str, ...] = ()

    @cached_property
    def cache_key(self) -> str:
        *flags, client_tools = astuple(self)
        return "".join("y" if flag else "n" for flag in flags) + ",".join(client_tools)

    def takes_item(self, item_type: str) -> bool:
        """Whether an item of a tool that is not ours is sent as it is."""
        client_tool = CLIENT_TOOL_BY_ITEM.get(item_type)
        if client_tool is not None:
            return client_tool in self.client_tools
        return self.foreign_items and item_type != COMPACTION_TYPE

    def get_input_role(self, role: str) -> str:
        """The role in which a message of a user, system or developer is sent. Raises InvalidRequest."""
        if role == "developer":
            return "developer" if self.developer_role else "system"
        if role not in ("user", "system"):
            raise InvalidRequest(f"A message cannot have the role {sanitize_name(role)!r}.", param="input")
        return role
