"""Things that tools need and a prompt does not say: databases, clients, caches; imports `errors`."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, runtime_checkable

from fumehood.client.errors import ResourceError


@runtime_checkable
class SupportsClose(Protocol):
    def close(self) -> object: ...


class ResourceRegistry:
    """Resources by their type. As a context manager it closes, at the end, what it has made itself.

    What is registered is the resource, or a function that makes it, which is called once and only if somebody asks.
    """

    def __init__(
        self,
        given: Mapping[type[Any], object] | None = None,
        factories: Mapping[type[Any], Callable[[], object]] | None = None,
    ) -> None:
        self._found: dict[type[Any], object] = dict(given or {})
        self._factories = dict(factories or {})
        self._made: list[object] = []
        self._lock = threading.RLock()

    @classmethod
    def build(cls, resources: Mapping[type[Any], object]) -> Self:
        """A value that is an instance of its key is the resource; another callable is its factory."""
        given: dict[type[Any], object] = {}
        factories: dict[type[Any], Callable[[], object]] = {}
        for kind, value in resources.items():
            if not _is_a(value, kind) and callable(value):
                factories[kind] = value
            else:
                given[kind] = value
        return cls(given, factories)

    def get[T](self, kind: type[T]) -> T:
        """The resource of this type. Raises ResourceError if there is none."""
        with self._lock:
            if kind not in self._found:
                self._found[kind] = self._make(kind)
            found: Any = self._found[kind]
        return found

    def __contains__(self, kind: type[Any]) -> bool:
        return kind in self._found or kind in self._factories

    def merged(self, other: "ResourceRegistry | None") -> "ResourceRegistry":
        """Both together; where both know a type, `other` goes before. What is made is closed by the result."""
        if other is None:
            return self
        given = {kind: value for kind, value in self._found.items() if kind not in other}
        return ResourceRegistry({**given, **other._found}, {**self._factories, **other._factories})

    def close(self) -> None:
        """Close what was made here, the last first. What was given stays open: it is somebody else's."""
        with self._lock:
            made, self._made = self._made, []
        for resource in reversed(made):
            if isinstance(resource, SupportsClose):
                resource.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self, kind: type[Any]) -> object:
        factory = self._factories.get(kind)
        if factory is None:
            known = ", ".join(sorted(known.__name__ for known in {*self._found, *self._factories})) or "none"
            raise ResourceError(
                f"There is no resource of type {kind.__name__} (there is: {known}); pass "
                f"resources=ResourceRegistry.build({{{kind.__name__}: …}}) to evaluate() or bind()."
            )
        made = factory()
        self._made.append(made)
        return made


def _is_a(value: object, kind: type[Any]) -> bool:
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol that cannot be checked at run time
        return not isinstance(value, type)
