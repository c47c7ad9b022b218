"""`python -m aiozc demo` as a user runs it: a small one on each backend, and its checks checked.

A demo that calls wrong data right is worth less than none, so most of these tests spoil something.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_forbidden import ERRNO, FILTER

LIMIT = 90.0
SMALL = ["--messages", "50", "--message-bytes", "65536", "--big-bytes", str(8 << 20)]
ROWS = (
    "backend",
    "kernel release",
    "data, sent twice",
    "order and SHA-256",
    "requests",
    "parts per request",
    "notifications",
    "path (of results)",
    "peak pinned",
    "throughput zero-copy API",
    "throughput write()",
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, "COLUMNS": "100", "TERM": "dumb"},
    )


def demo(backend: str, *args: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "aiozc", "demo", "--backend", backend, *SMALL, *args)


def table(output: str) -> dict[str, str]:
    rows = re.findall(r"^[│|] (.+?) +[│|] (.+?) +[│|]$", output, re.MULTILINE)
    return dict(rows)


def in_demo(setup: str, *args: str) -> subprocess.CompletedProcess[str]:
    """The demo in a process where `setup` was executed first."""
    code = f"import sys; {setup}; from aiozc.cli import main; sys.exit(main({['demo', *args]!r}))"
    return run("-c", code)


def test_a_small_demo_prints_every_row_and_no_speed_up(backend: str) -> None:
    result = demo(backend)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    rows = table(result.stdout)
    assert tuple(rows) == ROWS
    assert rows["backend"] == backend
    assert rows["kernel release"] == os.uname().release
    assert rows["data, sent twice"] == "50 x 64 KiB, 1 x 8 MiB"
    assert rows["order and SHA-256"] == "right"
    assert sum(map(int, re.findall(r": (\d+)", rows["path (of results)"]))) == 51
    text = " ".join(result.stdout.split())
    assert "loopback hands the very pages to a receiver on this machine" in text
    assert not re.search(r"faster|speed-?up|times as", text)


def test_forced_zero_copy_pins_and_is_notified(backend: str) -> None:
    result = demo(backend, "--forced")
    assert result.returncode == 0, result.stderr
    rows = table(result.stdout)
    requests, zero_copy = map(int, re.findall(r"\d+", rows["requests"]))
    assert 0 < zero_copy <= requests
    assert rows["peak pinned"] != "0 B"
    if backend == "uring":
        assert int(rows["notifications"]) >= zero_copy
    else:  # one that met ENOBUFS has none
        assert 0 < int(rows["notifications"]) <= zero_copy
        assert rows["path (of results)"] == "copied: 51"


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
def test_where_io_uring_is_forbidden_the_demo_is_right_by_msg_zerocopy(error: int) -> None:
    # Case 36. Nobody chose a backend here, and the sender, a child, inherits the filter.
    code = f"{FILTER}\nfrom aiozc.cli import main\nsys.exit(main({['demo', *SMALL, '--forced']!r}))"
    result = run("-W", "error", "-c", code, str(ERRNO | error))
    assert (result.returncode, result.stderr) == (0, "")
    rows = table(result.stdout)
    assert (rows["backend"], rows["order and SHA-256"]) == ("epoll", "right")
    requests, zero_copy = map(int, re.findall(r"\d+", rows["requests"]))
    assert 0 < zero_copy <= requests
    assert int(rows["notifications"]) > 0


@pytest.mark.parametrize("args", [(), ("--forced",)], ids=["adaptive", "forced"])
@pytest.mark.parametrize(
    ("corruption", "complaint"),
    [
        ("message", "the messages do not have the sender's SHA-256"),
        ("big", "the large buffer does not have the sender's SHA-256"),
        ("order", "message 25 arrived in the place of message 24"),
    ],
)
def test_one_wrong_byte_or_two_messages_in_wrong_order_fail_the_demo(
    corruption: str, complaint: str, args: tuple[str, ...], backend: str
) -> None:
    result = demo(backend, "--corrupt", corruption, *args)
    assert result.returncode == 1
    assert f"wrong data: zc: {complaint}" in result.stderr
    assert f"wrong data: write: {complaint}" in result.stderr
    assert "right" not in result.stdout


def test_odd_sizes_and_a_single_message_are_right_too(backend: str) -> None:
    args = ["--messages", "1", "--message-bytes", "17", "--big-bytes", "1", "--backend", backend]
    result = run("-m", "aiozc", "demo", *args)
    assert result.returncode == 0, result.stderr
    assert table(result.stdout)["data, sent twice"] == "1 x 17 B, 1 x 1 B"


def test_a_failed_sender_fails_the_demo_and_its_words_are_shown(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'no memory today' >&2\nexit 3\n")
    fake.chmod(0o755)
    result = in_demo(f"sys.executable = {str(fake)!r}", *SMALL)
    assert result.returncode == 1
    assert "no memory today" in result.stderr
    assert "error: the sending process ended early, exit code 3" in result.stderr
    assert result.stdout == ""


def test_a_sender_that_says_nothing_is_given_up_and_killed(tmp_path: Path) -> None:
    fake, pid_file = tmp_path / "python", tmp_path / "pid"
    fake.write_text(f"#!/bin/sh\necho $$ > {pid_file}\nexec sleep 300\n")
    fake.chmod(0o755)
    result = in_demo(f"sys.executable = {str(fake)!r}", *SMALL, "--timeout", "1")
    assert result.returncode == 1
    assert "error: the sending process said nothing in time" in result.stderr
    assert not Path(f"/proc/{pid_file.read_text().strip()}").exists()


def test_without_rich_the_demo_names_the_remedy() -> None:
    result = in_demo("sys.modules['rich'] = None", *SMALL)
    assert result.returncode == 2
    assert result.stderr == "error: the demo's table needs rich: pip install 'aiozc[demo]'\n"


def test_a_size_too_small_for_the_header_is_refused() -> None:
    result = run("-m", "aiozc", "demo", "--message-bytes", "15")
    assert result.returncode == 2
    assert "must be at least 16" in result.stderr


def test_the_whole_demo_takes_less_than_a_gibibyte(backend: str) -> None:
    """Sender and receiver at their default sizes: each one's peak, as its parent is told it."""
    code = (
        "import resource, sys; from aiozc.cli import main;"
        f"code = main(['demo', '--backend', {backend!r}]);"
        "print(*(resource.getrusage(who).ru_maxrss for who in "
        "(resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)));"
        "sys.exit(code)"
    )
    result = run("-c", code)
    assert result.returncode == 0, result.stderr
    receiver, sender = map(int, result.stdout.split()[-2:])
    assert min(receiver, sender) > 256 << 10, "the data alone is more than that"
    assert receiver + sender < 1 << 20, "KiB"
