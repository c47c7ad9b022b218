"""`python -m aiozc doctor`: what this machine can do, whether it really does, and what to do about the rest.

Called by `aiozc.cli` alone. Owns the report (a dictionary, the same for --json and for people) and the
exit code: 0 usable zero-copy, 1 fall-back, 2 broken. Facts come from machine.py and from
`aiozc.capabilities`, what happens from selftest.py, judgement from findings.py, looks from text.py.
Never: needs rich or a privilege, changes anything, sends but over loopback.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

import aiozc
from aiozc.capabilities import _probe, choose, default_caps, may_lock_anything
from aiozc.cli.doctor import findings, machine, selftest, text

EXIT = {"zero-copy": 0, "fall-back": 1, "broken": 2}


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine can do, and what to do about the rest",
        description="Says what this machine can do, tries it with a self-test over loopback, and says what "
        "to do about the rest. Changes nothing and needs no privilege: run it as the real program runs.",
        epilog="Exit code: 0 usable zero-copy by io_uring, 1 fall-back (MSG_ZEROCOPY, or copying), 2 broken.",
    )
    parser.add_argument("--json", action="store_true", help="for programs; see docs/doctor.md")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    report = examine()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(text.render(report, machine.coloured(sys.stdout)))
    return EXIT[report["status"]]


def examine() -> dict[str, Any]:
    """The report, as --json prints it."""
    here = machine.read()
    can, refused = _capabilities()
    error, _ = _probe()
    test = {"ok": False, "error": refused} if refused else selftest.run()
    limits = _limits(here)
    found = findings.find(can, error, refused, here, limits, test)
    ran = test.get("backend", can.backend)  # a loop may get no ring though the probe got one
    engine = "copy"
    if can.zerocopy and test.get("zero_copy_requests"):
        engine = "uring" if ran == "uring" else "msg_zerocopy"
    if any(finding.severity == "error" for finding in found):
        status = "broken"
    else:
        status = "zero-copy" if engine == "uring" else "fall-back"
    return {
        "status": status,
        "version": aiozc.__version__,
        "backend": None if refused else ran,
        "zerocopy": status == "zero-copy",
        "engine": engine,
        "reason": refused or (can.reason if ran == can.backend else test["reason"]),
        "kernel": can.kernel,
        "arch": here.arch,
        "python": here.python,
        "liburing": can.liburing,
        "features": {**can.features, "stacking": test.get("stacking")},
        "limits": limits,
        "selftest": test,
        "findings": [dataclasses.asdict(finding) for finding in found],
    }


def _capabilities() -> tuple[aiozc.Capabilities, str]:
    """What a loop would use; or what is there, and why none can be made."""
    try:
        return choose(), ""
    except (ValueError, RuntimeError) as exc:
        return choose("epoll", "auto"), str(exc)


def _limits(here: machine.Machine) -> dict[str, Any]:
    """connections: how many may have a full request in flight at a time; None: no limit of memory
    counts. pinnable_mib: what the kernel lets this user lock, of which a loop takes half."""
    transport_cap, loop_cap = default_caps()
    request = aiozc.Settings().max_request
    free = here.memlock is None or may_lock_anything()
    return {
        "memlock_bytes": here.memlock,
        "pinnable_mib": None if free else round((here.memlock or 0) / findings.MIB, 3),
        "connections": None if free else loop_cap // request,
        "loop_cap": loop_cap,
        "transport_cap": transport_cap,
        "max_request": request,
        "optmem_max": here.optmem_max,
        "nofile": here.nofile,
        "seccomp": here.seccomp,
        "io_uring_disabled": here.io_uring_disabled,
        "io_uring_group": here.io_uring_group,
        "captures": list(here.captures),
    }
