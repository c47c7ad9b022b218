"""`python -m aiozc bench` as a user runs it, tiny: what it prints, what it refuses, and its checks checked.

A benchmark that counts bytes which never arrived, or arrived wrong, is worth less than none, so these tests
lose some and spoil some. Each run has a lock of its own (TMPDIR), so that no real benchmark delays it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import aiozc
from aiozc.cli import main
from aiozc.cli.bench import cases
from aiozc.cli.bench.crossover import crossover
from aiozc.cli.bench.errors import RowFailed, WrongData
from aiozc.cli.bench.path import Endpoint
from aiozc.cli.bench.receiver import Receiver
from aiozc.cli.bench.run import median

LIMIT = 90.0
SHORT = ["--rounds", "1", "--seconds", "0.02"]
FIELDS = {
    "protocol": str,
    "family": int,
    "size": int,
    "parts": int,
    "mode": str,
    "sends_per_s": float,
    "gb_per_s": float,
    "cpu_s_per_gb": float,
    "user_us_per_send": float,
    "segments": (int, type(None)),
    "parts_per_request": (float, type(None)),
    "notifications": (int, type(None)),
    "peak_pinned": (int, type(None)),
}
ALL_MODES = (*cases.MODES, cases.REFERENCE, cases.CEILING)
zero_copy = pytest.mark.skipif(
    not aiozc.capabilities().zerocopy, reason=f"no zero-copy here: {aiozc.capabilities().reason}"
)
from_checkout = pytest.mark.skipif(
    not (Path(aiozc.__file__).resolve().parents[1] / "bench" / "sink" / "sink.py").is_file(),
    reason="the package under test is not imported from its checkout",
)
TOOLS = ("ip", "tc", "nft", "clang")
as_root = pytest.mark.skipif(
    os.geteuid() != 0
    or any(
        shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None for tool in TOOLS
    ),
    reason=f"the sink needs root and {', '.join(TOOLS)}",
)


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of this process
    monkeypatch.setenv("PATH", os.environ["PATH"])  # a benchmark adds to it: put it back
    monkeypatch.delenv("COLUMNS", raising=False)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=LIMIT)


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "aiozc", "bench", *args)


def in_bench(setup: str, *args: str) -> subprocess.CompletedProcess[str]:
    """The benchmark in a process where `setup` was executed first; its children know nothing of it."""
    code = f"import sys; {setup}; from aiozc.cli import main; sys.exit(main({['bench', *args]!r}))"
    return run("-c", code)


def told(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["rows"] and document["failed"] == []
    for row in document["rows"]:
        for name, kind in FIELDS.items():
            assert isinstance(row[name], kind), (name, row[name])
        assert row["mode"] in ALL_MODES
        assert row["sends_per_s"] > 0 and row["cpu_s_per_gb"] > 0
        assert row["gb_per_s"] == pytest.approx(row["sends_per_s"] * row["size"] / 1e9)
    return document


def modes(document: dict[str, Any], protocol: str, size: int) -> set[str]:
    return {
        row["mode"]
        for row in document["rows"]
        if (row["protocol"], row["size"]) == (protocol, size)
    }


# ---- the subcommands ----------------------------------------------------------------------------


def test_send_measures_every_way_and_says_what_it_leaves_out() -> None:
    args = ["--sizes", "1200", "65536", "--parts", "4", "--family", "4"]
    document = told(bench("send", *args, "--json", *SHORT))
    left_out = {(row["protocol"], row["size"], row["mode"]): row for row in document["left_out"]}
    expected = {"copy", "gather-copy", "msg-zerocopy", "zc", "zc-epoll", "zc-registered"}
    for protocol, size in (("tcp", 1200), ("tcp", 65536), ("udp", 1200), ("udp", 65536)):
        absent = {key[2] for key in left_out if key[:2] == (protocol, size)}
        wanted = expected | ({"sendfile"} if (protocol, size) == ("tcp", 65536) else set())
        assert modes(document, protocol, size) == wanted - absent
    assert modes(document, "tcp", 1200) >= {"copy", "gather-copy", "msg-zerocopy"}
    assert modes(document, "udp", 1200) >= {"copy", "gather-copy", "msg-zerocopy"}
    assert modes(document, "udp", 65536) == set()  # larger than a datagram
    assert all(row["reason"] for row in document["left_out"])
    assert "proves no speed" in document["path_note"]
    for row in document["rows"]:
        engine = {"zc": "aiozc uring", "zc-registered": "aiozc uring", "zc-epoll": "aiozc epoll"}
        assert row["engine"] == engine.get(row["mode"], "bare sockets")
        if row["mode"] == "gather-copy":
            assert row["parts_per_request"] == 4
        if row["mode"] in ("msg-zerocopy", "zc"):
            assert row["notifications"] > 0
            assert row["peak_pinned"] >= row["size"] * row["parts"]
        if row["protocol"] == "tcp":
            assert row["segments"] > 0


@zero_copy
def test_send_goes_zero_copy_by_the_public_api() -> None:
    args = ["--protocol", "tcp", "--family", "4", "--modes", "zc", "--sizes", "4000"]
    document = told(bench("send", *args, "--parts", "8", "--window", "64000", "--json", *SHORT))
    (row,) = document["rows"]
    assert row["engine"] == "aiozc uring" and row["note"] == ""
    assert row["kernel_path"] == "copied"  # loopback: nothing else would be the truth
    assert row["outstanding"] == 64000 // 32000 + 1
    assert row["peak_pinned"] <= 64000 + 32000


def test_the_table_says_which_rows_are_not_aiozcs_and_that_loopback_proves_nothing() -> None:
    args = ["--protocol", "tcp", "--family", "4", "--modes", "copy", "--sizes", "1200"]
    result = bench("send", *args, "--parts", "1", *SHORT)
    assert result.returncode == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "It proves no speed" in text
    assert "Rows by `bare sockets` are blocking system calls of this benchmark" in text
    assert "aiozc bench send, path loopback" in text
    assert not re.search(r"faster|speed-?up", text)


@zero_copy
def test_crossover_names_the_setting_and_not_from_loopback() -> None:
    args = ["crossover", "--sizes", "4096", "65536", *SHORT]
    document = told(bench(*args, "--json"))
    assert {(row["size"], row["mode"]) for row in document["rows"]} == {
        (size, mode) for size in (4096, 65536) for mode in ("gather-copy", "zc")
    }
    assert document["zc_threshold"] == document["crossover"] == crossover(document["rows"])
    assert {row["engine"] for row in document["rows"]} == {"aiozc uring"}
    assert all(row["parts_per_request"] == 1 for row in document["rows"])
    result = bench("crossover", "--sizes", "4096", *SHORT)
    assert result.returncode == 0, result.stderr
    assert "Set nothing by that" in result.stdout
    assert "zc_threshold" not in result.stdout


@zero_copy
def test_fanout_sends_one_buffer_to_all_by_both_ways() -> None:
    document = told(bench("fanout", "--connections", "5", "--size", "5000", "--json", *SHORT))
    assert {row["mode"] for row in document["rows"]} >= {"copy", "zc"}
    for row in document["rows"]:
        assert (row["connections"], row["size"]) == (5, 5000)
        assert (row["notifications"] > 0) == row["mode"].startswith("zc")


def test_without_io_uring_the_rows_that_need_it_are_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIOZC_BACKEND", "epoll")
    document = told(bench("fanout", "--connections", "2", "--size", "5000", "--json", *SHORT))
    assert [(row["mode"], row["engine"]) for row in document["rows"]] == [("copy", "aiozc epoll")]
    assert document["left_out"]
    assert all("no zero-copy by io_uring here: " in row["reason"] for row in document["left_out"])
    result = bench("crossover", *SHORT)
    assert result.returncode == 1
    assert result.stderr.startswith("error: no zero-copy by io_uring here: ")


def test_a_plot_is_a_picture_and_one_that_cannot_be_written_costs_no_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    args = ["echo", "--loops", "asyncio", "--connections", "1", "--json", *SHORT]
    file = tmp_path / "echo.png"
    told(bench(*args, "--plot", str(file)))
    assert file.read_bytes().startswith(b"\x89PNG")
    result = bench(*args, "--plot", str(tmp_path / "absent" / "echo.png"))
    assert result.returncode == 1
    assert "error: --plot" in result.stderr and "No such file" in result.stderr
    assert json.loads(result.stdout)["rows"]


def test_echo_measures_our_loop_beside_asyncio() -> None:
    args = ["--loops", "aiozc-uring", "aiozc-epoll", "asyncio", "--connections", "3"]
    document = told(bench("echo", *args, "--size", "3000", "--json", *SHORT))
    wanted = {"aiozc-epoll", "asyncio"}
    if aiozc.capabilities().backend == "uring":
        wanted.add("aiozc-uring")
    assert {row["loop"] for row in document["rows"]} == wanted
    assert all(row["cpu_us_per_request"] > 0 for row in document["rows"])


def test_ipv6_is_measured_too() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
    args = ["--sizes", "1200", "--parts", "2", "--family", "6", "--modes", "msg-zerocopy"]
    document = told(bench("send", *args, "--json", *SHORT))
    assert {row["protocol"] for row in document["rows"]} == {"tcp", "udp"}
    assert all(row["family"] == 6 and row["notifications"] > 0 for row in document["rows"])


# ---- what counts --------------------------------------------------------------------------------

SPOILED = (
    "from aiozc.cli.bench import cases; right = cases.pattern; "
    "cases.pattern = lambda *a: right(*a)[:500] + bytes([right(*a)[500] ^ 1]) + right(*a)[501:]"
)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_one_wrong_byte_fails_the_run(protocol: str) -> None:
    args = ["send", "--protocol", protocol, "--family", "4", "--modes", "copy", "--sizes", "1000"]
    result = in_bench(SPOILED, *args, "--parts", "1", "--json", *SHORT)
    assert result.returncode == 1
    assert "error: wrong data: wrong bytes between" in result.stderr
    assert result.stdout == ""


@zero_copy
def test_one_wrong_byte_fails_a_fan_out() -> None:
    result = in_bench(SPOILED, "fanout", "--connections", "3", "--size", "1000", *SHORT)
    assert result.returncode == 1
    assert "error: wrong data: wrong bytes between" in result.stderr


def test_the_receiver_finds_a_wrong_byte_whole_messages_in_wrong_order_and_a_short_datagram() -> (
    None
):
    pattern = cases.pattern(1000, 1)
    first, second = pattern[:1000], pattern[1000:2000]
    for sent, fault in (
        ([first, second, pattern[2000:]], ""),
        ([second, first], "wrong bytes between"),
        ([first[:-1] + b"!"], "wrong bytes between"),
    ):
        receiver = Receiver("tcp", 4, 1000, pattern, -1)
        receiver.start()
        with socket.create_connection((receiver.address, receiver.port)) as sock:
            for piece in sent:
                sock.sendall(piece)
        receiver.finish(sum(map(len, sent)))
        assert receiver.received == sum(map(len, sent))
        assert receiver.fault.startswith(fault) and bool(receiver.fault) == bool(fault)
    receiver = Receiver("udp", 4, 1000, pattern, -1)
    receiver.start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(first[:500], (receiver.address, receiver.port))
        receiver.finish(500)
    assert receiver.fault == "a datagram of 500 bytes arrived, not 1000"


def test_a_row_counts_only_if_everything_arrived() -> None:
    quiet = Endpoint("192.0.2.2", 9100)
    quiet.check(1000, 1000)
    with pytest.raises(RowFailed, match="only 999 of 1000 bytes arrived"):
        quiet.check(1000, 999)
    receiver = Receiver("tcp", 4, 1000, b"", -1)
    receiver.start()
    with socket.create_connection((receiver.address, receiver.port)) as sock:
        sock.sendall(bytes(1000))
    with pytest.raises(WrongData, match="1000 bytes arrived, 500 were sent"):
        Endpoint("", 0, receiver=receiver).check(500, -1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
def test_a_row_that_may_lock_too_little_memory_names_the_limit() -> None:
    """In a process that gives its rights up after its imports: others may not be able to read these files."""
    code = (
        "import json, os, resource, sys; from aiozc.cli.bench import sender;"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096));"
        "os.setgid(65534); os.setuid(65534); sender.main()"
    )
    job = {"engine": "bare", "protocol": "tcp", "family": 4, "size": 65536, "parts": 8}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        job |= {"mode": "msg-zerocopy", "address": "127.0.0.1", "port": listener.getsockname()[1]}
        result = run("-c", code, json.dumps({**job, "seconds": 0.02}))
    assert "raise RLIMIT_MEMLOCK" in json.loads(result.stdout)["failed"], result.stderr


def test_a_failed_row_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    fake = tmp_path / "send-zerocopy"
    fake.write_text("#!/bin/sh\necho 'no memory today' >&2\nexit 3\n")
    fake.chmod(0o755)
    args = ["--protocol", "tcp", "--family", "4", "--modes", "copy", "--sizes", "1200"]
    result = bench("send", *args, "--parts", "1", "--reference", str(fake), "--json", *SHORT)
    assert result.returncode == 1
    assert "failed: tcp/4 1 x 1200 reference: no memory today" in result.stderr
    document = json.loads(result.stdout)
    assert [row["mode"] for row in document["rows"]] == ["copy"]


def test_the_reference_runs_in_the_same_rounds_and_its_line_is_read(tmp_path: Path) -> None:
    fake = tmp_path / "send-zerocopy"
    log = tmp_path / "log"
    fake.write_text(
        f"#!/bin/sh\necho \"$@\" >> {log}\necho 'packets=5000 (MB=5), rps=2500 (MB/s=2)'\n"
    )
    fake.chmod(0o755)
    args = ["--protocol", "udp", "--family", "4", "--modes", "copy", "--sizes", "1200"]
    result = bench("send", *args, "--parts", "8", "--reference", str(fake), "--json", *SHORT)
    document = told(result)
    row = document["rows"][-1]
    assert (row["mode"], row["sends_per_s"], row["parts"]) == ("reference", 2500, 8)
    assert "not verified" in row["note"]
    said = log.read_text().split()
    assert said[-1] == "udp" and "-4" in said and said[said.index("-n") + 1] == "8"


def test_medians_are_taken_of_numbers_and_counts_stay_whole() -> None:
    rows = [
        {"a": 1.0, "b": 7, "c": "x"},
        {"a": 9.0, "b": 1, "c": "y"},
        {"a": 2.0, "b": 3, "c": "z"},
    ]
    assert median(rows) == {"a": 2.0, "b": 3, "c": "z"}


def test_the_crossover_is_the_size_from_which_zero_copy_stays_cheaper() -> None:
    def rows(**costs: tuple[float, float]) -> list[dict[str, Any]]:
        return [
            {"size": int(size[1:]), "mode": mode, "cpu_s_per_gb": cost}
            for size, pair in costs.items()
            for mode, cost in zip(("gather-copy", "zc"), pair, strict=True)
        ]

    assert crossover(rows(s4096=(1, 2), s8192=(1, 0.9), s16384=(1, 0.5))) == 8192
    assert crossover(rows(s4096=(1, 0.5), s8192=(1, 1.1), s16384=(1, 0.5))) == 16384
    assert crossover(rows(s4096=(1, 0.5), s8192=(1, 0.5))) == 4096
    assert crossover(rows(s4096=(1, 0.5), s8192=(1, 1))) is None  # a draw does not pay


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["send", "--sizes", "0"], "0 is not between 1 and"),
        (["send", "--sizes", "many"], "invalid number value: 'many'"),
        (["send", "--parts", "2000"], "2000 is not between 1 and 1024"),
        (["send", "--modes", "teleport"], "invalid choice: 'teleport'"),
        (["send", "--family", "5"], "invalid choice: 5"),
        (["send", "--protocol", "sctp"], "invalid choice: 'sctp'"),
        (["send", "--seconds", "0"], "0 is not between 0.01 and 60"),
        (["send", "--rounds", "1000"], "1000 is not between 1 and 100"),
        (["crossover", "--sizes", "100"], "100 is not between 4096 and"),
        (["fanout", "--connections", "0"], "0 is not between 1 and 1000"),
        (["echo", "--loops", "trio"], "invalid choice: 'trio'"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    args: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *args])
    assert caught.value.code == 2
    # Python 3.14 quotes what is no string, too.
    assert complaint.replace("'", "") in capsys.readouterr().err.replace("'", "")


def refused(capsys: pytest.CaptureFixture[str], code: int, *args: str) -> str:
    """What a benchmark in this process says that ends with this exit code and measures nothing."""
    assert main(["bench", *args]) == code
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


@pytest.mark.parametrize("command", ["send", "crossover", "fanout", "echo"])
def test_without_rich_the_benchmark_names_the_remedy(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    said = refused(capsys, 2, command)
    assert said == "error: the benchmarks need rich: pip install 'aiozc[bench]'\n"


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = refused(capsys, 2, "send", "--plot", "x.png")
    assert said == "error: --plot needs matplotlib: pip install 'aiozc[bench]'\n"


def test_a_ceiling_that_nobody_verifies_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--ceiling needs --path sink" in refused(capsys, 1, "send", "--ceiling")


def test_a_reference_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, 1, "send", "--reference", "/nonexistent/send-zerocopy")
    assert "error: --reference /nonexistent/send-zerocopy: no such program" in said


@from_checkout
def test_the_sink_says_that_it_needs_root(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    said = refused(capsys, 1, "send", "--path", "sink")
    assert "error: the path `sink` needs: root: run it with sudo, or as root" in said


@from_checkout
def test_the_sink_names_every_program_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda *_args, **_more: None)
    said = refused(capsys, 1, "fanout", "--path", "sink")
    for tool, package in (("ip", "iproute2"), ("nft", "nftables"), ("clang", "clang")):
        assert f"the program {tool}: apt-get install {package}" in said
    assert "root:" not in said


def test_without_a_checkout_the_sink_says_to_use_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aiozc, "__file__", str(tmp_path / "aiozc" / "__init__.py"))
    assert "run it from a checkout" in refused(capsys, 1, "send", "--path", "sink")


def test_two_benchmarks_never_run_at_once(tmp_path: Path) -> None:
    lock = tmp_path / "aiozc-bench.lock"
    args = ["--loops", "asyncio", "--connections", "1", "--json", *SHORT]
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with subprocess.Popen(
            [sys.executable, "-m", "aiozc", "bench", "echo", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as waiting:
            assert waiting.stderr is not None
            if not select.select([waiting.stderr], [], [], LIMIT / 3)[0]:
                waiting.kill()
            assert waiting.stderr.readline() == f"waiting for another benchmark ({lock})\n"
            time.sleep(0.3)
            assert waiting.poll() is None
            fcntl.flock(held, fcntl.LOCK_UN)
            output, _ = waiting.communicate(timeout=LIMIT)
            assert json.loads(output)["rows"]
            assert waiting.returncode == 0


# ---- the sink -----------------------------------------------------------------------------------


def namespaces(pid: int) -> list[str]:
    directory = Path("/run/netns")
    wanted = (f"aiozcA{pid}", f"aiozcB{pid}")
    return [name for name in wanted if (directory / name).exists()]


@as_root
@from_checkout
def test_the_sink_does_not_copy_and_leaves_nothing_behind() -> None:
    before = set(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else set()
    args = ["--sizes", "8000", "--parts", "4", "--modes", "copy", "msg-zerocopy", "zc"]
    document = told(bench("send", "--path", "sink", *args, "--ceiling", "--json", *SHORT))
    rows = {(row["protocol"], row["family"], row["mode"]): row for row in document["rows"]}
    assert all(rows["tcp", family, "c-gather"]["parts_per_request"] == 32 * 4 for family in (4, 6))
    assert ("udp", 4, "c-gather") not in rows
    for protocol in ("tcp", "udp"):
        for family in (4, 6):
            assert rows[protocol, family, "copy"]["kernel_path"] == "copied"
            assert rows[protocol, family, "msg-zerocopy"]["kernel_path"] == "zero-copy"
    if aiozc.capabilities().zerocopy:
        assert rows["tcp", 4, "zc"]["kernel_path"] == "zero-copy"
        assert rows["tcp", 6, "zc"]["kernel_path"] == "zero-copy"
    assert "path without a copy" in document["path_note"]
    left = {name for name in os.listdir("/run/netns") if name.startswith("aiozc")} - before
    # Another run on this machine may have namespaces of its own: those of a living process.
    assert [name for name in left if not Path(f"/proc/{name[6:]}").exists()] == []


@as_root
@from_checkout
def test_a_terminated_run_removes_its_namespaces() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "aiozc", "bench", "fanout", "--path", "sink", "--seconds", "30"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as running:
        try:
            end = time.monotonic() + LIMIT
            while len(namespaces(running.pid)) < 2:
                assert time.monotonic() < end and running.poll() is None
                time.sleep(0.02)
            time.sleep(0.5)  # in the midst of set-up, or of sending
            running.send_signal(signal.SIGTERM)
            assert running.wait(LIMIT) == 128 + signal.SIGTERM
        finally:
            running.kill()
    assert namespaces(running.pid) == []


@as_root
@from_checkout
def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    sink = Path(aiozc.__file__).resolve().parents[1] / "bench" / "sink" / "sink.py"
    try:
        made = run(str(sink), "up", str(dead.pid))
        assert made.returncode == 0, made.stderr
        assert json.loads(made.stdout)["namespace"] in namespaces(dead.pid)
        assert len(namespaces(dead.pid)) == 2
        args = ["--path", "sink", "--connections", "1", "--size", "5000", "--modes", "copy"]
        told(bench("fanout", *args, "--json", *SHORT))
        assert namespaces(dead.pid) == []
    finally:
        run(str(sink), "down", str(dead.pid))
