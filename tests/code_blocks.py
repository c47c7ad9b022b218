"""Runs one Python block of a Markdown file, as its reader would: `python code_blocks.py FILE LINE`.

Called by test_code_blocks.py, one process a block. A block with the line `import aiozc` is a program, and is
run as it is. Any other is a fragment: it runs on a loop, with a connection whose peer reads, and these names:
reader, writer, transport, loop, writers, blob (bytes), array (bytearray), pool, file, sock (a connected one
without transport), datagrams (a datagram transport), address (its peer's).
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import re
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

NOT_INSTALLED = 77  # exit status: the block is about a package that is not here
FENCE = re.compile(r"^(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: (?P<why>[^>]+) -->\s*\Z")


class Block:
    """A fenced block: where it begins, its text, and why it is not run (a comment above it), if it is not."""

    def __init__(self, path: Path, text: str, match: re.Match[str]) -> None:
        self.path = path
        self.line = text.count("\n", 0, match.start()) + 1
        indent = len(match["indent"])
        self.code = "".join(
            line[indent:] or "\n" for line in match["code"].splitlines(keepends=True)
        )
        marked = NOT_RUN.search(text[: match.start()])
        self.not_run = marked["why"] if marked else ""

    @property
    def is_program(self) -> bool:
        return re.search(r"^import aiozc$", self.code, re.M) is not None


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    return [Block(path, text, match) for match in FENCE.finditer(text)]


def discard(peer: socket.socket) -> None:
    with peer, contextlib.suppress(OSError):
        while peer.recv(1 << 20):
            pass


def serve(listener: socket.socket) -> None:
    """Reads what comes, beside the loop: a server on it would be one more thing that a fragment disturbs."""
    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=discard, args=(listener.accept()[0],), daemon=True).start()


async def fragment(code: Any) -> None:
    import aiozc

    loop: Any = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    host, port = listener.getsockname()[:2]
    made = [await aiozc.open_connection(host, port) for _ in range(3)]
    reader, writer = made[0]
    sock = socket.create_connection((host, port))
    sock.setblocking(False)
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.bind(("127.0.0.1", 0))
    datagrams, _ = await loop.create_datagram_endpoint(
        asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0)
    )
    with tempfile.TemporaryFile() as file, aiozc.BufferPool(size=65536, count=16) as pool:
        file.write(bytes(range(256)) * 512)
        file.seek(0)
        names = {
            "asyncio": asyncio,
            "aiozc": aiozc,
            "reader": reader,
            "writer": writer,
            "transport": writer.transport,
            "loop": loop,
            "writers": [w for _, w in made],
            "blob": bytes(range(256)) * 4096,
            "array": bytearray(1 << 20),
            "pool": pool,
            "file": file,
            "sock": sock,
            "datagrams": datagrams,
            "address": receiver.getsockname(),
        }
        result = eval(code, names)  # what a document of this repository shows
        if inspect.iscoroutine(result):
            await result
        for _, w in made:
            w.close()
            with contextlib.suppress(ConnectionError):
                await w.wait_closed()
        datagrams.close()
        for one in (sock, receiver, listener):
            one.close()
        await asyncio.sleep(0)


def main(path: Path, line: int) -> None:
    block = next(block for block in blocks(path) if block.line == line)
    # So that a traceback names the line of the document.
    source = "\n" * block.line + block.code
    if block.is_program:
        code = compile(source, str(path), "exec")
        exec(code, {"__name__": "__main__"})
        return
    import aiozc

    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(source, str(path), "exec", flags=flags)
    aiozc.run(asyncio.wait_for(fragment(code), 30))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("aiozc"):
            raise
        print(f"{error.name} is not installed")
        sys.exit(NOT_INSTALLED)
