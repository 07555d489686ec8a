"""Runs a Kubernetes cluster of one node on this machine, for tests.

python -m tools.kubernetes_cluster up                start it, and wait until it works
python -m tools.kubernetes_cluster run COMMAND…      run a command in its network, with KUBECONFIG and kubectl
python -m tools.kubernetes_cluster load IMAGE.tar…   import images for its pods
python -m tools.kubernetes_cluster status            say what runs
python -m tools.kubernetes_cluster down              stop it, and remove everything
"""

import argparse
import os
import sys
import time
from pathlib import Path

from tools.kubernetes_cluster.cluster import describe_cluster, environment_for, start_cluster, stop_cluster
from tools.kubernetes_cluster.images import import_image
from tools.kubernetes_cluster.layout import ClusterError, Layout
from tools.kubernetes_cluster.node import join_network

_STATE = Path(".kubernetes")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools.kubernetes_cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--state", type=Path, default=_STATE, help="its directory (default: %(default)s)")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start it")
    up.add_argument("--timeout", type=float, default=300.0, help="seconds, without those of building it")
    up.add_argument("--keep", action="store_true", help="leave what was started when it does not get ready")
    commands.add_parser("down", help="stop it")
    commands.add_parser("status", help="say what runs")
    load = commands.add_parser("load", help="import images")
    load.add_argument("archive", type=Path, nargs="+", help="an OCI or Docker archive")
    run = commands.add_parser("run", help="run a command in its network")
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="COMMAND")
    return parser.parse_args()


def _up(layout: Layout, timeout: float, *, keep: bool) -> None:
    began = time.monotonic()
    start_cluster(layout, timeout, keep=keep)
    print(f"The cluster is ready after {time.monotonic() - began:.0f} s. KUBECONFIG={layout.kubeconfig}")


def _run(layout: Layout, program: list[str]) -> None:
    if not program:
        raise ClusterError("Say which command to run.")
    join_network(layout)
    environment = environment_for(layout)
    try:
        os.execvpe(program[0], program, environment)
    except FileNotFoundError:
        raise ClusterError(f"There is no program {program[0]!r}.") from None


def main() -> int:
    arguments = _parse()
    try:
        layout = Layout(arguments.state.resolve())
        match arguments.command:
            case "up":
                _up(layout, arguments.timeout, keep=arguments.keep)
            case "down":
                stop_cluster(layout)
            case "status":
                print(describe_cluster(layout))
            case "load":
                for archive in arguments.archive:
                    print("\n".join(import_image(layout, archive)))
            case _:
                _run(layout, arguments.program)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
