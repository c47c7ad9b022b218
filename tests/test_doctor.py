"""`python -m aiozc doctor`: its exit code, its JSON, and that each finding comes with what caused it.

Most tests run it in a process of its own, as users do: filters and limits stay for a process's life.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from test_forbidden import ERRNO, FILTER

import aiozc
from aiozc.cli import doctor
from aiozc.cli.doctor import findings, machine, selftest, text

NEEDS_RING = pytest.mark.skipif(
    not aiozc.capabilities().zerocopy, reason="no zero-copy here to be found"
)
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
KEYS = {"status", "backend", "zerocopy", "reason", "kernel", "features", "limits", "findings"}


def clean(**more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("AIOZC_")}
    return {**env, "NO_COLOR": "", **more}


def examined(*command: str, **environment: str) -> tuple[int, Any]:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=90,
        env=clean(**environment),
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def after(setup: str, *argv: str, **environment: str) -> tuple[int, Any]:
    """The doctor's answer in a process that `setup` prepared."""
    code = textwrap.dedent(setup) + "\nfrom aiozc.cli import main\n"
    code += "raise SystemExit(main(['doctor', '--json']))\n"
    return examined("-W", "error", "-c", code, *argv, **environment)


def ids(report: Any) -> set[str]:
    return {finding["id"] for finding in report["findings"]}


def check(report: Any) -> None:
    assert report.keys() >= KEYS
    assert report["status"] in doctor.EXIT
    assert isinstance(report["zerocopy"], bool)
    assert all(isinstance(report[key], str) for key in ("reason", "kernel"))
    for finding in report["findings"]:
        assert set(finding) == {"id", "severity", "what", "remedy"}
        assert finding["severity"] in ("error", "warning", "info")
        assert finding["what"] and finding["remedy"]


# --- exit codes -----------------------------------------------------------------------------


def test_json_of_this_machine() -> None:
    code, report = examined("-m", "aiozc", "doctor", "--json")
    check(report)
    can = aiozc.capabilities()
    assert report["kernel"] == can.kernel
    assert report["features"].items() >= can.features.items()
    assert report["selftest"]["ok"]
    assert code == doctor.EXIT[report["status"]] < 2
    if os.geteuid() == 0 and can.zerocopy:
        assert (code, report["backend"], report["zerocopy"]) == (0, "uring", True)
        assert report["selftest"]["zero_copy_requests"] == selftest.ROUNDS + 1
        assert report["selftest"]["registered_requests"] == 1


def test_epoll_by_the_environment_is_a_fall_back() -> None:
    code, report = examined("-m", "aiozc", "doctor", "--json", AIOZC_BACKEND="epoll")
    check(report)
    assert (code, report["backend"], report["zerocopy"]) == (1, "epoll", False)
    assert "backend-forced" in ids(report)
    assert report["selftest"]["ok"]
    assert report["engine"] == "msg_zerocopy"
    assert report["selftest"]["zero_copy_requests"] == selftest.ROUNDS + 1
    assert report["selftest"]["registered_requests"] == 0


def test_epoll_with_zero_copy_switched_off_copies() -> None:
    code, report = examined(
        "-m", "aiozc", "doctor", "--json", AIOZC_BACKEND="epoll", AIOZC_ZEROCOPY="off"
    )
    check(report)
    assert (code, report["engine"], report["zerocopy"]) == (1, "copy", False)
    assert ids(report) >= {"backend-forced", "zerocopy-off"}
    assert report["selftest"]["zero_copy_requests"] == 0
    assert "switched off" in report["reason"]
    assert "everything works, sends are copied" in text.render(report, coloured=False)


@NEEDS_RING
def test_zero_copy_switched_off_is_a_fall_back() -> None:
    code, report = examined("-m", "aiozc", "doctor", "--json", AIOZC_ZEROCOPY="off")
    assert (code, report["backend"], report["zerocopy"]) == (1, "uring", False)
    assert "zerocopy-off" in ids(report)


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
def test_a_filter_that_forbids_io_uring(error: int) -> None:
    code, report = after(FILTER, str(ERRNO | error))
    check(report)
    assert (code, report["backend"], report["zerocopy"]) == (1, "epoll", False)
    assert report["limits"]["seccomp"] == 2
    (finding,) = [f for f in report["findings"] if f["id"] == "seccomp"]
    assert "io_uring_setup" in finding["remedy"]
    assert [name for name, has in report["features"].items() if has] == ["msg_zerocopy"]
    assert report["engine"] == "msg_zerocopy"
    assert "everything works, zero-copy goes by MSG_ZEROCOPY" in text.render(report, coloured=False)


