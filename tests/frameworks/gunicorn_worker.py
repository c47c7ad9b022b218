"""gunicorn's worker on an aiozc loop, as docs/compatibility.md shows it: `-k gunicorn_worker.AiozcWorker`."""

from __future__ import annotations

from typing import Any, ClassVar

from uvicorn_worker import UvicornWorker


class AiozcWorker(UvicornWorker):  # type: ignore[misc]
    CONFIG_KWARGS: ClassVar[dict[str, Any]] = {
        **UvicornWorker.CONFIG_KWARGS,
        "loop": "aiozc:new_event_loop",
    }
