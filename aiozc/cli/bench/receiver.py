"""The receiving end on loopback: a thread that takes everything and compares every byte.

Made by path.py, one for each row and round. The sender is another process, so what this costs is not
in its figures, though on loopback it is in its speed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import socket
import struct
import threading
import time

CHUNK = 1 << 18
SO_RCVBUFFORCE = 33
PATIENCE = 5.0


class Receiver(threading.Thread):
    """size: bytes of a datagram. pattern: what the stream repeats; empty: count, do not compare."""

    def __init__(
        self, protocol: str, family: int, size: int, pattern: bytes, cpu: int, connections: int = 1
    ) -> None:
        super().__init__(daemon=True)
        self._tcp = protocol == "tcp"
        self._size = size
        self._length = len(pattern)
        # Long enough to compare a whole chunk wherever it starts.
        self._pattern = pattern * (CHUNK // len(pattern) + 2) if pattern else b""
        self._cpu = cpu
        self._left = connections
        self.received = 0
        self.fault = ""
        self._finish = threading.Event()
        self._sock = socket.socket(
            socket.AF_INET if family == 4 else socket.AF_INET6,
            socket.SOCK_STREAM if self._tcp else socket.SOCK_DGRAM,
        )
        self.counter = -1
        if not self._tcp:
            self.counter = os.memfd_create("aiozc-bench")
            os.ftruncate(self.counter, 8)
            self._count = mmap.mmap(self.counter, 8)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            with contextlib.suppress(
                PermissionError
            ):  # without the right to: the default is enough
                self._sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 4 << 20)
        self._sock.bind(("127.0.0.1" if family == 4 else "::1", 0))
        if self._tcp:
            self._sock.listen(256)
        self.address, self.port = self._sock.getsockname()[:2]

    def finish(self, expected: int) -> None:
        """The sender has ended: wait for what it sent, at most PATIENCE seconds."""
        end = time.monotonic() + PATIENCE
        while self.is_alive() and self.received < expected and time.monotonic() < end:
            time.sleep(0.001)
        if self._tcp and self.received >= expected:
            self.join(PATIENCE)  # surplus would come before the end of the stream
        self.stop()

    def stop(self) -> None:
        self._finish.set()
        self.join(PATIENCE)
        self._sock.close()
        if self.counter >= 0:
            os.close(self.counter)
            self.counter = -1

    def run(self) -> None:
        if self._cpu >= 0:
            os.sched_setaffinity(0, {self._cpu})  # of this thread only
        try:
            if self._tcp:
                self._take_streams()
            else:
                self._take_datagrams()
        except OSError as error:
            self.fault = self.fault or f"the receiver failed: {error}"

    def _take_streams(self) -> None:
        buffer = bytearray(CHUNK)
        view = memoryview(buffer)
        totals: dict[socket.socket, int] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            while self._left and not self._finish.is_set():
                for key, _ in selector.select(0.1):
                    if key.fileobj is self._sock:
                        peer, _ = self._sock.accept()
                        totals[peer] = 0
                        selector.register(peer, selectors.EVENT_READ)
                        continue
                    peer = key.fileobj  # type: ignore[assignment]
                    count = peer.recv_into(buffer)
                    if not count:
                        selector.unregister(peer)
                        peer.close()
                        self._left -= 1
                        continue
                    self._compare(view[:count], totals[peer])
                    totals[peer] += count
                    self.received += count
        for peer in totals:
            peer.close()

    def _take_datagrams(self) -> None:
        buffer = bytearray(CHUNK)
        view = memoryview(buffer)
        self._sock.settimeout(0.1)
        while not self._finish.is_set():
            try:
                count = self._sock.recv_into(buffer)
            except TimeoutError:
                continue
            if self._pattern and count != self._size:
                self.fault = self.fault or f"a datagram of {count} bytes arrived, not {self._size}"
            self._compare(view[:count], self.received)
            self.received += count
            self._count[:8] = struct.pack("Q", self.received)

    def _compare(self, piece: memoryview, position: int) -> None:
        if not self._pattern or self.fault:
            return
        if not self._pattern.startswith(piece, position % self._length):
            self.fault = f"wrong bytes between {position} and {position + len(piece)}"
