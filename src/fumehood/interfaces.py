"""Every seam of the server, one Protocol each; imports `protocol`, `isolation` and `storage`.

A request walks through them from top to bottom: `Runs` starts a `Run`, which asks a `ModelBackend` for turns and
`HostedTool`s for calls; the code interpreter asks `Containers`, and those a `SandboxProvider`; `Files` are what
clients upload. `Store` and `Blobs` keep what must not be lost. Those of sandboxes are written down in
`fumehood.isolation`, those of what is kept in `fumehood.storage`, and all are given here too. Whoever implements one
passes its kit in `fumehood.testing`. What a method raises is said here and nowhere else.
"""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fumehood.isolation import Sandbox as Sandbox
from fumehood.isolation import SandboxProvider as SandboxProvider
from fumehood.isolation import SandboxRef as SandboxRef
from fumehood.protocol.attachments import Attachment, FilePart
from fumehood.protocol.containers import ContainerFileRecord, ContainerRecord, ContainerSpec
from fumehood.protocol.conversation import Entry, Segment, ToolExchange
from fumehood.protocol.events import StreamEvent
from fumehood.protocol.files import FileRecord, NewFile
from fumehood.protocol.items import OutputItem, ProducedFile
from fumehood.protocol.keys import TENANT_SCOPES, USUAL, KeyLimits, KeyScope
from fumehood.protocol.listing import Window
from fumehood.protocol.models import AnyModelEvent, ModelCard, ModelProfile, ModelRequest
from fumehood.protocol.responses import CompactedResponse, CreateResponse, InputTokens, Response
from fumehood.protocol.sandbox import AnyOutput, ArchiveFormat, ExecuteRequest, FileEntry
from fumehood.protocol.tools import FunctionSpec, ToolSpec
from fumehood.storage import Amount as Amount
from fumehood.storage import Blobs as Blobs
from fumehood.storage import BlobStore as BlobStore
from fumehood.storage import Fenced as Fenced
from fumehood.storage import IdempotencyClaim as IdempotencyClaim
from fumehood.storage import Kept as Kept
from fumehood.storage import Lease as Lease
from fumehood.storage import Sealer as Sealer
from fumehood.storage import Store as Store
from fumehood.storage import Unsealable as Unsealable


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is; nothing of another tenant exists for it.

    key: the id of the key that it came with, empty where none is needed.
    scopes: what its key is for.
    """

    tenant: str = ""
    key: str = ""
    limits: KeyLimits = USUAL
    scopes: frozenset[KeyScope] = TENANT_SCOPES


class Clock(Protocol):
    """Time, so that tests need not wait for it."""

    def now(self) -> float:
        """Seconds since 1970."""
        ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


# --- runs ---------------------------------------------------------------------------------------------


class Reading(Protocol):
    """Somebody's place in the log of a run."""

    @property
    def over(self) -> bool:
        """Whether everything was taken, and nothing more will come."""
        ...

    def take(self) -> Sequence[StreamEvent]:
        """What has come since the last time, perhaps nothing. Raises ServerFault once a reader that stayed too far
        behind for too long has cost the run its life.
        """
        ...

    def close(self) -> None: ...


class Run(Protocol):
    """A response in the making. It belongs to nobody's request: it goes on until it ends or is cancelled, and
    whoever wants to see it reads its log.
    """

    @property
    def id(self) -> str: ...

    def subscribe(self, after: int = -1) -> AsyncGenerator[Sequence[StreamEvent]]:
        """The events after that number, as many at a time as are there, the terminal one last. Raises ServerFault as
        `Reading.take` does.
        """
        ...

    def watch(self, wake: Callable[[], None], after: int = -1) -> Reading:
        """As `subscribe`, for whoever cannot wait: `wake` is called when something has come, by the run itself and
        before it goes on, so it must be quick and must not raise.
        """
        ...

    async def wait(self) -> Response:
        """The response once it is terminal and durable: what its events fold to."""
        ...

    def when_over(self, tell: Callable[[Response | BaseException], None]) -> None:
        """As `wait`, for whoever cannot wait: `tell` is called with what it would return or raise, once and before
        `Runs.drain` is over; it must be quick and must not raise.
        """
        ...

    def conversation(self) -> Sequence[Segment]:
        """Everything that a continuation of this response stands on, once it has ended: as `Store.conversation` gives
        it, for whoever continues one that the store does not keep.
        """
        ...

    def cancel(self, reason: str) -> None:
        """End it soon: the model's request is aborted, code is interrupted, what is there is kept."""
        ...


# Is told how many more bytes a request is about to hold; raises RateLimited or Unavailable where that is too much now,
# BodyTooLarge where it always will be.
type TakeRoom = Callable[[int], None]


