"""Starts the command line, or reports which extra is missing."""

import importlib.metadata
import re
import sys

from fumehood import __version__

_EXIT_UNAVAILABLE = 125  # as of every command that cannot run on this machine
_EXTRAS = {
    "all": "everything: the command line, the servers, sandboxes with the usual packages",
    "server": "the command line, the gateway and the sandbox server",
    "sandbox": "numpy, pandas, matplotlib and others, for the code in sandboxes",
    "openai": "OpenAI's SDK, through which the client talks to a gateway or to OpenAI",
    "otel": "OpenTelemetry: spans, metrics and events",
}


def main() -> None:
    """Run the command line and exit."""
    try:
        from fumehood.cli import main as run

        run()
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in ("", "fumehood"):
            raise  # a bug of ours
        sys.exit(_run_without(module, sys.argv[1:]))


def _run_without(module: str, arguments: list[str]) -> int:
    """Handle the arguments as far as possible without `module`; return the exit code."""
    if module in sys.stdlib_module_names:
        _print_error(f"This Python was built without its module {module}: {sys.executable}. Use another one.")
        return _EXIT_UNAVAILABLE
    if arguments == ["--version"]:
        sys.stdout.write(f"fumehood {__version__}\n")
        return 0
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(_format_help())
        return 0
    if not arguments:
        sys.stderr.write(_format_help())
        return 2
    _print_error(
        f"`fumehood {arguments[0]}` needs {module}, which is not installed beside fumehood {__version__}. "
        f"The extra `all` brings everything: pip install 'fumehood[all]', or uv tool install 'fumehood[all]'. "
        f"`fumehood --help` lists the extras."
    )
    return _EXIT_UNAVAILABLE


def _print_error(text: str) -> None:
    sys.stderr.write(f"fumehood: {text}\n")


def _format_help() -> str:
    installed = [extra for extra in _EXTRAS if _is_installed(extra)]
    available = "the client library (`import fumehood.client`)"
    if installed:
        available += " and " + ", ".join(f"fumehood[{extra}]" for extra in installed)
    lines = [
        f"fumehood {__version__}: an open, self-hosted code interpreter.",
        "",
        f"Installed: {available}.",
        "The commands serve, exec, sandbox, doctor, keys, config, containers, files and parts need an extra:",
        "",
        *(f"  pip install 'fumehood[{extra}]'".ljust(34) + summary for extra, summary in _EXTRAS.items()),
        "",
        "As a command of its own, with its own Python: uv tool install --python 3.12 'fumehood[all]'",
    ]
    return "\n".join(lines) + "\n"


def _is_installed(extra: str) -> bool:
    """Whether every distribution that the extra needs on all platforms is installed."""
    try:
        lines = importlib.metadata.requires("fumehood") or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return False
    pattern = re.compile(rf"""([\w.-]+)[^;]*;\s*extra\s*==\s*['"]{extra}['"]\s*""")
    names = [match.group(1) for line in lines if (match := pattern.fullmatch(line))]
    if names == ["fumehood"]:  # `all` consists of the others
        return all(_is_installed(other) for other in _EXTRAS if other != extra)
    return bool(names) and all(_has_distribution(name) for name in names)


def _has_distribution(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
