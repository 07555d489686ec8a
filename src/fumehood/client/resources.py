"""Things that tools need and a prompt does not say: databases, clients, caches."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

from fumehood.client.errors import ResourceError


@runtime_checkable
class SupportsClose(Protocol):
    def close(self) -> object: ...


type Resources = ResourceRegistry | Mapping[type[Any], object]


class ResourceRegistry:
    """Resources by their type. As a context manager it closes, at the end, what it has made itself.

    What is registered is the resource, or a function that makes it, which is called once and only if somebody asks.
    """

    def __init__(
        self,
        given: Mapping[type[Any], object] | None = None,
        factories: Mapping[type[Any], Callable[[], object]] | None = None,
    ) -> None:
        self._instances: dict[type[Any], object] = dict(given or {})
        self._factories = dict(factories or {})
        self._created: list[object] = []
        self._parents: list[ResourceRegistry] = []
        self._lock = threading.RLock()

    @classmethod
    def build(cls, resources: Mapping[type[Any], object]) -> Self:
        """A value that is an instance of its key is the resource; another callable is its factory."""
        given: dict[type[Any], object] = {}
        factories: dict[type[Any], Callable[[], object]] = {}
        for kind, value in resources.items():
            if not _is_instance(value, kind) and callable(value):
                factories[kind] = value
            else:
                given[kind] = value
        return cls(given, factories)

    @classmethod
    def combine(cls, sources: Sequence[Resources]) -> "ResourceRegistry":
        """Several as one; a later source goes before an earlier one.

        A registry among them stays its owner's, who closes it; of a plain mapping, the result closes what is made.
        """
        joined = ResourceRegistry()
        for source in sources:
            if not isinstance(source, ResourceRegistry):
                source = ResourceRegistry.build(source)
                joined._created.append(source)
            joined._parents.insert(0, source)
        return joined

    def get[T](self, kind: type[T]) -> T:
        """The resource of this type. Raises ResourceError if there is none."""
        with self._lock:
            if kind not in self._instances:
                self._instances[kind] = self._resolve(kind)
            found: Any = self._instances[kind]
        return found

    def __contains__(self, kind: type[Any]) -> bool:
        return kind in self._known_types()

    def close(self) -> None:
        """Close what was made here, the last first. What was given stays open: it is somebody else's."""
        with self._lock:
            made, self._created = self._created, []
        for resource in reversed(made):
            if isinstance(resource, SupportsClose):
                resource.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _known_types(self) -> set[type[Any]]:
        return {*self._instances, *self._factories}.union(*(below._known_types() for below in self._parents))

    def _resolve(self, kind: type[Any]) -> object:
        if kind in self._factories:
            made = self._factories[kind]()
            self._created.append(made)
            return made
        for below in self._parents:
            if kind in below:
                return below.get(kind)
        known = ", ".join(sorted(known.__name__ for known in self._known_types())) or "none"
        raise ResourceError(
            f"There is no resource of type {kind.__name__} (there is: {known}); pass "
            f"resources=ResourceRegistry.build({{{kind.__name__}: …}}) to evaluate() or bind()."
        )


def _is_instance(value: object, kind: type[Any]) -> bool:
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol that cannot be checked at run time
        return not isinstance(value, type)
