"""Runtime checks of types: an argument or a field of a wrong type raises PromptValidationError that names it."""

import inspect
import os
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import lru_cache, wraps
from typing import Any, Literal, TypeAliasType, TypeVar, Union, cast

from fumehood.client.dbc import require

_WORDS: dict[Any, str] = {
    str: "a text",
    bytes: "bytes",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    type(None): "None",
}
_MAX_SHOWN = 200


def require_type(value: object, kind: Any, name: str, *, is_secret: bool = False) -> None:
    """Raise PromptValidationError unless the value matches a type annotation.

    A sequence matches `tuple[…, ...]`, and a whole number matches `float`; True and False are no numbers. is_secret: do
    not show the value.
    """
    if _matches(value, kind):
        return
    shown = type(value).__name__ if is_secret else shorten_repr(value)
    require(False, f"{name} is {shown}; it has to be {_describe(kind)}.")


def require_field_types(instance: Any, prefix: str = "") -> None:
    """Raise PromptValidationError unless all fields of a dataclass match their annotations.

    prefix: precedes the names of the fields in the message. Fields without a `repr` are secrets.
    """
    kinds = _annotations_of(cast(Any, type(instance)))
    for one in fields(instance):
        if one.name in kinds:
            value = getattr(instance, one.name)
            require_type(value, kinds[one.name], prefix + one.name, is_secret=not one.repr)


def check_arguments[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: an argument that does not match its annotation raises PromptValidationError.

    Annotations that exist only for type checkers are not checked.
    """

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        signature = _signature_of(function)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # which raises it, with the function's name
        kinds = _annotations_of(function)
        for name, value in bound.arguments.items():
            variadic = signature.parameters[name].kind in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            )
            if name in kinds and not variadic:
                require_type(value, kinds[name], name)
        return function(*args, **kwargs)

    return checked


@lru_cache(maxsize=256)
def _signature_of(function: Callable[..., object]) -> inspect.Signature:
    return inspect.signature(function)


@lru_cache(maxsize=256)
def _annotations_of(target: Any) -> dict[str, Any]:
    """Return the annotations that can be resolved, of a function or of a class with its bases."""
    found: dict[str, Any] = {}
    for owner in reversed(inspect.getmro(target)) if isinstance(target, type) else (target,):
        module = inspect.getmodule(owner)
        names = {} if module is None else vars(module)
        for name, kind in inspect.get_annotations(owner).items():
            try:
                found[name] = eval(kind, dict(names)) if isinstance(kind, str) else kind  # noqa: S307 - our own
            except NameError:
                continue
    found.pop("return", None)
    return found


def _matches(value: object, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if isinstance(kind, TypeAliasType):
        return _matches(value, kind.__value__)
    if isinstance(origin, TypeAliasType):
        return _matches(value, origin.__value__)
    if isinstance(kind, TypeVar) or kind in (Any, object):
        return True
    if isinstance(kind, str):  # a reference inside another annotation, such as Sequence["Section"]
        return True
    if kind is None:
        return value is None
    arguments = typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_matches(value, one) for one in arguments)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in arguments)
    if kind in (int, float):
        numbers = (int,) if kind is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    return _matches_class(value, origin or kind, arguments)


def _matches_class(value: object, kind: Any, arguments: tuple[Any, ...]) -> bool:
    if kind is Callable:
        return callable(value)
    if not _is_class(kind, object):
        return True
    if _is_class(kind, Mapping):
        return isinstance(value, Mapping) and _match_items(cast(Mapping[Any, Any], value), arguments)
    if _is_class(kind, Collection) and not _is_class(kind, (str, bytes)):
        return _is_several(value) and all(
            _matches(one, arguments[0]) for one in cast(Collection[Any], value) if arguments
        )
    if _is_class(kind, os.PathLike):
        return isinstance(value, os.PathLike)
    if getattr(kind, "_is_protocol", False):
        return all(hasattr(value, name) for name in kind.__protocol_attrs__)
    if getattr(kind, "type_arguments", ()):  # `Tool[Query, Rows]` is a subclass of what is meant
        kind = kind.__mro__[1]
    return isinstance(value, kind)


def _is_class(kind: Any, bases: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, bases)


def _match_items(value: Mapping[Any, Any], arguments: tuple[Any, ...]) -> bool:
    if len(arguments) != 2:
        return True
    return all(_matches(key, arguments[0]) and _matches(one, arguments[1]) for key, one in value.items())


def _is_several(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | bytearray | Mapping)


def _describe(kind: Any) -> str:
    """Say in words what an annotation asks for."""
    kind = kind.__value__ if isinstance(kind, TypeAliasType) else kind
    kind = type(None) if kind is None else kind
    if isinstance(kind, type) and kind in _WORDS:
        return _WORDS[kind]
    if kind in (Any, object):
        return "anything"
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_describe(one) for one in arguments))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    plain: Any = origin or kind
    if plain is Callable or "__call__" in getattr(plain, "__protocol_attrs__", ()):
        return "a function"
    if _is_class(plain, Mapping):
        return (
            f"a mapping of {_describe(arguments[0])} to {_describe(arguments[1])}"
            if arguments
            else "a mapping"
        )
    if _is_class(plain, Collection):
        return (
            f"several in a tuple or list, each {_describe(arguments[0])}" if arguments else "a tuple or list"
        )
    return str(getattr(plain, "__name__", plain)).partition("[")[0]


def shorten_repr(value: object) -> str:
    """Return the repr of a value for a message, whatever it is."""
    try:
        shown = repr(value)
    except Exception:  # a repr may do anything
        shown = type(value).__name__
    return shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "…"
