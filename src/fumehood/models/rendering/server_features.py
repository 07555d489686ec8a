"""What a model server accepts of a conversation."""

from dataclasses import astuple, dataclass
from functools import cached_property

from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class ServerFeatures:
    """Which items and inputs a model server accepts; what it does not accept is sent in another form.

    custom_tools: custom tool calls; otherwise they are sent as function calls.
    foreign_items: items of other servers' tools; otherwise they are sent as function calls.
    """

    takes_images: bool = False
    takes_files: bool = False
    developer_role: bool = False
    replay_reasoning: bool = False
    custom_tools: bool = False
    foreign_items: bool = False

    @cached_property
    def cache_key(self) -> str:
        return "".join("y" if flag else "n" for flag in astuple(self))

    def get_input_role(self, role: str) -> str:
        """The role in which a message of a user, system or developer is sent. Raises InvalidRequest."""
        if role == "developer":
            return "developer" if self.developer_role else "system"
        if role not in ("user", "system"):
            raise InvalidRequest(f"A message cannot have the role {sanitize_name(role)!r}.", param="input")
        return role
