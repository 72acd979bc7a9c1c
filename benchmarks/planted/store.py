"""A storage server in a process of its own: `python store.py SOCKET SECONDS LANES`.

Each request is a path and a newline, and answered with the file's length and bytes after SECONDS, of which it serves
LANES at a time. It ends with whoever started it (end of its standard input).
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path


async def main() -> None:
    """Serve until standard input ends."""
    address, seconds, lanes = sys.argv[1], float(sys.argv[2]), asyncio.Semaphore(int(sys.argv[3]))
    kept: dict[str, bytes] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            path = line.decode().rstrip("\n")
            if path not in kept:
                kept[path] = Path(path).read_bytes()
            async with lanes:
                await asyncio.sleep(seconds)
            writer.write(len(kept[path]).to_bytes(8, "little") + kept[path])
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, address)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


asyncio.run(main())
