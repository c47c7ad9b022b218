"""scripts/pinned.py runs, and writes what a plot needs. What it measures needs a path without copies."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import StalledReader

import aiozc

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "pinned.py"


def test_pinned_writes_samples(tmp_path: Path) -> None:
    if not aiozc.capabilities().zerocopy:
        pytest.skip("nothing is pinned here")
    out = tmp_path / "pinned.json"
    with StalledReader(rcvbuf=None) as peer:

        def discard() -> None:
            for _ in range(2):
                sock = peer.accept()
                try:
                    while sock.recv(1 << 18):
                        pass
                except ConnectionResetError:  # the script ends its connections by zc_reset
                    sock.close()

        thread = threading.Thread(target=discard, daemon=True)
        thread.start()
        arguments = ["--parts", "2", "--eor", "65536", "0", "--seconds", "0.4", "--json", str(out)]
        done = subprocess.run(
            [sys.executable, str(SCRIPT), "127.0.0.1", str(peer.port), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        thread.join(10)
        assert not thread.is_alive()
    bounded, unbounded = json.loads(out.read_text())
    for found in (bounded, unbounded):
        assert found["parts"] == 2
        assert len(found["samples"]) >= 5
        times = [sample[0] for sample in found["samples"]]
        assert times == sorted(times)
        assert found["requests"] >= found["notifications"] > 0
        assert found["pinned_peak"] >= 8000
    assert bounded["stacks"] == pytest.approx(bounded["requests"] / 9, rel=0.1)
    assert unbounded["stacks"] == 0
