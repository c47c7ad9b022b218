"""Which backend this process uses, and why: the probe, the environment, and limits on locked memory.

Owns: the one probe a process. Called by loop.py, and by users through `aiozc.capabilities()`.
Never: prints or warns; a container that forbids io_uring is a normal place to run.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import platform
import resource
from dataclasses import dataclass

from . import faults  # noqa: F401  (the environment's knobs, before the probe)
from ._reactor_c import ffi, lib

_FEATURES = {
    "io_uring": lib.AZC_HAS_URING,
    "send_zc": lib.AZC_HAS_SEND_ZC,
    "sendmsg_zc": lib.AZC_HAS_SENDMSG_ZC,
    "recv_multishot": lib.AZC_HAS_RECV_MULTISHOT,
    "accept_multishot": lib.AZC_HAS_ACCEPT_MULTISHOT,
    "buf_ring": lib.AZC_HAS_BUF_RING,
    "defer_taskrun": lib.AZC_HAS_DEFER_TASKRUN,
    "sendmsg_zc_fixed": lib.AZC_HAS_SENDMSG_ZC_FIXED,
    "plain_requests": lib.AZC_HAS_REQUESTS,
}
NEEDED = ("io_uring", "plain_requests", "recv_multishot", "accept_multishot", "buf_ring")
_CAP_IPC_LOCK = 14

_WHY = {
    errno.EPERM: "io_uring is forbidden here: seccomp (the default profile of Docker, containerd and "
    "Kubernetes) or the sysctl kernel.io_uring_disabled",
    errno.ENOSYS: "this kernel has no io_uring, or a seccomp filter hides it",
    errno.ENOMEM: "no memory for a ring: raise RLIMIT_MEMLOCK (ulimit -l)",
    errno.EMFILE: "no descriptor is left for a ring: raise RLIMIT_NOFILE (ulimit -n)",
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a loop made now would use.

    backend: "uring" or "epoll". zerocopy: whether its sends can go zero-copy (on epoll by
    MSG_ZEROCOPY). reason: why this backend, and why not zero-copy, in a sentence. features: found by
    trying. liburing: built with, and running with ("unknown" before 2.4), or "linked in" as in wheels.
    """

    backend: str
    zerocopy: bool
    reason: str
    kernel: str
    features: dict[str, bool]
    liburing: str


def no_ring(error: int) -> str:
    """Why there is no ring, by the errno of making one, and what to do."""
    return _WHY.get(error, f"io_uring_setup: {os.strerror(error)}")


def uring_demanded(given: str | None) -> bool:
    """Whether epoll would be against the caller's, or the environment's, word."""
    return _choice("AIOZC_BACKEND", given, ("uring", "epoll")) == "uring"


def _sends_without_ring(features: dict[str, bool], off: bool) -> tuple[bool, str]:
    """Whether sends on epoll can go zero-copy, and how they go."""
    if off:
        return False, "zero-copy is switched off: sends are copied"
    if not features["msg_zerocopy"]:
        if _no_msg_zerocopy() == errno.ENOBUFS:
            return (
                False,
                "no room for MSG_ZEROCOPY (net.core.optmem_max, ulimit -l): sends are copied",
            )
        return False, "this kernel has no MSG_ZEROCOPY either: sends are copied"
    return True, "zero-copy sends go by MSG_ZEROCOPY"


def fallen_back(can: Capabilities, why: str) -> Capabilities:
    """What is left of `can` when its loop got no ring."""
    zerocopy, how = _sends_without_ring(can.features, not can.zerocopy)
    return dataclasses.replace(can, backend="epoll", zerocopy=zerocopy, reason=f"{why}; {how}")


@functools.cache
def _probe() -> tuple[int, dict[str, bool]]:
    found = ffi.new("uint32_t *")
    error = -int(lib.azc_probe(found))
    features = {name: bool(found[0] & bit) for name, bit in _FEATURES.items()}
    return error, {**features, "msg_zerocopy": _no_msg_zerocopy() == 0}


@functools.cache
def _no_msg_zerocopy() -> int:
    """The errno of sending by MSG_ZEROCOPY, or 0."""
    return -int(lib.azc_probe_msg_zerocopy())


def _liburing() -> str:
    built = ffi.string(lib.azc_liburing_built()).decode()
    running = int(lib.azc_liburing_runtime())
    if running < 0:
        return f"built {built}, linked in"
    return f"built {built}, running {f'{running >> 8}.{running & 255}' if running else 'unknown'}"


def _choice(name: str, given: str | None, allowed: tuple[str, ...]) -> str | None:
    if given is not None:
        return given
    value = os.environ.get(name) or None
    if value is not None and value not in allowed:
        raise ValueError(f"environment {name} must be one of {', '.join(allowed)}, not {value!r}")
    return value


def choose(backend: str | None = None, zerocopy: str | None = None) -> Capabilities:
    """Decide by argument, environment, probe, in this order.

    RuntimeError: "uring" was asked for and cannot be had. ValueError: a bad environment variable.
    """
    error, features = _probe()
    forced = _choice("AIOZC_BACKEND", backend, ("uring", "epoll"))
    off = _choice("AIOZC_ZEROCOPY", zerocopy, ("auto", "off")) == "off"
    missing = [name for name in NEEDED if not features[name]]
    if error:
        why = no_ring(error)
    elif missing:
        why = f"this kernel's io_uring lacks {', '.join(missing)} (Linux 6.0 has all)"
    else:
        why = ""
    if forced == "uring" and why:
        raise RuntimeError(f"backend 'uring' cannot be used: {why}; or use backend 'epoll'")
    name = forced or ("epoll" if why else "uring")
    can = features["send_zc"] and features["sendmsg_zc"]
    may = can and not off
    if name == "epoll":
        may, how = _sends_without_ring(features, off)
        reason = f"{why or 'epoll was asked for'}; {how}"
    elif off:
        reason = "io_uring works; zero-copy is switched off"
    elif not can:
        reason = "io_uring works; this kernel has no SENDMSG_ZC (Linux 6.1), so sends are copied"
    else:
        reason = "io_uring works, with zero-copy sends"
    return Capabilities(
        backend=name,
        zerocopy=may,
        reason=reason,
        kernel=platform.release(),
        features=dict(features),
        liburing=_liburing(),
    )


def capabilities() -> Capabilities:
    """What this machine can do, and why not more. The kernel is asked once a process."""
    return choose()


def may_lock_anything() -> bool:
    """Whether the kernel does not charge this process: CAP_IPC_LOCK, in the first user namespace.

    io_uring_setup asks capable(), which looks no further: root of a rootless container is charged.
    """
    try:
        with open("/proc/self/uid_map") as uids:
            if uids.read().split() != ["0", "0", str(2**32 - 1)]:
                return False
    except OSError:
        pass  # a kernel without user namespaces
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("CapEff:"):
                    return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    except OSError:
        pass  # no /proc: believe the limit alone
    return False


def default_caps() -> tuple[int, int]:
    """Bytes that one transport and one loop may have pinned, where nobody said.

    The kernel charges unregistered zero-copy sends to the user's RLIMIT_MEMLOCK, unless CAP_IPC_LOCK
    was held when the ring was made. Half of it is left to other loops and processes of this user.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    whole = 1 << 30
    if soft != resource.RLIM_INFINITY and not may_lock_anything():
        whole = min(whole, soft // 2)
    return min(64 << 20, max(whole // 4, min(whole, 1 << 20))), whole
