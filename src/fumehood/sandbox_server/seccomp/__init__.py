"""The compiled seccomp programs and the policy behind them."""

from pathlib import Path

_HERE = Path(__file__).parent
_INSTRUCTION = 8  # bytes of one struct sock_filter


def load_program(name: str, machine: str) -> bytes:
    """The program of a policy ("namespaces", "degraded") for a machine as `os.uname()` names it.

    Raises RuntimeError when there is none: a sandbox is not started without its filter.
    """
    path = _HERE / f"{name}.{machine}.bpf"
    try:
        program = path.read_bytes()
    except FileNotFoundError:
        known = ", ".join(sorted(blob.name.removesuffix(".bpf") for blob in _HERE.glob("*.bpf")))
        raise RuntimeError(
            f"no seccomp program {name!r} for the architecture {machine!r} (there are: {known or 'none'}); "
            "sandboxes cannot run here"
        ) from None
    if not program or len(program) % _INSTRUCTION:
        raise RuntimeError(f"the seccomp program {path} is damaged; reinstall the package")
    return program
