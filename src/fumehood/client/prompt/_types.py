"""Types that all of `prompt` shares: dataclasses as parameters, generics that know their arguments; imports nothing
but the standard library.
"""

from dataclasses import Field, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

if (
    TYPE_CHECKING
):  # its TypeVar has defaults, which typing's has from Python 3.13 on; type checkers bring it along
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


_made: dict[tuple[Any, ...], type[Any]] = {}


class Specialised:
    """A generic class that knows at run time what it was subscripted with.

    `Tool[Query, Rows]` is a subclass of `Tool` whose `type_arguments` are `(Query, Rows)`; as are those of a class that
    derives from it. To type checkers it is an ordinary generic class.
    """

    type_arguments: ClassVar[tuple[Any, ...]] = ()

    @classmethod
    def __class_getitem__(cls, item: Any) -> Any:
        arguments: tuple[Any, ...] = cast(tuple[Any, ...], item) if isinstance(item, tuple) else (item,)
        if any(isinstance(argument, TypeVar) for argument in arguments):
            return cast(Any, super()).__class_getitem__(item)
        key = (cls, *arguments)
        if key not in _made:
            names = ", ".join(getattr(argument, "__name__", str(argument)) for argument in arguments)
            body = {"type_arguments": arguments, "__module__": cls.__module__, "__doc__": cls.__doc__}
            _made[key] = type(cls)(f"{cls.__name__}[{names}]", (cls,), body)
        return _made[key]

    @classmethod
    def type_argument(cls, place: int) -> Any:
        """The one at this place, or None if it was not given."""
        return cls.type_arguments[place] if place < len(cls.type_arguments) else None
