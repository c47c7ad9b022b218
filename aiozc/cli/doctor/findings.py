"""From facts to findings: what is not as it should be, how much that matters, and what to do about it.

Called by doctor/__init__.py with what the probe, the machine and the self-test said. One function for each
subject; each yields findings and reads nothing but its arguments.
Severity: "error", the library cannot work; "warning", sends are copied or fail over; "info", slower.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiozc.capabilities import NEEDED, Capabilities
from aiozc.cli.doctor.machine import Machine

MIB = 1 << 20
_FEW = 16  # connections


@dataclass(frozen=True, slots=True)
class Finding:
    id: str
    severity: str
    what: str
    remedy: str


def find(
    can: Capabilities,
    error: int,
    refused: str,
    machine: Machine,
    limits: Mapping[str, Any],
    test: Mapping[str, Any],
) -> list[Finding]:
    """error: the errno that the probe's ring met, or 0. refused: why no loop can be made, or ""."""
    found = [*_environment(refused)]
    if not refused:
        found += _self_test(test)
    if can.backend == "epoll":
        found += _no_ring(can, error, machine)
        if can.zerocopy and error != errno.ENOMEM:  # that finding has the same remedy
            found += _memlock(machine, limits)
    elif can.zerocopy:
        found += _memlock(machine, limits)
        found += _never_tried(can, test)
    found += _features(can, test)
    found += _capture(machine)
    found += _versions(can, machine)
    order = ("error", "warning", "info")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _environment(refused: str) -> Iterator[Finding]:
    if refused:
        yield Finding(
            "environment",
            "error",
            f"no loop can be made: {refused}",
            "correct or unset AIOZC_BACKEND and AIOZC_ZEROCOPY",
        )
    elif os.environ.get("AIOZC_ZEROCOPY") == "off":
        yield Finding(
            "zerocopy-off",
            "warning",
            "the environment switches zero-copy off (AIOZC_ZEROCOPY=off)",
            "unset AIOZC_ZEROCOPY",
        )


def _self_test(test: Mapping[str, Any]) -> Iterator[Finding]:
    if not test["ok"]:
        yield Finding(
            "self-test",
            "error",
            f"the self-test failed: {test['error']}",
            "do not send with this installation: try AIOZC_BACKEND=epoll, rebuild for this Python and "
            "kernel, and report it with the output of `python -m aiozc doctor --json`",
        )


_ALLOW = (
    "allow io_uring_setup, io_uring_enter and io_uring_register in the profile: Docker and Podman "
    "--security-opt seccomp=PROFILE.json (or unconfined), Kubernetes securityContext.seccompProfile"
)


def _no_ring(can: Capabilities, error: int, machine: Machine) -> Iterator[Finding]:
    if os.environ.get("AIOZC_BACKEND") == "epoll":
        yield Finding(
            "backend-forced",
            "warning",
            "the environment asks for epoll (AIOZC_BACKEND=epoll)",
            "unset AIOZC_BACKEND",
        )
    disabled = machine.io_uring_disabled or 0
    if error == errno.EPERM and disabled:
        who = (
            "everybody" if disabled >= 2 else "all without CAP_SYS_ADMIN and outside io_uring_group"
        )
        yield Finding(
            "io-uring-disabled",
            "warning",
            f"kernel.io_uring_disabled={disabled} forbids io_uring to {who}",
            "on the host, as root: sysctl -w kernel.io_uring_disabled=0"
            + (
                "; or join the group by sysctl kernel.io_uring_group (it is "
                f"{machine.io_uring_group})"
                if disabled == 1
                else ""
            ),
        )
    elif error in (errno.EPERM, errno.ENOSYS) and machine.seccomp == 2:
        yield Finding(
            "seccomp",
            "warning",
            f"io_uring_setup answers {errno.errorcode[error]}, and this process has a seccomp filter",
            _ALLOW,
        )
    elif error == errno.ENOSYS:
        yield Finding(
            "no-io-uring",
            "warning",
            f"this kernel ({machine.kernel}) has no io_uring",
            "Linux 6.1 or newer, built with CONFIG_IO_URING; gVisor has it off by default",
        )
    elif error == errno.EPERM:
        yield Finding(
            "forbidden",
            "warning",
            "io_uring is forbidden, and neither by sysctl nor by a filter of this process",
            "look at the security module's log (SELinux, AppArmor): journalctl -k | grep -i denied",
        )
    elif error == errno.ENOMEM:
        yield Finding(
            "memlock", "warning", "there is no room for a ring in RLIMIT_MEMLOCK", _RAISE_MEMLOCK
        )
    elif error:
        yield Finding(
            "no-ring",
            "warning",
            f"no ring can be made: {can.reason.partition('; ')[0]}",
            "raise RLIMIT_NOFILE (ulimit -n)" if error == errno.EMFILE else "see the error",
        )
    elif missing := [n for n in NEEDED if not can.features[n]]:
        yield Finding(
            "kernel",
            "warning",
            f"this kernel's io_uring lacks {', '.join(missing)}",
            "Linux 6.0 or newer; 6.1 for zero-copy",
        )


