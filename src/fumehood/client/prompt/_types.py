"""Shared types of prompts: dataclass parameters, and generics that know their arguments at run time."""

from dataclasses import Field, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, get_args, get_origin

# TypeVar defaults need typing_extensions before Python 3.13.
if TYPE_CHECKING:
    from typing_extensions import TypeVar
else:
    from typing import TypeVar


class SupportsDataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


@dataclass(frozen=True)
class NoParams:
    """Parameters of a tool that has none."""


if TYPE_CHECKING:
    ParamsT_co = TypeVar("ParamsT_co", bound=SupportsDataclass, covariant=True, default=NoParams)
    OutputT_co = TypeVar("OutputT_co", covariant=True, default=None)
else:
    ParamsT_co = TypeVar("ParamsT_co", covariant=True)
    OutputT_co = TypeVar("OutputT_co", covariant=True)


_specialized_classes: dict[tuple[Any, ...], type[Any]] = {}


class RuntimeGeneric:
    """A generic class that knows its type arguments at run time.

    `Tool[Query, Rows]` is a subclass of `Tool` with the `type_arguments` `(Query, Rows)`. Classes derived from it have
    them too, and so has `Mine[Rows]` after `class Mine[R](Tool[Query, R])`. For type checkers it is an ordinary
    generic.
    """

    # Arguments of the first generic class; an open one is a TypeVar.
    type_arguments: ClassVar[tuple[Any, ...]] = ()

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        for base in cls.__dict__.get("__orig_bases__", ()):
            origin = get_origin(base)
            if isinstance(origin, type) and issubclass(origin, RuntimeGeneric):
                cls.type_arguments = origin._bind_arguments(get_args(base))

    @classmethod
    def _bind_arguments(cls, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the first generic class, given those of this class."""
        if not cls.type_arguments:
            return arguments
        bound = dict(zip(cast(Any, cls).__parameters__, arguments, strict=False))
        return tuple(bound.get(one, one) for one in cls.type_arguments)

    @classmethod
    def __class_getitem__(cls, item: Any) -> Any:
        arguments: tuple[Any, ...] = cast(tuple[Any, ...], item) if isinstance(item, tuple) else (item,)
        if any(isinstance(argument, TypeVar) for argument in arguments):
            return cast(Any, super()).__class_getitem__(item)
        key = (cls, *arguments)
        if key not in _specialized_classes:
            names = ", ".join(getattr(argument, "__name__", str(argument)) for argument in arguments)
            body = {
                "type_arguments": cls._bind_arguments(arguments),
                "__module__": cls.__module__,
                "__doc__": cls.__doc__,
            }
            _specialized_classes[key] = type(cls)(f"{cls.__name__}[{names}]", (cls,), body)
        return _specialized_classes[key]

    @classmethod
    def type_argument(cls, index: int) -> Any:
        """Return the argument at this index, or None if it is not bound."""
        found = cls.type_arguments[index] if index < len(cls.type_arguments) else None
        return None if isinstance(found, TypeVar) else found
