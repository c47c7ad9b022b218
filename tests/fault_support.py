"""Which fault knobs the contract, order and fuzz tests run under, and the tests that cannot hold under one.

Read by conftest.py, where the environment's AIOZC_FAULT names knobs, and by scripts/faults.py, which runs the
tests under each. What a knob does is said in _native/faults.h. A test is left out only where what it asserts is
the absence of the very fault: the reason says so. Everything else must pass.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CONTRACT = ("contract", "contract_lifetime", "contract_limits", "order", "fuzz")


@dataclass(frozen=True)
class Knob:
    """`every`: how often; `backends`: where it exists; `tests`: the files that run under it."""

    every: int
    backends: tuple[str, ...] = ("uring",)
    tests: tuple[str, ...] = CONTRACT


BOTH = ("uring", "epoll")
UNDER = {
    "zc_enomem": Knob(3, BOTH),
    "zc_enobufs": Knob(3, BOTH),
    "eagain": Knob(3, BOTH),
    "ecanceled": Knob(3),
    "short_send": Knob(3, BOTH),
    "short_submit": Knob(3),
    "eintr": Knob(5),
    "ebusy": Knob(5),
    "lost_wake": Knob(2, BOTH),
    "late_notif": Knob(2, BOTH),
    "twice_notif": Knob(1, BOTH),
    "cq_overflow": Knob(1),
    # The contract tests receive too little to run out of buffers.
    "recv_enobufs": Knob(1, tests=(*CONTRACT, "transport")),
    "req_nomem": Knob(3, BOTH),
    # Without it nothing is pinned, as on epoll, whose contract tests run anyway; those of uring assert pins.
    "no_send_zc": Knob(1, tests=("order", "transport", "small_rings")),
    "no_sendmsg_zc_fixed": Knob(1),
}

# (knob, test, why it cannot hold); both are regular expressions that match the whole name.
CANNOT_HOLD: list[tuple[str, str, str]] = [
    (
        "zc_enomem|zc_enobufs",
        r"test_(later_operations_advance_to_sent_although_the_first_is_pinned"
        r"|a_zero_copy_write_drives_pause_and_resume_like_write"
        r"|a_transport_s_cap_can_be_set_on_it_alone"
        r"|one_transport_s_cap_leaves_the_others_alone)\[(uring|epoll)\]",
        "it asserts that a certain request pins memory, and every third is refused and copied",
    ),
    (
        "zc_enomem",
        r"test_over_a_cap_a_transport_sends_by_copying\[(uring|epoll)-zc_loop_cap\]",
        "it asserts how much of the loop's cap gets pinned, and ENOMEM lowers that cap",
    ),
    (
        "zc_enobufs",
        r"test_over_a_cap_a_transport_sends_by_copying\[epoll-zc_(transport|loop)_cap\]",
        "it asserts how much of a cap gets pinned; after ENOBUFS all is copied, for no notification comes",
    ),
    (
        "short_send",
        r"test_(over_a_cap_a_transport_sends_by_copying|a_transport_s_cap_can_be_set_on_it_alone)"
        r"\[epoll.*",
        "its peer never reads: after a short send the kernel tells of room only once a third of the "
        "buffer is free, and after a real one it is full",
    ),
    (
        "no_send_zc",
        r"test_(the_stream_keeps_its_order_when_parts_fall_back_in_mid_stream"
        r"|twelve_large_sends_arrive_in_order_while_some_are_refused)\[uring(-[1-9])?\]",
        "it asserts that zero-copy requests fall back, and there are none",
    ),
]


def reason_against(knobs: set[str], test: str) -> str | None:
    for knob, pattern, why in CANNOT_HOLD:
        if re.fullmatch(pattern, test) and any(re.fullmatch(knob, name) for name in knobs):
            return why
    return None