class Runs(Protocol):
    """What the gateway asks for responses: the engine, as it sees it."""

    async def start(
        self,
        request: CreateResponse,
        caller: Caller,
        response_id: str | None = None,
        *,
        past: Sequence[Segment] | None = None,
        take: TakeRoom | None = None,
    ) -> Run:
        """Check everything that can be checked, then begin. Raises ApiError; then nothing was begun.

        response_id: the id of the response, where somebody had to know it before.
        past: the conversation that is continued, from whoever holds one that the store does not keep; without it
            the store is asked for `previous_response_id`.
        take: told of the files that the input refers to, and of a large conversation that it continues.
        """
        ...

    async def count(
        self, request: CreateResponse, caller: Caller, *, take: TakeRoom | None = None
    ) -> InputTokens:
        """How many tokens the model would be shown; begins nothing. Raises ApiError."""
        ...

    async def compact(
        self, request: CreateResponse, caller: Caller, *, take: TakeRoom | None = None
    ) -> CompactedResponse:
        """The conversation that the request would stand on, made short by its model. Keeps nothing. Raises ApiError;
        cancelling it aborts the model's request.
        """
        ...

    async def drain(self, grace_seconds: float) -> None:
        """Begin nothing more, let what runs end within the time, cancel the rest.

        Whoever cancels this is in a hurry: nothing more is stored of what still runs, and the next start marks it
        failed.
        """
        ...


# --- models -------------------------------------------------------------------------------------------


# Is offered events at the moment when they come, before any task is woken for them; whether it has taken them. What it
# raises, the generator raises.
type Take = Callable[[Sequence[AnyModelEvent]], bool]


class Batches(Protocol):
    """What comes of a turn, as many events at a time as are there; a generator, mostly. Whoever has taken it closes it,
    at its end as well as before.
    """

    def __aiter__(self) -> AsyncIterator[Sequence[AnyModelEvent]]: ...

    def __anext__(self) -> Awaitable[Sequence[AnyModelEvent]]: ...

    def aclose(self) -> Awaitable[None]: ...


class ModelBackend(Protocol):
    """A model server, or something that behaves like one."""

    def stream(self, request: ModelRequest, take: Take | None = None) -> Batches:
        """One turn, as many events at a time as are there, `TurnEnded` last. Closing it before its end aborts the
        request. Raises ModelError; before the first batch, nothing has happened and the turn may be tried again.

        take: may be offered what comes after the first batch; what it takes is not given again.
        """
        ...

    def check(self, request: ModelRequest) -> None:
        """Raises InvalidRequest for what this model cannot be shown."""
        ...

    async def count(self, request: ModelRequest) -> tuple[int, bool]:
        """How many tokens the request has, and whether that is exact."""
        ...

    def profile(self, model: str) -> ModelProfile: ...

    async def close(self) -> None: ...


class Models(Protocol):
    """All backends, by the names that clients use."""

    def backend(self, model: str) -> ModelBackend:
        """Raises InvalidRequest (`model_not_found`)."""
        ...

    async def cards(self) -> Sequence[ModelCard]: ...

    async def close(self) -> None: ...


# --- hosted tools -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """One call of a hosted tool: whose, where in the response, by which name the model knows it, and until when
    (by the monotonic clock) it may take.

    place: the output index of a further item, which begins now.
    takes_images: whether the model does. wants_contents: whether the client asked for what produced files hold.
    """

    caller: Caller
    response_id: str
    output_index: int
    call_id: str
    deadline: float
    place: Callable[[], int]
    takes_images: bool = False
    wants_contents: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherItem:
    """One that a call makes beside its first: where, and what the model is told of it."""

    output_index: int
    item: OutputItem
    exchange: ToolExchange


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """How a call ended: its last events, its finished item, what the model is told, and the files it left.

    further: where a call is more than one item, the others that have begun.
    """

    events: Sequence[StreamEvent]
    item: OutputItem
    exchange: ToolExchange
    further: Sequence[FurtherItem] = ()
    files: Sequence[ProducedFile] = ()


type ToolStep = Sequence[StreamEvent] | ToolResult


@dataclass(frozen=True, slots=True)
class Memory:
    """What a hosted tool keeps of calls that are compacted: items that `offer` finds in their place, and what the model
    is told of them.
    """

    items: Sequence[bytes]
    note: str


class CallSession(Protocol):
    """One call, from the moment when the model begins to write it. The session owns its items and their lifecycle
    events, from `output_item.added` to `output_item.done`.
    """

    def open(self) -> Sequence[StreamEvent]: ...

    def feed(self, fragments: Sequence[str]) -> Sequence[StreamEvent]:
        """The next pieces of the arguments, as the model writes them."""
        ...

    def run(self) -> AsyncGenerator[ToolStep]:
        """Do it; called once, when the arguments are complete. Its last step is the ToolResult. What goes wrong is
        told to the model in there; what is raised is a fault of ours. Closing the generator interrupts the call.
        """
        ...

    def abort(self, reason: str) -> ToolResult:
        """End a call that will not run, or that was cut off."""
        ...


class OfferedTool(Protocol):
    """A hosted tool as one request configured it."""

    @property
    def function(self) -> FunctionSpec:
        """What the model is told."""
        ...

    def begin(self, context: CallContext) -> CallSession: ...

    async def find_files(self, paths: Sequence[str]) -> Sequence[ProducedFile]:
        """Those of these absolute paths that are files of this tool's, for citations."""
        ...

    def close(self) -> None:
        """The request is over: what was held for its further calls is let go."""
        ...


