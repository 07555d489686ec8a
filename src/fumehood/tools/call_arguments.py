"""Decodes the arguments of hosted calls."""

import msgspec
from msgspec import Raw

_object_decoder = msgspec.json.Decoder(dict[str, Raw])


def decode_arguments[ArgumentsT](decoder: msgspec.json.Decoder[ArgumentsT], text: str) -> ArgumentsT:
    """Decode arguments. Raises ValueError with a sentence for the model."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise ValueError(f"the arguments do not fit: {error}") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"the arguments are not valid JSON ({error})") from None


def to_replayable(text: str, fallback: dict[str, object]) -> str:
    """Return the arguments as the model wrote them if they are a JSON object, which model servers require.

    Otherwise encode `fallback`.
    """
    try:
        _object_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return msgspec.json.encode(fallback).decode()
    return text
