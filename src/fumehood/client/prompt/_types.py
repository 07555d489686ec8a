"""Types that all of `prompt` shares: dataclasses as parameters, generics that know their arguments."""

from dataclasses import Field, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, get_args, get_origin

# Its TypeVar has defaults, which typing's has from Python 3.13 on; type checkers bring it along.
if TYPE_CHECKING:
    from typing_extensions import TypeVar
else:
    from typing import TypeVar


class SupportsDataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


@dataclass(frozen=True)
class NoParams:
    """The parameters of what takes none."""


if TYPE_CHECKING:
    ParamsT_co = TypeVar("ParamsT_co", bound=SupportsDataclass, covariant=True, default=NoParams)
    OutputT_co = TypeVar("OutputT_co", covariant=True, default=None)
else:
    ParamsT_co = TypeVar("ParamsT_co", covariant=True)
    OutputT_co = TypeVar("OutputT_co", covariant=True)


_specialized_classes: dict[tuple[Any, ...], type[Any]] = {}


class RuntimeGeneric:
    """A generic class that knows at run time what it was subscripted with.

    `Tool[Query, Rows]` is a subclass of `Tool` whose `type_arguments` are `(Query, Rows)`; as are those of a class that
    derives from it, and of `Mine[Rows]` after `class Mine[R](Tool[Query, R])`. To type checkers it is an ordinary
    generic class.
    """

    # Those of the first generic class; what is open is a TypeVar.
    type_arguments: ClassVar[tuple[Any, ...]] = ()

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        for base in cls.__dict__.get("__orig_bases__", ()):
            origin = get_origin(base)
            if isinstance(origin, type) and issubclass(origin, RuntimeGeneric):
                cls.type_arguments = origin._bind_arguments(get_args(base))

    @classmethod
    def _bind_arguments(cls, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the first generic class, if these are this one's."""
        if not cls.type_arguments:
            return arguments
        given = dict(zip(cast(Any, cls).__parameters__, arguments, strict=False))
        return tuple(given.get(one, one) for one in cls.type_arguments)

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
    def type_argument(cls, place: int) -> Any:
        """The one at this place, or None if it was not given."""
        found = cls.type_arguments[place] if place < len(cls.type_arguments) else None
        return None if isinstance(found, TypeVar) else found