class HostedTool(Protocol):
    """A tool that the gateway runs itself. The engine knows no tool by name."""

    @property
    def types(self) -> frozenset[str]:
        """The types of `tools` that it serves."""
        ...

    @property
    def item_types(self) -> frozenset[str]:
        """The types of the items that it makes."""
        ...

    @property
    def finds_files(self) -> bool:
        """Whether its calls find the files of the conversation."""
        ...

    async def offer(
        self, spec: ToolSpec, caller: Caller, past: Sequence[Segment], beside: Sequence[OfferedTool] = ()
    ) -> OfferedTool | None:
        """Check the configuration and everything that it names; raises ApiError. Nothing is created yet. None for one
        that leaves the tool to the client, or to the model's own server.

        past: the conversation with what the request adds to it.
        beside: what the same request was offered before this.
        """
        ...

    def echo(self, spec: ToolSpec) -> bytes:
        """The configuration as the response shows it: complete, and without secrets."""
        ...

    def recall(self, entry: Entry) -> ToolExchange | None:
        """What the model is shown of an item of this tool's that a client gave back."""
        ...

    async def remember(
        self, caller: Caller, past: Sequence[Segment], kept: Sequence[Entry] = ()
    ) -> Memory | None:
        """What must outlive the items of this conversation, which are about to be compacted; None if nothing must.

        kept: those among them that stay as they are.
        """
        ...


# --- containers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """A call is handed to its sandbox: it does not wait for another call, or for a sandbox, any more."""


type ContainerEvent = Started | AnyOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What calls in a container have left.

    files: written or changed, recorded and kept.
    missing: written or changed, but not to be fetched, as far as their names are known.
    complete: whether all were fetched; False with nothing missing means that they could not even be listed.
    """

    files: Sequence[ContainerFileRecord] = ()
    missing: Sequence[FileEntry] = ()
    complete: bool = True


class Container(Protocol):
    """A container of a caller's; its sandbox comes with the first call."""

    @property
    def id(self) -> str: ...

    def execute(self, request: ExecuteRequest) -> AsyncGenerator[ContainerEvent]:
        """Run code and yield its events, the `End` last; a `Note` before them tells when variables are gone because
        the sandbox is a new one. `Started` comes before the first event of the code itself, and again should the
        sandbox turn out to be gone; a call that cannot run has none. Closing the generator interrupts the code. A
        sandbox that cannot be had or is lost is an `End`, not an exception.
        """
        ...

    def leave(self) -> None:
        """Whoever has opened it does not come back; until then it neither expires nor makes room for another."""
        ...

    async def collect(self) -> Collected:
        """The files of calls of this object; each is told once."""
        ...

    async def save(self, path: str, content: bytes) -> ContainerFileRecord:
        """Put a file of the assistant's beside those that the code wrote; another name is found if it is taken.
        Raises TooLarge if the container may keep no more.
        """
        ...


