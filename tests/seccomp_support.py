"""A seccomp profile in the format of Docker and the OCI runtimes, applied to this process: for tests on
x86-64. What a runtime does with libseccomp is done here by hand, as far as the profile in examples/ needs it.

Called in child processes, for a filter stays for the life of a process. Must never be lenient: a rule that it
does not understand is an error.
"""

from __future__ import annotations

import ctypes
import json
import re
import struct
from pathlib import Path
from typing import Any

NUMBERS = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
AUDIT_ARCH_X86_64 = 0xC000003E
# Offsets in struct seccomp_data.
NR, ARCH, ARGS = 0, 4, 16
LD, JEQ, AND, RET = 0x20, 0x15, 0x54, 0x06
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000

Step = tuple[int, int, int, int]


def numbers() -> dict[str, int]:
    found = re.findall(r"#define __NR_(\w+)\s+(\d+)", NUMBERS.read_text())
    return {name: int(number) for name, number in found}


def action(rule: dict[str, Any], default_errno: int) -> int:
    match rule["action"]:
        case "SCMP_ACT_ALLOW":
            return ALLOW
        case "SCMP_ACT_ERRNO":
            return ERRNO | int(rule.get("errnoRet", default_errno))
    raise ValueError(rule["action"])


def when(argument: dict[str, Any], then: int) -> list[Step]:
    """Behind the match of a number: `then` if the argument is as it is to be, else go on."""
    if argument["op"] != "SCMP_CMP_MASKED_EQ" or max(argument["value"], argument["valueTwo"]) >> 32:
        raise ValueError(argument)
    low = ARGS + 8 * argument["index"]
    return [
        (LD, 0, 0, low),
        (AND, 0, 0, argument["value"]),
        (JEQ, 0, 1, argument["valueTwo"]),
        (RET, 0, 0, then),
        (LD, 0, 0, NR),
    ]


def program(profile: dict[str, Any]) -> bytes:
    """The filter: the number is compared with one name after the other."""
    default = profile["defaultErrnoRet"]
    steps: list[Step] = [
        (LD, 0, 0, ARCH),
        (JEQ, 1, 0, AUDIT_ARCH_X86_64),
        (RET, 0, 0, KILL),
        (LD, 0, 0, NR),
    ]
    known = numbers()
    for rule in profile["syscalls"]:
        then = action(rule, default)
        for name in rule["names"]:
            found: list[Step] = [(RET, 0, 0, then)]
            if arguments := rule.get("args"):
                (argument,) = arguments
                found = when(argument, then)
            if name in known:  # else newer than these headers: runtimes leave such names out, too
                steps += [(JEQ, 0, len(found), known[name]), *found]
    steps.append((RET, 0, 0, action({"action": profile["defaultAction"]}, default)))
    assert {"io_uring_setup", "io_uring_enter", "io_uring_register"} <= set(known)
    assert len(steps) <= 4096  # BPF_MAXINSNS
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def apply(profile: dict[str, Any]) -> None:
    """From now on, for good, for this thread and what it starts."""
    code = ctypes.create_string_buffer(program(profile))
    head = struct.pack("@HxxxxxxP", len(code) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, head, 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp filter")


def without_io_uring(profile: dict[str, Any]) -> dict[str, Any]:
    """The profile as it would be for any other service."""
    rules = [
        {**rule, "names": [name for name in rule["names"] if not name.startswith("io_uring_")]}
        for rule in profile["syscalls"]
    ]
    return {**profile, "syscalls": rules}


def load(path: str) -> dict[str, Any]:
    profile: dict[str, Any] = json.loads(Path(path).read_text())
    return profile
