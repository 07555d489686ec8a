"""The arguments of a hosted call as a model has written them."""

import msgspec
from msgspec import Raw

_object_decoder = msgspec.json.Decoder(dict[str, Raw])


def decode_arguments[ArgumentsT](decoder: msgspec.json.Decoder[ArgumentsT], text: str) -> ArgumentsT:
    """Raises ValueError with a sentence for the model."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise ValueError(f"the arguments do not fit: {error}") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"the arguments are not valid JSON ({error})") from None


def to_replayable(text: str, fallback: dict[str, object]) -> str:
    """As the model wrote them, if they are JSON: model servers refuse to be shown anything else. If not, what was
    understood of them.
    """
    try:
        _object_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return msgspec.json.encode(fallback).decode()
    return text
