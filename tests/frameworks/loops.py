"""Loop factories for `--loop loops:NAME`: what a test wants that the environment cannot say."""

from __future__ import annotations

import aiozc


def always() -> aiozc.EventLoop:
    """Plain writes go zero-copy by themselves on loopback too, where the kernel then copies."""
    return aiozc.new_event_loop(zc_write="always", adaptive=False)
