"""Instructor as its users call it: a model from tools, from a JSON schema, and streamed. Prints what it got as JSON."""

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

URL, KEY = sys.argv[1:3]


class Person(BaseModel):
    name: str
    age: int


def main() -> None:
    openai = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
    asked = {"model": "small-chat", "messages": [{"role": "user", "content": "Ann is 42."}]}
    told: dict[str, object] = {}
    default = instructor.from_openai(openai)
    told["tools"] = default.chat.completions.create(response_model=Person, **asked).model_dump()
    partial = list(default.chat.completions.create_partial(response_model=Person, **asked))
    told["streamed"] = partial[-1].model_dump()
    schema = instructor.from_openai(openai, mode=instructor.Mode.JSON_SCHEMA)
    told["schema"] = schema.chat.completions.create(response_model=Person, **asked).model_dump()
    print(json.dumps(told))


main()
