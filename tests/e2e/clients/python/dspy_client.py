"""DSPy as its users call it: a predictor, a chain of thought, and its embedder. Prints what it got as JSON."""

import json
import sys

import dspy

URL, KEY = sys.argv[1:3]


def main() -> None:
    lm = dspy.LM("openai/small-chat", api_base=URL, api_key=KEY, cache=False, num_retries=0)
    told: dict[str, object] = {"plain": lm("hello")}
    with dspy.context(lm=lm):
        told["answer"] = dspy.Predict("question -> answer")(question="Who?").answer
        thought = dspy.ChainOfThought("question -> answer: int")(question="How many?")
        told["count"], told["reasoning"] = thought.answer, thought.reasoning
    embed = dspy.Embedder("openai/small-embed", api_base=URL, api_key=KEY, caching=False)
    told["vectors"] = embed(["a", "bcd"]).tolist()
    print(json.dumps(told))


main()
