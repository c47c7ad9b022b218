"""What docs/containers.md hands out: a seccomp profile that does what it says, a manifest, a command.

No container is started: the profile's decisions are made a BPF filter (seccomp_support.py), under which the
library and a server's usual business are tried, and the same without the three calls of io_uring.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from seccomp_support import NUMBERS, load
from support import in_thread

import aiozc

ROOT = Path(__file__).parent.parent
CONTAINERS = ROOT / "examples" / "containers"
PROFILE = CONTAINERS / "seccomp-io_uring.json"
IO_URING = {"io_uring_setup", "io_uring_enter", "io_uring_register"}


def test_the_profile_denies_what_it_does_not_name() -> None:
    profile = load(str(PROFILE))
    assert set(profile) == {"defaultAction", "defaultErrnoRet", "architectures", "syscalls"}
    assert (profile["defaultAction"], profile["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", 1)
    names = [name for rule in profile["syscalls"] for name in rule["names"]]
    assert len(names) == len(set(names))
    assert set(names) >= IO_URING
    # What Docker's own profile gives to nobody without a capability.
    for name in ("bpf", "mount", "ptrace", "unshare", "setns", "keyctl", "init_module", "kexec_load",
                 "perf_event_open", "userfaultfd", "open_by_handle_at", "reboot", "pivot_root"):  # fmt: skip
        assert name not in names
    (clone,) = [rule for rule in profile["syscalls"] if rule["names"] == ["clone"]]
    assert clone["args"][0]["value"] == 0x7E020000  # no new namespaces


SERVICE = """
import sys
from seccomp_support import apply, load, without_io_uring
profile = load(sys.argv[1])
apply(profile if sys.argv[2] == "with" else without_io_uring(profile))

import asyncio, os, socket, tempfile
import aiozc

async def echo(reader, writer):
    await writer.zc_send(bytearray(await reader.readexactly(1_000_000)))
    writer.close()

async def main():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    data = bytearray(os.urandom(1_000_000))
    expected = bytes(data)
    await writer.zc_send(data)
    data[:] = bytes(len(data))
    assert await reader.read() == expected
    writer.close()
    server.close()
    await asyncio.to_thread(socket.getaddrinfo, "localhost", 80)
    process = await asyncio.create_subprocess_exec("/bin/cat", stdin=-1, stdout=-1)
    assert (await process.communicate(b"through a pipe"))[0] == b"through a pipe"
    with tempfile.TemporaryFile() as file:
        file.write(b"f" * 10_000)
        file.seek(0)
        a, b = socket.socketpair()
        _, out = await asyncio.open_connection(sock=a)
        sent = await asyncio.get_running_loop().sendfile(out.transport, file)
        assert sent == 10_000 == len(b.recv(20_000))
        out.close()
        await out.wait_closed()
        b.close()
    return asyncio.get_running_loop().zc_stats().backend

try:
    os.chroot("/")
except PermissionError:
    pass
else:
    raise SystemExit("what the profile does not name was allowed")
print(aiozc.run(main(), adaptive=False, zc_threshold=0))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is made for x86-64")
@pytest.mark.skipif(not NUMBERS.exists(), reason="needs the kernel's headers")
@pytest.mark.parametrize("rule", ["with", "without"])
def test_a_service_works_under_the_profile_and_falls_back_without_its_rule(rule: str) -> None:
    # Fails when: a call that Python or the loop needs is not in the list.
    if rule == "with" and aiozc.capabilities().backend != "uring":
        pytest.skip("no io_uring here in any case")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SERVICE, str(PROFILE), rule],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == ("uring" if rule == "with" else "epoll")


def test_the_manifest_names_the_profile() -> None:
    text = (CONTAINERS / "pod.yaml").read_text()
    (path,) = re.findall(r"localhostProfile: (\S+)", text)
    assert Path(path).name == PROFILE.name and "type: Localhost" in text
    assert f"/var/lib/kubelet/seccomp/{path}" in text
    assert "\t" not in text
    if importlib.util.find_spec("yaml"):
        import yaml  # type: ignore[import-untyped]

        pod = yaml.safe_load(text)
        assert pod["spec"]["securityContext"]["seccompProfile"]["localhostProfile"] == path


def test_the_path_command_says_what_the_kernel_reports() -> None:
    if not aiozc.capabilities().zerocopy:
        pytest.skip("no zero-copy here")
    command = [sys.executable, str(CONTAINERS / "path.py"), "127.0.0.1"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def swallow() -> int:
            with listener.accept()[0] as peer:
                return sum(iter(lambda: len(peer.recv(1 << 20)), 0))

        async def main() -> None:
            reading = asyncio.ensure_future(in_thread(swallow))
            port = str(listener.getsockname()[1])
            done = await in_thread(
                lambda: subprocess.run([*command, port], capture_output=True, text=True, timeout=60)
            )
            assert (done.returncode, done.stdout.strip()) == (0, "copied"), done.stderr
            assert await reading == 16 * 512 * 1024

        asyncio.run(main())
    done = subprocess.run([*command, "9", "--udp"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "copied"), done.stderr


def test_the_profile_in_the_docs_is_this_one() -> None:
    text = (ROOT / "docs" / "containers.md").read_text()
    assert "examples/containers/seccomp-io_uring.json" in text
    assert json.loads(PROFILE.read_text())