_RAISE_MEMLOCK = (
    "raise it: ulimit -l unlimited, systemd LimitMEMLOCK=infinity, Docker --ulimit memlock=-1; "
    "or CAP_IPC_LOCK"
)


def _memlock(machine: Machine, limits: Mapping[str, Any]) -> Iterator[Finding]:
    connections = limits["connections"]
    if connections is None:
        return
    covers = (
        f"{connections} connection{'s' * (connections != 1)} with a full request in flight"
        if connections
        else f"no request of {limits['max_request'] // 1024} KiB at all"
    )
    yield Finding(
        "memlock",
        "warning" if connections < _FEW else "info",
        f"RLIMIT_MEMLOCK lets one loop pin {_mib(limits['loop_cap'])} of {_mib(machine.memlock or 0)}: "
        f"{covers}; above that it copies",
        _RAISE_MEMLOCK + "; or send from an aiozc.BufferPool, which is charged once",
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:g} MiB" if nbytes >= MIB else f"{nbytes / 1024:g} KiB"


def _never_tried(can: Capabilities, test: Mapping[str, Any]) -> Iterator[Finding]:
    if not test["ok"]:
        return
    if test["backend"] == "epoll":
        yield Finding(
            "no-ring-left",
            "warning",
            f"io_uring works, but the test's loop got no ring: {test['reason']}",
            _RAISE_MEMLOCK,
        )
    elif not test["zero_copy_requests"] or test["fallbacks"].get("ENOMEM"):
        why = ", ".join(f"{n} by {name}" for name, n in test["fallbacks"].items() if n)
        yield Finding(
            "fell-back",
            "warning",
            f"of the self-test's requests {test['zero_copy_requests']} went zero-copy; "
            f"fallen back: {why or 'none'}",
            "cap, ENOMEM: " + _RAISE_MEMLOCK,
        )


def _features(can: Capabilities, test: Mapping[str, Any]) -> Iterator[Finding]:
    if can.backend != "uring":
        return
    features = can.features
    if not (features["send_zc"] and features["sendmsg_zc"]):
        yield Finding(
            "kernel",
            "warning",
            "this kernel has no SENDMSG_ZC: sends are copied",
            "Linux 6.1 or newer",
        )
        return
    if not features["sendmsg_zc_fixed"]:
        yield Finding(
            "registered",
            "info",
            "requests out of registered memory (BufferPool) send one part each",
            "Linux 6.15 or newer gathers",
        )
    if not features["defer_taskrun"]:
        yield Finding("kernel", "info", "the ring has no DEFER_TASKRUN", "Linux 6.1 or newer")
    if test.get("stacking") is False:
        yield Finding(
            "stacking",
            "info",
            "zero-copy requests do not share packets here: small ones cost more",
            "Linux 6.10 or newer; or raise zc_threshold",
        )


def _capture(machine: Machine) -> Iterator[Finding]:
    if machine.captures:
        yield Finding(
            "capture",
            "warning",
            f"a packet capture (AF_PACKET on {', '.join(machine.captures)}) makes the kernel copy what "
            "is sent zero-copy",
            "end it (tcpdump, Wireshark, an intrusion detector, some DHCP clients); find it as root by "
            "ss -0pe",
        )


def _versions(can: Capabilities, machine: Machine) -> Iterator[Finding]:
    words = can.liburing.replace(",", "").split()
    built, running = words[1], words[3]
    if words[2] == "running" and running != "unknown" and _numbers(running) < _numbers(built):
        yield Finding(
            "liburing",
            "warning",
            f"liburing {running} runs, and {built} was built with",
            "install the newer liburing, or rebuild aiozc on this machine",
        )
    if machine.free_threaded:
        yield Finding(
            "free-threaded",
            "info",
            "this Python is built without a GIL; importing aiozc switches the GIL on",
            "use the ordinary build of Python: nothing is gained by the other one here",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
