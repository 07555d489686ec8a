"""Values of the vendors' SDK types with a text of its own in every field, to find out which texts are shown."""

import datetime as dt
import enum
import types
import typing
from collections.abc import Iterator
from itertools import count
from typing import Annotated, Any, Literal, TypeAliasType, Union, get_args, get_origin

from pydantic import BaseModel

_MAX_DEPTH = 7
MARK = "~"


class InstanceGenerator:
    """Makes values of an annotation: one for each alternative of each field."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def generate(self, annotation: Any, name: str = "", depth: int = 0) -> list[Any]:
        annotation = _strip(annotation)
        origin = get_origin(annotation)
        if origin in (Union, types.UnionType):
            found = [self.generate(each, name, depth) for each in get_args(annotation)]
            return [value for values in found for value in values]
        if origin is Literal:
            return [get_args(annotation)[0]]
        if isinstance(origin, type) and issubclass(origin, list | tuple):
            inner = self.generate(get_args(annotation)[0], name, depth + 1) if depth < _MAX_DEPTH else []
            return [[value] for value in inner] or [[]]
        if isinstance(origin, type) and issubclass(origin, dict):
            inner = self.generate(get_args(annotation)[1], name, depth + 1) if depth < _MAX_DEPTH else []
            return [{"key": value} for value in inner] or [{}]
        return self._generate_plain(origin or annotation, annotation, name, depth)

    def _generate_plain(self, kind: Any, annotation: Any, name: str, depth: int) -> list[Any]:
        if kind in (str, Any, object):
            return [f"{name}{MARK}{next(self._numbers)}{MARK}"]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return [*self._generate_model(kind, depth + 1)]
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return [next(iter(kind)).value]
        examples = {bool: True, int: 7, float: 0.5, bytes: "aGk=", dt.datetime: "2026-01-12T10:30:45Z"}
        if kind in examples:
            return [examples[kind]]
        arguments = [each for each in get_args(annotation) if not isinstance(each, typing.TypeVar)]
        return self.generate(arguments[0], name, depth) if arguments else []

    def _generate_model(self, model: type[BaseModel], depth: int) -> Iterator[dict[str, Any]]:
        if depth > _MAX_DEPTH:
            return
        model.model_rebuild()
        first: dict[str, Any] = {}
        others: list[tuple[str, Any]] = []
        for name, field in model.model_fields.items():
            values = self.generate(field.annotation, name, depth)
            if values:
                key = field.alias or name
                first[key] = values[0]
                others += [(key, value) for value in values[1:]]
        yield first
        for key, value in others:
            yield {**first, key: value}


def _strip(annotation: Any) -> Any:
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, TypeAliasType):
            annotation = annotation.__value__
        elif isinstance(get_origin(annotation), TypeAliasType):
            annotation = get_origin(annotation).__value__
        else:
            return annotation


def list_texts(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every text of a JSON value with the names on the way to it."""
    if isinstance(value, dict):
        for key, inner in typing.cast("dict[str, Any]", value).items():
            yield from list_texts(inner, (*path, key))
    elif isinstance(value, list):
        for inner in typing.cast("list[Any]", value):
            yield from list_texts(inner, path)
    elif isinstance(value, str):
        yield path, value
