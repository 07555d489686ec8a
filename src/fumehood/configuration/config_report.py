"""Prints the effective settings, without secrets."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET_NAME = re.compile(
    r"key|token|secret|password|passwd|credential|authori[sz]ation|cookie", re.IGNORECASE
)
_MASK = "***"


def format_settings(settings: object) -> str:
    """All settings as YAML. Credentials in URLs, header values and what is named like a secret are masked."""
    import yaml

    tree = msgspec.to_builtins(settings, enc_hook=str)
    text: str = yaml.safe_dump(_mask(tree), sort_keys=False, allow_unicode=True, width=1000)
    return text


def _mask(value: object, *, free_form: bool = False) -> object:
    """free_form: whether names are the operator's, not those of settings; settings only name variables of secrets."""
    if isinstance(value, Mapping):
        return {
            name: _mask_entry(str(name), below, free_form=free_form)
            for name, below in cast("Mapping[Any, object]", value).items()
        }
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_mask(below, free_form=free_form) for below in cast("Sequence[object]", value)]
    return _CREDENTIALS.sub(f"{_MASK}@", value) if isinstance(value, str) else value


def _mask_entry(name: str, value: object, *, free_form: bool) -> object:
    if name == "headers" and isinstance(value, Mapping):
        return dict.fromkeys(cast("Mapping[str, object]", value), _MASK)
    if free_form and _SECRET_NAME.search(name) and value is not None:
        return _MASK
    return _mask(value, free_form=free_form or name == "extra_body")
