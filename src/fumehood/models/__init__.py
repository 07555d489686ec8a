"""Model backends: each streams one turn of a model to the engine.

`registry` routes model names to backends. `chat_completions` and `responses_api` ask model servers over HTTP;
`direct_execution` runs the code of the user's message without a model. `upstream_health` and `upstream_checks` say
what is wrong with a server.
"""

from fumehood.models.model_settings import ModelSettings, Secret, check_url, read_secret

__all__ = [
    "ModelSettings",
    "Secret",
    "check_url",
    "read_secret",
]