class Containers(Protocol):
    """Container identity over sandboxes: who owns it, how long it lives, which files it has.

    What an operator allows (networks, minutes, how many, how much) is enforced here, for tools and clients alike. Every
    method that is about one container's files, and `container`, counts as a use of it; `check` does not.
    """

    def reserve(self) -> str:
        """An id for a container that begins with its first call."""
        ...

    def approve(self, spec: ContainerSpec) -> ContainerSpec:
        """The spec as a container would have it, with everything chosen; raises InvalidRequest for what no container
        may have here (`network_policy`, `expires_after.minutes`).
        """
        ...

    async def create(self, caller: Caller, spec: ContainerSpec) -> ContainerRecord:
        """A container that is there before its first call, with the uploads that the spec names; its sandbox comes
        later. Raises InvalidRequest (as `approve`; `file_ids`), RateLimited (as many as the tenant may have).
        """
        ...

    async def check(self, caller: Caller, container_id: str) -> ContainerRecord:
        """Raises NotFound, ContainerExpired."""
        ...

    async def open(
        self, caller: Caller, container_id: str, spec: ContainerSpec, heir_of: str | None = None
    ) -> Container:
        """The container of that id, which begins now if it was only reserved; raises NotFound, ContainerExpired,
        InvalidRequest, RateLimited (as many as the tenant may have).

        heir_of: an earlier container of the caller's, which has expired; one that begins now is given the files that
            users had put there, as far as they are still kept.
        """
        ...

    async def container(self, caller: Caller, container_id: str) -> ContainerRecord:
        """The container as it stands, expired or not; raises NotFound."""
        ...

    async def containers(
        self, caller: Caller, window: Window, name: str | None = None
    ) -> Sequence[ContainerRecord]:
        """Those of the caller, expired ones too, all or those of that name. Raises InvalidRequest."""
        ...

    async def delete(self, caller: Caller, container_id: str) -> None:
        """End it, with its files and with what runs in it. Raises NotFound."""
        ...

    async def put(
        self, caller: Caller, container_id: str, path: str, content: bytes | AsyncIterable[bytes]
    ) -> ContainerFileRecord:
        """Put a user's file at that path below /mnt/data, in place of one that is there. Raises NotFound,
        InvalidRequest (`file`), BodyTooLarge, Unavailable, and what `content` raises; then nothing was changed.
        """
        ...

    async def place(
        self, caller: Caller, container_id: str, file_ids: Sequence[str]
    ) -> Sequence[ContainerFileRecord]:
        """Put uploads into the container, under their names as far as these are free; one that is there already, of the
        same name and content, is not put there twice. Raises NotFound, InvalidRequest, BodyTooLarge, Unavailable.
        """
        ...

    async def unpack(
        self,
        caller: Caller,
        container_id: str,
        content: bytes | AsyncIterable[bytes],
        kind: ArchiveFormat,
        into: str = "",
    ) -> Sequence[ContainerFileRecord]:
        """Unpack a user's archive below a directory of /mnt/data; what it left there. Raises as `put` does."""
        ...

    async def file(self, caller: Caller, container_id: str, file_id: str) -> ContainerFileRecord:
        """Raises NotFound, also for what is another tenant's, and for files of an expired container."""
        ...

    async def files(
        self, caller: Caller, container_id: str, window: Window | None = None
    ) -> Sequence[ContainerFileRecord]:
        """All of them, oldest first, or a window. Raises NotFound, InvalidRequest."""
        ...

    def read(
        self, caller: Caller, container_id: str, file_id: str, start: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        """The bytes from `start` up to `end`, or to the last, in pieces; raises NotFound before the first."""
        ...

    async def delete_file(self, caller: Caller, container_id: str, file_id: str) -> None:
        """Raises NotFound, Unavailable."""
        ...

    async def close(self) -> None: ...


# --- files --------------------------------------------------------------------------------------------


class Files(Protocol):
    """What clients have uploaded. Another tenant's files, and those whose time is over, are not there."""

    async def create(
        self, caller: Caller, new: NewFile | Callable[[], NewFile | None], content: AsyncIterable[bytes]
    ) -> FileRecord:
        """Keep it; it is durable then. Raises InvalidRequest, BodyTooLarge, RateLimited, Unavailable, and whatever
        the content raises; then nothing is left of it.

        new: or a function that tells what is known of it, None for too little; it is asked at the beginning, and
            again when all of the content has come.
        """
        ...

    async def file(self, caller: Caller, file_id: str) -> FileRecord:
        """Raises NotFound."""
        ...

    async def files(self, caller: Caller, window: Window, purpose: str | None = None) -> Sequence[FileRecord]:
        """Raises InvalidRequest."""
        ...

    def read(
        self, caller: Caller, file_id: str, start: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        """The content in pieces, or those bytes of it; raises NotFound before the first."""
        ...

    async def delete(self, caller: Caller, file_id: str) -> None:
        """Copies that containers hold stay: they have records of their own. Raises NotFound."""
        ...


class Attachments(Protocol):
    """Finds the files and pictures that inputs hold or name."""

    async def find(
        self, caller: Caller, part: FilePart, *, whole: bool, take: TakeRoom | None = None
    ) -> Attachment:
        """What a part of an input holds or names, under a name that other files may have too. Raises NotFound for what
        the caller cannot have, InvalidRequest for what cannot be taken; `param` names the field of the part.

        whole: with the content of files that are no text.
        take: told of what is read, before it is.
        """
        ...