def test_uring_demanded_where_it_is_forbidden_is_broken() -> None:
    code, report = after(FILTER, str(ERRNO | errno.EPERM), AIOZC_BACKEND="uring")
    check(report)
    assert (code, report["backend"]) == (2, None)
    assert ids(report) >= {"environment", "seccomp"}


def test_a_bad_environment_is_broken() -> None:
    code, report = examined("-m", "aiozc", "doctor", "--json", AIOZC_BACKEND="kqueue")
    check(report)
    assert (code, report["backend"]) == (2, None)
    (finding,) = [f for f in report["findings"] if f["severity"] == "error"]
    assert "kqueue" in finding["what"]


NOBODY = """
    import concurrent.futures.thread, encodings.idna, os, resource, stringprep
    import aiozc.cli.doctor  # while this user can still read the library
    limit = {kib} << 10
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    os.setgroups([])
    os.setgid(65534)
    # Locked memory is counted by user, and the kernel gives a ring's back late: a user for each limit.
    os.setuid(60000 + {kib} % 4999)
"""


@NEEDS_ROOT
@NEEDS_RING
def test_eight_mebibytes_of_locked_memory() -> None:
    code, report = after(NOBODY.format(kib=8192))
    check(report)
    assert (code, report["backend"], report["zerocopy"]) == (0, "uring", True)
    limits = report["limits"]
    assert (limits["pinnable_mib"], limits["connections"]) == (8, 4)
    assert "memlock" in ids(report)


@NEEDS_ROOT
@NEEDS_RING
def test_too_little_locked_memory_for_any_zero_copy_request() -> None:
    code, report = after(NOBODY.format(kib=64))
    check(report)
    assert (code, report["backend"], report["zerocopy"]) == (1, "uring", False)
    assert ids(report) >= {"memlock", "fell-back"}
    assert report["limits"]["connections"] == 0


@NEEDS_ROOT
@NEEDS_RING
def test_no_locked_memory_for_a_ring() -> None:
    code, report = after(NOBODY.format(kib=0))
    check(report)
    assert (code, report["backend"]) == (1, "epoll")
    assert "memlock" in ids(report)


# --- broken ---------------------------------------------------------------------------------


def test_other_bytes_at_the_peer_are_broken() -> None:
    code, report = after("""
        import asyncio
        read = asyncio.StreamReader.readexactly
        async def spoiled(self, n):
            data = bytearray(await read(self, n))
            data[1234] ^= 1
            return bytes(data)
        asyncio.StreamReader.readexactly = spoiled
        """)
    check(report)
    assert (code, report["status"], report["zerocopy"]) == (2, "broken", False)
    (finding,) = [f for f in report["findings"] if f["id"] == "self-test"]
    assert "from byte 1234" in finding["what"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGABRT)", "SIGABRT"),  # a sanitizer would take SIGSEGV
        ("raise OSError(5, 'no more')", "no more"),
        ("os._exit(0)", "without a report"),
        ("signal.pause()", "did not end within 1 s"),
    ],
    ids=["crash", "error", "silence", "hang"],
)
def test_a_self_test_that_does_not_end_well_is_broken(body: str, why: str) -> None:
    code, report = after(f"""
        import functools, os, signal
        from aiozc.cli.doctor import selftest
        async def bad():
            {body}
        selftest._exchange = bad
        selftest.run = functools.partial(selftest.run, 1.0)
        """)
    check(report)
    assert code == 2
    assert why in report["selftest"]["error"]


def without_native(tmp_path: Path) -> Path:
    package = Path(aiozc.__file__).parent
    shutil.copytree(package, tmp_path / "aiozc", ignore=shutil.ignore_patterns("*.so", "*.c"))
    return tmp_path


def test_native_modules_that_cannot_be_loaded_are_broken(tmp_path: Path) -> None:
    where = without_native(tmp_path)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "aiozc", "doctor", "--json"],  # no editable installation
        cwd=where,
        capture_output=True,
        text=True,
        timeout=60,
        env=clean(PYTHONPATH=str(where)),
    )
    assert (done.returncode, done.stderr) == (2, "")
    report = json.loads(done.stdout)
    check(report)
    assert ids(report) == {"native"}
    for command in (["-m", "aiozc", "demo"], ["-c", "import aiozc", "doctor"]):
        done = subprocess.run(
            [sys.executable, "-S", *command],
            cwd=where,
            capture_output=True,
            text=True,
            timeout=60,
            env=clean(PYTHONPATH=str(where)),
        )
        assert done.returncode == 1
        assert "ImportError: aiozc's native modules" in done.stderr
        assert "make build" in done.stderr


# --- looks ----------------------------------------------------------------------------------


