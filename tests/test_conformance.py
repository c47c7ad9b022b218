"""The conformance runner, on small suites of our own: what it counts, and that nothing fools it."""

import argparse
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import conformance  # noqa: E402
from conforming import report, slow  # noqa: E402
from conforming.expected import PYTHON, Exception_, load  # noqa: E402
from conforming.run import Orders, Result, run_module  # noqa: E402
from conforming.suites import Suite  # noqa: E402
from conforming.summary import Run  # noqa: E402

BAD = """
    import os, time, unittest

    class Tests(unittest.TestCase):
        def test_1_passes(self): pass
        def test_2_fails(self): self.assertEqual(1, 2)
        def test_3_hangs(self): time.sleep(60)
        def test_4_crashes(self): os._exit(7)
        def test_5_skips(self): self.skipTest("no reason")
        def test_6_subtest_fails(self):
            with self.subTest(part=1): self.fail("first")
            with self.subTest(part=2): pass
        def test_7_starts_what_outlives_it(self):
            if not os.fork(): time.sleep(60)
        def test_8_passes(self): pass
"""

LOOPS = """
    import asyncio, selectors, unittest

    class Tests(unittest.TestCase):
        def test_by_class(self):
            loop = asyncio.SelectorEventLoop(selectors.EpollSelector())
            self.assertTrue(type(loop).__mro__[1].__module__.startswith("aiozc."))
            loop.close()
        def test_by_policy(self):
            asyncio.set_event_loop_policy(None)
            loop = asyncio.new_event_loop()
            self.assertIsInstance(loop, asyncio.SelectorEventLoop)
            self.assertEqual(loop.zc_stats().backend, "BACKEND")
            loop.close()
        def test_without(self): pass
"""


SLOW = """
    import os, time, unittest

    STOCK = os.environ["CONFORMANCE_LOOP"] == "stock"

    class Tests(unittest.TestCase):
        def test_takes_longer_on_ours(self): time.sleep(0.1 if STOCK else 0.3)
        def test_takes_as_long(self): time.sleep(0.2)
        def test_is_short(self): time.sleep(0.0 if STOCK else 0.04)
"""


def suite_of(folder: Path, text: str) -> Suite:
    (folder / "test_it.py").write_text(textwrap.dedent(text))
    return Suite("ours", "", ["test_it"], (folder,))


def outcomes(results: list[Result]) -> dict[str, str]:
    return {result.id.removeprefix("test_it.Tests.test_"): result.outcome for result in results}


def test_what_hangs_or_kills_the_interpreter_is_one_failure_and_the_rest_still_runs(
    tmp_path: Path,
) -> None:
    orders = Orders(suite_of(tmp_path, BAD), "stock", 30.0, limits=[("*.test_3_hangs", 1.0)])
    results = run_module(orders, "test_it", tmp_path / "log")
    assert outcomes(results) == {
        "1_passes": "passed",
        "2_fails": "failed",
        "3_hangs": "failed",
        "4_crashes": "failed",
        "5_skips": "skipped",
        "6_subtest_fails": "failed",
        "7_starts_what_outlives_it": "passed",
        "8_passes": "passed",
    }
    why = {result.id[-8:]: result.message for result in results}
    assert why["_2_fails"] == "AssertionError: 1 != 2"
    assert why["_3_hangs"].startswith("timeout: 1 s")
    assert why["_crashes"].startswith("the process ended: 7")
    assert "test_3_hangs" in (tmp_path / "log").read_text()  # the stack


@pytest.mark.parametrize(
    "text",
    ["import nothing_of_that_name", "def tearDownModule(): 1 / 0\n" + textwrap.dedent(LOOPS)],
)
def test_a_module_that_cannot_be_set_up_or_ended_is_a_failure(tmp_path: Path, text: str) -> None:
    orders = Orders(suite_of(tmp_path, text), "stock", 30.0)
    results = run_module(orders, "test_it", tmp_path / "log")
    assert "failed" in {r.outcome for r in results if ".Tests." not in r.id}


def test_a_process_that_does_not_end_is_a_failure(tmp_path: Path) -> None:
    text = """
        import threading, time, unittest

        class Tests(unittest.TestCase):
            def test_leaves_a_thread(self): threading.Thread(target=time.sleep, args=(60,)).start()
    """
    orders = Orders(suite_of(tmp_path, text), "stock", 1.5)
    results = run_module(orders, "test_it", tmp_path / "log")
    assert outcomes(results) == {"leaves_a_thread": "passed", "test_it.(exit)": "failed"}


