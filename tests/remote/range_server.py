"""An HTTP server of a folder's files, by ranges, that can be slow, refuse, lie, break off, and never end.

    range_server.py FOLDER

It prints its port and serves until its standard input closes. `POST /control` takes JSON with names and values of
`Faults`, and turns off all others; `GET /log` gives the requests so far (method, path, query, range, status, port of
the connection, headers that may hold secrets), and the most that were in progress at once. Files go out by sendfile:
two cores pass 2 GB/s in ranges of 8 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import sys
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Faults:
    """How the server misbehaves; everything off at first. Shares are of 1, drawn by chance for each request."""

    latency_s: float = 0.0  # before an answer, not before a refusal
    bytes_per_s: float = 0.0  # of one connection; 0: no limit
    requests_per_s: float = 0.0  # what is above is refused with 503; 0: no limit
    refused: float = 0.0  # share answered with 503
    cut: float = 0.0  # share of bodies that end in the middle, and the connection with them
    stalled: float = 0.0  # share of bodies that stop in the middle, for `stall_s`
    stall_s: float = 3600.0
    status: int = 0  # answers everything: 403, 400, 429, ...
    code: str = ""  # the S3 error code in the body of that answer: ExpiredToken, ...
    etag: str = ""  # is part of every ETag: another one, and all objects have changed
    ignores_ranges: bool = False  # answers 200 with the whole object
    ignores_if_match: bool = False
    endless: str = (
        ""  # bodies go on for ever: "close", without a length; "chunked"; "length", one that is far too large
    )
    flip_at: int = -1  # this byte of each object has one bit flipped,
    flips: int = 0  # in so many answers; another bit in each
    redirects: dict[str, str] = field(default_factory=dict)  # path -> Location


SECRETS = {"authorization", "cookie", "referer", "x-amz-security-token"}


class RangeServer:
    """Answers requests for the files of a folder, as its `faults` say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults = Faults()
        self.log: list[dict[str, object]] = []
        self.active = self.most_active = 0
        self.tokens, self.filled = 0.0, time.monotonic()
        self.random = random.Random(0)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, RuntimeError):  # who asked has gone
            while not writer.is_closing():
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
                method, path, _ = first.split(" ")
                headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.active, self.most_active = self.active + 1, max(self.active + 1, self.most_active)
                try:
                    await self.answer(writer, method, path, headers, body)
                finally:
                    self.active -= 1
        writer.close()

    def is_refused(self) -> bool:
        rate, now = self.faults.requests_per_s, time.monotonic()
        if rate:
            # A bucket of 50 ms: what a short burst may take beyond the rate.
            self.tokens = min(max(1.0, rate / 20), self.tokens + rate * (now - self.filled))
            self.filled = now
            if self.tokens < 1:
                return True
            self.tokens -= 1
        return self.random.random() < self.faults.refused

    async def answer(
        self, to: asyncio.StreamWriter, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> None:
        faults, query, path = self.faults, urlsplit(path).query, unquote(urlsplit(path).path)
        if path == "/control":
            self.faults = Faults(**json.loads(body))
            return self.send(to, 200, b"{}")
        if path == "/log":
            return self.send(to, 200, json.dumps({"requests": self.log, "most": self.most_active}).encode())
        entry: dict[str, object] = {"method": method, "path": path, "query": query, "range": headers.get("range")}
        entry["status"], entry["port"] = 0, to.get_extra_info("peername")[1]
        entry["secrets"] = {name: headers[name] for name in SECRETS & {*headers}}
        self.log.append(entry)
        is_refused = self.is_refused()
        await asyncio.sleep(0.0 if is_refused else faults.latency_s)
        file = self.folder / path.lstrip("/")
        if (location := faults.redirects.get(path)) is not None:
            entry["status"] = 302
            return self.send(to, 302, b"", f"Location: {location}")
        status = 503 if is_refused else faults.status or (200 if file.is_file() else 404)
        entry["status"] = status
        if status != 200:
            if faults.endless and method != "HEAD":
                return await self.send_for_ever(to, status)
            code = faults.code or {503: "SlowDown", 404: "NoSuchKey", 403: "AccessDenied"}.get(status, "Error")
            return self.send(to, status, f"<Error><Code>{code}</Code></Error>".encode(), head=method == "HEAD")
        stat = file.stat()
        etag = f'"{stat.st_mtime_ns:x}-{stat.st_size:x}{faults.etag}"'
        more = [f"ETag: {etag}", f"Last-Modified: {formatdate(stat.st_mtime, usegmt=True)}", "Accept-Ranges: bytes"]
        first, stop = 0, stat.st_size
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", "" if faults.ignores_ranges else headers.get("range", "")):
            first, stop = int(found[1]), min(stop, int(found[2]) + 1 if found[2] else stop)
            status = 206 if first < stop else 416
            more.append(f"Content-Range: bytes {f'{first}-{stop - 1}' if first < stop else '*'}/{stat.st_size}")
        if headers.get("if-match", etag) not in ("*", etag) and not faults.ignores_if_match:
            status = 412
        entry["status"] = status
        if status >= 400:
            return self.send(to, status, b"", *more)
        if faults.endless and method != "HEAD":
            return await self.send_for_ever(to, status, *more)
        self.send(to, status, None, *more, f"Content-Length: {stop - first}")
        if method != "HEAD" and faults.flips and first <= faults.flip_at < stop:
            faults.flips -= 1
            data = bytearray(file.read_bytes()[first:stop])
            data[faults.flip_at - first] ^= 1 << faults.flips % 8
            return to.write(data)
        if method != "HEAD":
            await self.send_file(to, file, first, stop - first)

    def send(self, to: asyncio.StreamWriter, status: int, body: bytes | None, *more: str, head: bool = False) -> None:
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *more]
        lines += [] if body is None else [f"Content-Length: {len(body)}"]
        to.write("\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if head else body or b""))

    async def send_for_ever(self, to: asyncio.StreamWriter, status: int, *more: str) -> None:
        is_chunked, zeros = self.faults.endless == "chunked", bytes(2**16)
        framed = {"close": "Connection: close", "chunked": "Transfer-Encoding: chunked"}
        self.send(to, status, None, *more, framed.get(self.faults.endless, "Content-Length: 9999999999"))
        while not to.is_closing():
            to.write(b"10000\r\n" + zeros + b"\r\n" if is_chunked else zeros)
            await to.drain()

    async def send_file(self, to: asyncio.StreamWriter, path: Path, first: int, count: int) -> None:
        loop, faults = asyncio.get_running_loop(), self.faults
        is_cut, is_stalled = (self.random.random() < share for share in (faults.cut, faults.stalled))
        left = count // 2 if is_cut or is_stalled else count
        with open(path, "rb") as file:
            while left:
                part = min(left, int(faults.bytes_per_s / 50) or 1) if faults.bytes_per_s else left
                await loop.sendfile(to.transport, file, first, part, fallback=False)
                first, left = first + part, left - part
                if faults.bytes_per_s:
                    await asyncio.sleep(part / faults.bytes_per_s)
        if is_stalled:
            await asyncio.sleep(faults.stall_s)
        if is_cut or is_stalled:
            to.close()


async def serve(folder: Path, host: str, port: int) -> None:
    server = await asyncio.start_server(RangeServer(folder).connection, host, port, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    asyncio.get_running_loop().add_reader(sys.stdin, lambda: None if os.read(0, 4096) else os._exit(0))
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    asyncio.run(serve(given.folder, given.host, given.port))
