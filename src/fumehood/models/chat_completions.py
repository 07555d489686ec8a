"""Models behind any server of /v1/chat/completions; imports siblings and `protocol`."""

from fumehood.models.answers import TurnReader
from fumehood.models.chat_parsing import ChatParser
from fumehood.models.chat_request import RequestWriter
from fumehood.models.model_server import ModelServer
from fumehood.models.settings import ModelSettings, Secret
from fumehood.models.upstream import Upstream
from fumehood.models.upstream_errors import UpstreamErrors
from fumehood.protocol.models import ModelRequest


class ChatCompletions(ModelServer):
    """A `ModelBackend` over a server of chat completions."""

    api = "chat completions"
    path = "/chat/completions"

    def __init__(self, settings: ModelSettings, upstream: Upstream, key: Secret | None = None) -> None:
        super().__init__(settings, upstream, key)
        self._writer = RequestWriter(settings)

    def check(self, request: ModelRequest) -> None:
        self._writer.messages(request)

    def _body(self, request: ModelRequest) -> list[bytes]:
        return self._writer.body(request)

    def _counted(self, request: ModelRequest) -> list[bytes]:
        return self._writer.tokenization(request)

    def _reader(self, request: ModelRequest, errors: UpstreamErrors) -> TurnReader:
        return ChatParser(errors, [spec.name for spec in request.functions])
