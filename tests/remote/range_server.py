"""An HTTP server of a folder's files, by ranges, that can be slow, refuse, lie and break off: `range_server.py FOLDER`.

It prints its port and serves until its standard input closes. `POST /control` takes JSON with names and values of
`Faults`, and turns off all others; `GET /log` gives the requests so far: method, path, range, status, and the most
that were in progress at once. Files go out by sendfile: two cores pass 2 GB/s in ranges of 8 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import sys
import time
from dataclasses import dataclass, fields
from email.utils import formatdate
from pathlib import Path
from urllib.parse import unquote, urlsplit

REASONS = {200: "OK", 206: "Partial Content", 400: "Bad Request", 403: "Forbidden", 404: "Not Found",
           412: "Precondition Failed", 416: "Range Not Satisfiable", 503: "Slow Down"}  # fmt: skip


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


class RangeServer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults = Faults()
        self.log: list[dict[str, object]] = []
        self.active = self.most_active = 0
        self.tokens, self.filled = 0.0, time.monotonic()
        self.random = random.Random(0)

    async def connection(self, peer: socket.socket) -> None:
        loop, waiting = asyncio.get_running_loop(), b""
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with peer:
            try:
                while True:
                    while b"\r\n\r\n" not in waiting:
                        if not (more := await loop.sock_recv(peer, 65536)):
                            return
                        waiting += more
                    head, waiting = waiting.split(b"\r\n\r\n", 1)
                    first, *lines = head.decode("latin-1").split("\r\n")
                    method, path, _ = first.split(" ")
                    headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
                    while len(waiting) < int(headers.get("content-length", 0)):
                        waiting += await loop.sock_recv(peer, 65536)
                    body, waiting = (lambda n: (waiting[:n], waiting[n:]))(int(headers.get("content-length", 0)))
                    self.active += 1
                    self.most_active = max(self.active, self.most_active)
                    try:
                        await self.answer(peer, method, unquote(urlsplit(path).path), headers, body)
                    finally:
                        self.active -= 1
            except (OSError, asyncio.SendfileNotAvailableError):  # who asked has gone
                return

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

    async def answer(self, peer: socket.socket, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        faults = self.faults
        if path == "/control":
            self.faults = Faults(**json.loads(body))
            return await self.send(peer, 200, b"{}")
        if path == "/log":
            return await self.send(peer, 200, json.dumps({"requests": self.log, "most": self.most_active}).encode())
        entry = {"method": method, "path": path, "range": headers.get("range"), "status": 0}
        self.log.append(entry)
        is_refused = self.is_refused()
        if faults.latency_s and not is_refused:
            await asyncio.sleep(faults.latency_s)
        file = self.folder / path.lstrip("/")
        status = 503 if is_refused else faults.status or (200 if file.is_file() else 404)
        entry["status"] = status
        if status != 200:
            code = faults.code or {503: "SlowDown", 404: "NoSuchKey", 403: "AccessDenied"}.get(status, "Error")
            return await self.send(peer, status, f"<Error><Code>{code}</Code></Error>".encode(), method=method)
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
            return await self.send(peer, status, b"", more, method)
        await self.send(peer, status, None, [*more, f"Content-Length: {stop - first}"])
        if method != "HEAD":
            await self.send_file(peer, file, first, stop - first)

    async def send(self, peer: socket.socket, status: int, body: bytes | None, more: list[str] | None = None,
                   method: str = "GET") -> None:  # fmt: skip
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}", *(more or [])]
        lines += [] if body is None else [f"Content-Length: {len(body)}"]
        data = "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if method == "HEAD" else body or b"")
        await asyncio.get_running_loop().sock_sendall(peer, data)

    async def send_file(self, peer: socket.socket, path: Path, first: int, count: int) -> None:
        loop, faults = asyncio.get_running_loop(), self.faults
        chance = self.random.random()
        is_cut, is_stalled = chance < faults.cut, faults.cut <= chance < faults.cut + faults.stalled
        left = count // 2 if is_cut or is_stalled else count
        with open(path, "rb") as file:
            while left:
                part = min(left, int(faults.bytes_per_s / 50) or 1) if faults.bytes_per_s else left
                await loop.sock_sendfile(peer, file, first, part, fallback=False)
                first, left = first + part, left - part
                if faults.bytes_per_s:
                    await asyncio.sleep(part / faults.bytes_per_s)
            if is_stalled:
                await asyncio.sleep(faults.stall_s)
        if is_cut or is_stalled:
            peer.shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError

    async def serve(self, port: int) -> None:
        loop, tasks = asyncio.get_running_loop(), set()
        with socket.create_server(("127.0.0.1", port), backlog=1024) as listener:
            listener.setblocking(False)
            print(listener.getsockname()[1], flush=True)
            loop.add_reader(sys.stdin, lambda: None if os.read(0, 4096) else os._exit(0))
            while True:
                peer, _ = await loop.sock_accept(listener)
                tasks.add(task := asyncio.create_task(self.connection(peer)))
                task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    for field in fields(Faults):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = vars(parser.parse_args())
    server = RangeServer(options.pop("folder"))
    port = options.pop("port")
    server.faults = Faults(**options)
    asyncio.run(server.serve(port))
