"""The compiled seccomp programs and the policy behind them."""

from pathlib import Path

_DIRECTORY = Path(__file__).parent
_INSTRUCTION = 8  # bytes of one struct sock_filter


def load_program(name: str, machine: str) -> bytes:
    """Return the compiled program of a policy ("namespaces", "degraded") for a machine as `os.uname()` names it.

    Raises RuntimeError if there is none: no sandbox starts without its filter.
    """
    path = _DIRECTORY / f"{name}.{machine}.bpf"
    try:
        program = path.read_bytes()
    except FileNotFoundError:
        known = ", ".join(sorted(blob.name.removesuffix(".bpf") for blob in _DIRECTORY.glob("*.bpf")))
        raise RuntimeError(
            f"no seccomp program {name!r} for the architecture {machine!r} (there are: {known or 'none'}); "
            "sandboxes cannot run here"
        ) from None
    if not program or len(program) % _INSTRUCTION:
        raise RuntimeError(f"the seccomp program {path} is damaged; reinstall the package")
    return program
