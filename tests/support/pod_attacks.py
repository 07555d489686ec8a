"""Attacks of tests/attacks from the code of a pod: the same programs, other walls."""

import json
import urllib.error
import urllib.request
from typing import Any, override

import pytest

from tests.attacks import test_processes, test_resources, test_result_channel, test_syscalls
from tests.support.driver_client import End, Outcome, SandboxClient, gather
from tests.support.pods import TOKEN


class PodBox(SandboxClient):
    """The sandbox of a pod, over HTTP."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.name = "box"
        self._ask("PUT", "/sandboxes/box", b"{}")

    def _ask(self, method: str, path: str, body: bytes | None = None, seconds: float = 60) -> bytes:
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        request = urllib.request.Request(self._url + path, body, headers, method=method)
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return response.read()

    @override
    def run(self, code: str, timeout: float = 30, requirements: tuple[str, ...] = ()) -> Outcome:
        return self._execute(
            {"code": code, "timeout_seconds": timeout, "requirements": requirements}, timeout
        )

    @override
    def shell(self, command: str, timeout: float = 30) -> Outcome:
        return self._execute({"code": command, "timeout_seconds": timeout, "language": "shell"}, timeout)

    def _execute(self, request: dict[str, Any], timeout: float) -> Outcome:
        try:
            body = self._ask("POST", "/sandboxes/box/execute", json.dumps(request).encode(), timeout + 60)
        except urllib.error.HTTPError as error:  # the sandbox is gone
            with error:
                end = End("lost", -1, 0, False, error.read().decode(errors="replace"), 0)
            return Outcome(end)
        return gather([json.loads(line) for line in body.splitlines() if line])

    @property
    @override
    def gone(self) -> str | None:
        try:
            self._ask("GET", "/sandboxes/box")
        except urllib.error.HTTPError as error:
            with error:
                return json.loads(error.read())["error"]["message"]
        return None


class PodAttackKit:
    """Each test needs the fixture `box`, of type PodBox, with the names of tests/attacks/programs/prelude.py."""

    @pytest.fixture
    def forger(self, box: PodBox) -> PodBox:
        assert box.run(test_result_channel.FRAMES).end.status == "ok"
        return box

    def test_signals_end_its_own_pod_at_most(self, box: PodBox) -> None:
        """The zygote, PID 1 of its container, and the subreaper have the code's user; there is nobody else."""
        code = "import signal\nreport([attempt(os.kill, pid, 0) for pid in (1, os.getppid())])"
        assert set(box.ask(code)) <= {"EPERM", "returned None"}
        pids = "report(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))"
        assert len(box.ask(pids)) <= 4
        box.run("for pid in (1, os.getppid()): attempt(os.kill, pid, signal.SIGHUP)")
        assert box.run("1").end.status in ("ok", "lost")

    def test_setuid_programs_give_nothing(self, box: PodBox) -> None:
        code = "import subprocess\nreport([subprocess.getoutput('su -c id root </dev/null'), os.getuid()])"
        said, uid = box.ask(code)
        assert "uid=0" not in said
        assert uid != 0

    def test_nobody_can_pose_as_the_supervisor(self, box: PodBox) -> None:
        """The socket is gone, and one of the same name finds no client: the server connects once."""
        code = "print(json.dumps([os.path.exists('/run/fumehood/code/guest.sock'), channel_number() > 0]))"
        assert box.ask(code)[0] is False

    def test_the_socket_of_pip_takes_one_line_a_connection(self, box: PodBox) -> None:
        code = """
from concurrent.futures import ThreadPoolExecutor
def flood(_):
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(20)
        one.connect("/home/user/.fumehood/pip.sock")
        try:
            one.sendall(b"x" * 300000 + b"\\n")
            return one.recv(1000).decode(errors="replace")[:60]
        except OSError as error:
            return name_of(error.errno or 0)
with ThreadPoolExecutor(8) as pool:
    answers = list(pool.map(flood, range(8)))
report(all("malformed" in a or a in ("EPIPE", "ECONNRESET", "") for a in answers) or answers)
"""
        assert box.ask(code, timeout=60) is True
        assert box.ask("print(json.dumps(2))") == 2

    test_unshare = staticmethod(test_syscalls.test_unshare)
    test_clone = staticmethod(test_syscalls.test_clone)
    test_clone3_and_clone_parent = staticmethod(test_syscalls.test_clone3_and_clone_parent)
    test_setns = staticmethod(test_syscalls.test_setns)
    test_namespace_programs = staticmethod(test_syscalls.test_namespace_programs)
    test_mounts = staticmethod(test_syscalls.test_mounts)
    test_kernel_interfaces = staticmethod(test_syscalls.test_kernel_interfaces)
    test_every_unknown_number = staticmethod(test_syscalls.test_every_unknown_number)
    test_foreign_tables = staticmethod(test_syscalls.test_foreign_tables)
    test_arguments_with_high_bits = staticmethod(test_syscalls.test_arguments_with_high_bits)
    test_another_process_is_not_traced = staticmethod(
        test_processes.test_another_process_of_the_sandbox_is_not_traced
    )
    test_no_capabilities = staticmethod(test_processes.test_no_capabilities_and_no_new_privileges)
    test_children_have_the_same_walls = staticmethod(test_processes.test_children_have_the_same_walls)
    test_identity_cannot_change = staticmethod(test_processes.test_identity_cannot_change)
    test_device_nodes_cannot_be_made = staticmethod(test_processes.test_device_nodes_cannot_be_made)
    test_no_attribute_can_be_set = staticmethod(test_resources.test_no_attribute_can_be_set)
    test_every_limit_stays_lowered = staticmethod(test_resources.test_every_limit_stays_lowered)
    test_an_empty_packet = staticmethod(test_result_channel.test_an_empty_packet_is_not_taken_for_more)
    test_a_forged_interruption = staticmethod(test_result_channel.test_a_forged_interruption_is_not_one)
    test_an_id_of_an_old_call = staticmethod(test_result_channel.test_an_id_of_an_old_call_is_worthless)
    test_an_unfinished_message = staticmethod(
        test_result_channel.test_an_unfinished_message_does_not_poison_the_next_call
    )
    test_children_cannot_talk = staticmethod(test_result_channel.test_children_cannot_talk_for_the_runner)
    test_timers_and_pending_signals = staticmethod(test_resources.test_timers_and_pending_signals)