def test_every_way_to_make_a_loop_gives_ours_and_is_counted(tmp_path: Path, backend: str) -> None:
    orders = Orders(suite_of(tmp_path, LOOPS.replace("BACKEND", backend)), backend, 30.0)
    results = run_module(orders, "test_it", tmp_path / "log")
    assert set(outcomes(results).values()) == {"passed"}, results
    assert {r.id.rpartition("_")[2]: r.loops for r in results} == {
        "class": 1,
        "policy": 1,
        "without": 0,
    }


def test_only_a_run_in_which_nothing_is_unexpected_is_clean() -> None:
    def run(*results: Result, **kw: object) -> Run:
        return Run("cpython", "3.11", "uring", list(results), 1.0, **kw)  # type: ignore[arg-type]

    passed, skipped = Result("a", "passed"), Result("b", "skipped")
    assert run(passed, skipped).clean
    assert run(passed, Result("c", "failed", reason="known")).clean
    assert not run().clean
    assert not run(skipped).clean
    assert not run(passed, Result("c", "failed")).clean
    assert not run(passed, Result("c", "passed", reason="known")).clean
    assert not run(passed, slow={"a": (1.0, 0.1)}).clean
    assert not run(passed, stale=["x.*"]).clean


def test_over_twice_the_time_on_stock_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow, "TURNS", 1)
    suite = suite_of(tmp_path, SLOW)
    log = tmp_path / "log"
    base, ours = (
        Run("ours", PYTHON, loop, run_module(Orders(suite, loop, 30.0), "test_it", log), 1.0)
        for loop in ("stock", "epoll")
    )
    # In the run, the second was slow once: alone it is not, and that is what counts.
    next(r for r in ours.results if r.id.endswith("as_long")).seconds = 9.0
    slow.look([ours], [base, ours], [suite], argparse.Namespace(timeout=30.0))
    assert list(ours.slow) == ["test_it.Tests.test_takes_longer_on_ours"]
    again = Run("ours", PYTHON, "epoll", ours.results, 1.0)
    another = Run("ours", "3.1", "stock", base.results, 1.0)
    slow.look([again], [another], [suite], argparse.Namespace(timeout=30.0))
    assert not again.slow, "another Python's times say nothing"


def test_times_of_an_earlier_run_on_stock_are_compared_without_running_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Fails when: the file of --against is not read, or what is slow is no reason for status 1.
    suite = suite_of(tmp_path, SLOW)
    results = run_module(Orders(suite, "stock", 30.0), "test_it", tmp_path / "log")
    report.write([Run("ours", PYTHON, "stock", results, 1.0)], tmp_path / "stock.json")
    monkeypatch.setattr(slow, "TURNS", 1)
    monkeypatch.setattr(conformance, "wanted_suites", lambda args: ([suite], []))

    def status(*more: str) -> int:
        out = str(tmp_path / "out.json")
        monkeypatch.setattr(
            sys, "argv", ["conformance.py", "--backend=epoll", "--json", out, *more]
        )
        monkeypatch.setattr(conformance.signal, "signal", lambda *args: None)
        return conformance.main()

    assert status() == 0
    assert status("--against", str(tmp_path / "stock.json")) == 1
    (ours,) = report.read(tmp_path / "out.json")
    assert ours.loop == "epoll" and list(ours.slow) == ["test_it.Tests.test_takes_longer_on_ours"]
    assert "takes_longer_on_ours" in capsys.readouterr().out


def test_the_closing_line_counts_our_runs_only() -> None:
    stock = Run("uvloop", "3.11", "stock", [Result("a", "passed"), Result("b", "failed")], 1.0)
    ours = Run(
        "uvloop",
        "3.11",
        "epoll",
        [Result("a", "passed"), Result("b", "failed", reason="known"), Result("c", "failed")],
        1.0,
    )
    assert report.closing_line([stock]) == "0 passed, 0 failed, 0 skipped"
    assert report.closing_line([stock, ours]) == (
        "1 passed, 1 failed, 0 skipped, 1 failed as expected"
    )


def test_results_survive_being_written(tmp_path: Path) -> None:
    run = Run("cpython", "3.11", "uring", [Result("a", "failed", 0.5, 2, "why")], 1.0)
    report.write([run], tmp_path / "out.json")
    assert report.read(tmp_path / "out.json") == [run]


def test_exceptions_are_narrowed_by_suite_python_and_loop() -> None:
    entry = Exception_("uvloop", ["test_x.*"], "why", python=["3.12"], loop=["uring"])
    assert entry.applies("uvloop", "uring", "3.12") and entry.names("test_x.A.test_b")
    assert not entry.applies("cpython", "uring", "3.12")
    assert not entry.applies("uvloop", "epoll", "3.12")
    assert not entry.applies("uvloop", "uring", "3.11")
    assert not entry.names("test_y.A.test_b")


def test_every_listed_exception_has_a_reason() -> None:
    entries = load()
    assert entries
    assert [entry.tests for entry in entries if len(entry.reason) < 20] == []
