"""The arguments of a hosted call as a model has written them; imports msgspec."""

import msgspec
from msgspec import Raw

_objects = msgspec.json.Decoder(dict[str, Raw])


def read_arguments[ArgumentsT](decoder: msgspec.json.Decoder[ArgumentsT], text: str) -> ArgumentsT:
    """Raises ValueError with a sentence for the model."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise ValueError(f"the arguments do not fit: {error}") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"the arguments are not valid JSON ({error})") from None


def replayable(text: str, understood: dict[str, object]) -> str:
    """As the model wrote them, if they are JSON: model servers refuse to be shown anything else. If not, what was
    understood of them.
    """
    try:
        _objects.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return msgspec.json.encode(understood).decode()
    return text