def test_it_needs_no_rich_and_colours_no_pipe() -> None:
    code = "import sys; sys.modules['rich'] = None\nfrom aiozc.cli import main\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "raise SystemExit(main(['doctor']))"],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean(AIOZC_BACKEND="epoll", TERM="xterm"),
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "\x1b" not in done.stdout
    assert re.search(r"^backend +epoll: ", done.stdout, re.MULTILINE)
    assert "-> unset AIOZC_BACKEND" in done.stdout


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours_on_a_terminal(no_color: str, coloured: bool) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "aiozc", "doctor"],
        stdout=theirs,
        env=clean(TERM="xterm", NO_COLOR=no_color, AIOZC_BACKEND="epoll"),
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # EIO: the other end was closed
        pass
    os.close(ours)
    assert process.wait(60) == 1
    assert (b"\x1b[33mfall-back" in shown) == coloured
    assert b"fall-back" in shown


def test_every_finding_is_in_the_text() -> None:
    report = doctor.examine()
    report["findings"] = [
        {"id": "x", "severity": s, "what": f"what-{s}", "remedy": f"remedy-{s}"}
        for s in ("error", "warning", "info")
    ]
    shown = text.render(report, coloured=False)
    for severity in ("error", "warning", "info"):
        assert f"{severity}: what-{severity}\n  -> remedy-{severity}" in shown


# --- facts and findings ---------------------------------------------------------------------

PACKET = """sk               RefCnt Type Proto  Iface R Rmem   User   Inode
0000000000000000 3      3    0003   {loopback}     1 0      0      1
0000000000000000 3      3    88cc   0     1 0      0      2
0000000000000000 3      3    0003   0     0 0      0      3
"""


def test_captures_are_sockets_that_run_for_all_protocols(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    loopback = socket.if_nametoindex("lo")
    (tmp_path / "net/packet").write_text(PACKET.format(loopback=loopback))
    assert machine.captures(tmp_path) == ("lo",)
    (tmp_path / "net/packet").write_text(PACKET.format(loopback=0))
    assert machine.captures(tmp_path) == ("any",)


@NEEDS_ROOT
def test_a_capture_of_loopback_is_found() -> None:
    before = machine.captures()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as tap:
        tap.bind(("lo", 3))
        report = doctor.examine()
    assert "lo" in report["limits"]["captures"]
    assert "capture" in ids(report)
    assert machine.captures() == before


def test_nothing_readable_is_no_error(tmp_path: Path) -> None:
    here = machine.read(tmp_path)
    assert (here.seccomp, here.io_uring_disabled, here.optmem_max) == (None, None, None)
    assert here.captures == ()


@pytest.mark.parametrize(
    ("value", "words"), [(1, "io_uring_group"), (2, "to everybody")], ids=["group", "all"]
)
def test_the_sysctl_is_named_before_a_filter(tmp_path: Path, value: int, words: str) -> None:
    kernel, own = tmp_path / "sys/kernel", tmp_path / "self"
    kernel.mkdir(parents=True)
    own.mkdir()
    (kernel / "io_uring_disabled").write_text(f"{value}\n")
    (kernel / "io_uring_group").write_text("-1\n")
    (own / "status").write_text("Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n")
    here = machine.read(tmp_path)
    assert here.seccomp == 2
    can = aiozc.Capabilities(
        "epoll",
        False,
        "forbidden",
        "6.8",
        dict.fromkeys(aiozc.capabilities().features, False),
        "built 2.5, running 2.4",
    )
    found = findings.find(can, errno.EPERM, "", here, {"connections": None}, {"ok": True})
    by_id = {finding.id: finding for finding in found}
    assert "seccomp" not in by_id
    sysctl = by_id["io-uring-disabled"]
    assert words in sysctl.what
    assert "kernel.io_uring_disabled=0" in sysctl.remedy
    assert by_id["liburing"].what == "liburing 2.4 runs, and 2.5 was built with"


@NEEDS_RING
@pytest.mark.parametrize(("eor", "stacks"), [(1 << 20, None), (1, False)])
def test_stacking_is_found_by_trying_it(eor: int, stacks: bool | None) -> None:
    # Each request that ends its stack is what a kernel without stacking does with all of them.
    loop = aiozc.new_event_loop(backend="uring", adaptive=False, zc_threshold=0, zc_eor_bytes=eor)
    try:
        found = loop.run_until_complete(asyncio.wait_for(selftest._stacking(), 30))
    finally:
        loop.close()
    kernel = tuple(map(int, re.findall(r"\d+", aiozc.capabilities().kernel)[:2]))
    assert found is (kernel >= (6, 10) if stacks is None else stacks)
