"""One suite on one loop: its results, counted. Made by conformance.py, read by slow.py and report.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from .run import Result


@dataclass
class Run:
    suite: str
    python: str
    loop: str  # "uring", "epoll" or "stock"
    results: list[Result]
    seconds: float
    stale: list[str] = field(default_factory=list)  # exceptions that name no test
    slow: dict[str, tuple[float, float]] = field(default_factory=dict)  # id: ours, stock's

    def with_outcome(self, outcome: str) -> list[Result]:
        return [result for result in self.results if result.outcome == outcome]

    @property
    def unexpected(self) -> list[Result]:
        return [result for result in self.with_outcome("failed") if not result.reason]

    @property
    def excused(self) -> list[Result]:
        return [result for result in self.with_outcome("failed") if result.reason]

    @property
    def unexpectedly_passed(self) -> list[Result]:
        return [result for result in self.with_outcome("passed") if result.reason]

    @property
    def on_the_loop(self) -> int:
        """Tests that made a loop of ours: the others try asyncio's own parts."""
        return sum(result.loops > 0 for result in self.results)

    @property
    def clean(self) -> bool:
        wrong = self.unexpected or self.unexpectedly_passed or self.slow or self.stale
        return bool(self.with_outcome("passed")) and not wrong
