"""What a loop can be told. Read by loop.py and reactor.py; never changed once a loop has it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any


def timeout_ns(seconds: float | None) -> int:
    """For the native side: nanoseconds, 0 for None and infinity. ValueError: not more than 0."""
    if seconds is None or seconds >= 1e9:
        return 0
    if not seconds > 0:
        raise ValueError(
            f"zc_timeout must be more than 0 seconds, not {seconds}; None is no timeout"
        )
    return max(1, int(seconds * 1e9))


_NONE = ("zc_transport_cap", "zc_loop_cap")
_WHOLE = (
    *_NONE,
    "zc_threshold",
    "zc_low_water",
    "zc_eor_bytes",
    "max_request",
    "ring_entries",
    "cq_entries",
)


def _places(entries: int) -> int:
    """As the kernel rounds: to a power of two."""
    return 1 << (entries - 1).bit_length()


def settings_of(given: dict[str, Any]) -> Settings:
    """From the keywords of a loop. TypeError: there is no such setting; says which it may have been."""
    known = [field.name for field in fields(Settings)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise TypeError(f"aiozc has no setting {name!r}; {meant}")
    return Settings(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one loop; each is also a keyword of `new_event_loop`, `run` and `EventLoop`.

    backend: "uring", "epoll", or None: environment AIOZC_BACKEND, else what the probe finds.
    zerocopy: "auto", "off", or None: environment AIOZC_ZEROCOPY, else "auto".
    adaptive: leave zero-copy on a connection whose path copies anyway (loopback, a capture), where it
        only costs; try again now and then. False: every request asks for zero-copy.
    zc_threshold: bytes of operations in one request from which it goes zero-copy. Smaller requests
        go by a gathering copy, with the same contract.
    zc_write: "auto": plain `write()` of data that nobody can change (bytes, read-only views of bytes,
        aiozc.frozen), over 16 KiB and of at least zc_threshold bytes, goes zero-copy by itself where the path
        was seen not to copy, or to find out. "off": only zc_* calls do. "always": whatever the path.
    zc_transport_cap, zc_loop_cap: bytes that one transport, or the loop, may have pinned. Over a
        cap sends go by copying; nobody waits. None: a share of what may be locked (RLIMIT_MEMLOCK).
    zc_low_water: `zc_drain` waits until pinned and unsent bytes together are at most this. It bounds what a
        transport pins, and its rate: about so much a round trip.
    zc_eor_bytes: a connection's consecutive zero-copy requests share one packet buffer of the kernel, which
        makes small ones cheap; the memory of all of them is released together, when the last one's bytes
        are acknowledged. After so many bytes the next request begins a new one. Larger: more pinned than
        unacknowledged. 0 never ends one (MSG_ZEROCOPY: the kernel always does, after 512 KiB), and then
        nothing at all is released while the stream is busy (`pinned_bytes` grows up to the caps, and the
        rest goes by copying): for measurements only. Requests whose report `adaptive` waits for end theirs
        anyway.
    zc_close_timeout: seconds that `loop.close()` waits for the kernel to release memory. What it has
        not released then is kept for the life of the process.
    zc_linger: seconds that a closed connection may keep memory pinned without its peer acknowledging a
        byte. Then it is reset, which frees the memory and destroys what the peer has not read.
    zc_timeout: seconds that a stream may hold unsent or pinned bytes, plain writes included, while the
        kernel accepts none of them and the peer acknowledges none. Then it is reset as by `zc_reset`:
        its operations fail with TimeoutError, and so does the connection. However slowly a peer reads, it
        is spared. What the kernel holds in a copy of its own is TCP_USER_TIMEOUT's. None: never.
    zc_check: compare the memory of each operation, and of `write(aiozc.frozen(...))`, at its release with
        what it was at the call. If somebody wrote to it, the loop's exception handler is told, with the stack
        of the call; the bytes cannot be called back. Costs two check sums a byte. None: in debug mode.
    max_request: bytes that one request gathers at most; bounds what it pins.
    ring_entries, cq_entries: sizes of the submission and completion queues, rounded up to powers of two; the
        second cannot be smaller than the first.
    """

    backend: str | None = None
    zerocopy: str | None = None
    adaptive: bool = True
    zc_threshold: int = 16384
    zc_write: str = "auto"
    zc_transport_cap: int | None = None
    zc_loop_cap: int | None = None
    zc_low_water: int = 1024 * 1024
    zc_eor_bytes: int = 64 * 1024
    zc_close_timeout: float = 1.0
    zc_linger: float = 60.0
    zc_timeout: float | None = None
    zc_check: bool | None = None
    max_request: int = 1024 * 1024
    ring_entries: int = 1024
    cq_entries: int = 8192

    def __post_init__(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            if value is None and name in _NONE:
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"{name} must be an int, not {value!r}")
        for name in ("zc_close_timeout", "zc_linger", "zc_timeout"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) and not (value is None and name == "zc_timeout"):
                raise TypeError(f"{name} is a number of seconds, not {value!r}")
        if self.backend not in (None, "uring", "epoll"):
            raise ValueError(f"backend must be 'uring', 'epoll' or None, not {self.backend!r}")
        if self.zerocopy not in (None, "auto", "off"):
            raise ValueError(f"zerocopy must be 'auto', 'off' or None, not {self.zerocopy!r}")
        if self.zc_write not in ("auto", "off", "always"):
            raise ValueError(f"zc_write must be 'auto', 'off' or 'always', not {self.zc_write!r}")
        if self.zc_check not in (None, True, False):
            raise ValueError(f"zc_check must be True, False or None, not {self.zc_check!r}")
        sizes = ("zc_threshold", "zc_transport_cap", "zc_loop_cap", "zc_low_water", "zc_eor_bytes")
        for name in sizes:
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is a number of bytes and cannot be {value}")
        for name in ("zc_close_timeout", "zc_linger"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is in seconds and cannot be {getattr(self, name)}")
        timeout_ns(self.zc_timeout)
        if not 4096 <= self.max_request <= 1 << 30:
            raise ValueError("max_request must lie between 4 KiB and 1 GiB")
        for name in ("ring_entries", "cq_entries"):
            if not 1 <= getattr(self, name) <= 65536:
                raise ValueError(f"{name} must lie between 1 and 65536")
        needed = min(_places(self.ring_entries), 32768)  # more than that the kernel makes fewer
        if needed > _places(self.cq_entries):
            raise ValueError(
                f"cq_entries={self.cq_entries} is too few for ring_entries={self.ring_entries}: the kernel "
                f"makes no such ring; ask for cq_entries={needed} or more, or for fewer ring_entries"
            )
