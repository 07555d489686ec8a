"""Resources for tools: databases, clients, caches."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from fumehood.client.errors import ResourceError
from fumehood.client.type_validation import check_arguments

type Resources = ResourceRegistry | Mapping[type[Any], object]


class ResourceRegistry:
    """Resources by type. As a context manager it closes the resources that it has created.

    Register an instance, or a factory that is called once on first use.
    """

    @check_arguments
    def __init__(
        self,
        instances: Mapping[type[Any], object] | None = None,
        factories: Mapping[type[Any], Callable[[], object]] | None = None,
    ) -> None:
        self._instances: dict[type[Any], object] = dict(instances or {})
        self._factories = dict(factories or {})
        self._created: list[object] = []
        self._parents: list[ResourceRegistry] = []
        self._lock = threading.RLock()

    @classmethod
    @check_arguments
    def build(cls, resources: Mapping[type[Any], object]) -> Self:
        """Build a registry: a value that is an instance of its key is the resource, any other callable is a factory."""
        instances: dict[type[Any], object] = {}
        factories: dict[type[Any], Callable[[], object]] = {}
        for kind, value in resources.items():
            if not _is_instance(value, kind) and callable(value):
                factories[kind] = value
            else:
                instances[kind] = value
        return cls(instances, factories)

    @classmethod
    def combine(cls, sources: Sequence[Resources]) -> "ResourceRegistry":
        """Combine several sources; a later one takes precedence.

        A registry among them is closed by its owner; resources created from a plain mapping are closed by the result.
        """
        joined = ResourceRegistry()
        for source in sources:
            if not isinstance(source, ResourceRegistry):
                source = ResourceRegistry.build(source)
                joined._created.append(source)
            joined._parents.insert(0, source)
        return joined

    def get[T](self, kind: type[T]) -> T:
        """Return the resource of this type. Raises ResourceError if there is none."""
        with self._lock:
            if kind not in self._instances:
                self._instances[kind] = self._resolve(kind)
            found: Any = self._instances[kind]
        return found

    def __contains__(self, kind: type[Any]) -> bool:
        return kind in self._known_types()

    def close(self) -> None:
        """Close the resources that were created here, in reverse order. Registered instances stay open."""
        with self._lock:
            made, self._created = self._created, []
        for resource in reversed(made):
            if callable(close := getattr(resource, "close", None)):
                close()

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
