"""Reviews a directory: the model reads it in a container and answers with a type.

    OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none python examples/review.py src --model my-model

With `--here` the files stay on this machine, and the model reads them through file tools instead.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fumehood.client import (
    HostMount,
    HostWorkspaceSection,
    MarkdownSection,
    Prompt,
    PromptTemplate,
    Session,
    ToolInvoked,
)
from fumehood.client.adapters.openai import (
    OpenAIAdapter,
    OpenAIContainerWorkspaceSection,
    OpenAIHostedToolsConfig,
)

EXCLUDED = (".git", "node_modules", "__pycache__", ".venv")


@dataclass(frozen=True)
class Review:
    summary: str
    issues: list[str] = field(metadata={"description": "The worst first, each with its file."})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Review the code in a directory.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="gpt-5.2")
    parser.add_argument("--here", action="store_true", help="keep the files on this machine")
    options = parser.parse_args(arguments)

    session = Session()
    session.bus.subscribe(ToolInvoked, lambda event: print(f"· {event.name}: {event.result.message[:200]}"))
    make_workspace = HostWorkspaceSection if options.here else OpenAIContainerWorkspaceSection
    workspace = make_workspace(
        session=session,
        mounts=[HostMount(str(options.directory), "code", exclude_glob=EXCLUDED, max_bytes=20_000_000)],
        allowed_host_roots=[options.directory],
    )
    task = MarkdownSection(
        title="Task", key="task", template="Review the code in `code/`. Read before you judge."
    )
    prompt = Prompt(PromptTemplate[Review](ns="examples", key="review", sections=[task, workspace]))
    hosted = OpenAIHostedToolsConfig(code_interpreter=not options.here)
    try:
        with OpenAIAdapter(model=options.model, hosted_tools=hosted) as adapter:
            review = adapter.evaluate(prompt, session=session).output
    finally:
        workspace.cleanup()
    assert review is not None
    print(review.summary, *(f"- {issue}" for issue in review.issues), sep="\n")


if __name__ == "__main__":
    main()
