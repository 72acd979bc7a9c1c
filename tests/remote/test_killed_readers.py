"""Processes that share a cache are killed at any moment: what is recorded is there, and nobody waits for ever."""

from __future__ import annotations

from pathlib import Path

from child_processes import run_python
from remote_files import serve, watched, write_kind

from fastload.remote.open_url import open_remote
from fastload.remote.urls import Remote

SCRIPT = Path(__file__).with_name("killed_readers.py")
KILLS = 12
LIMIT = 260_000  # of 390,000 bytes; three batches, which lie in six chunks at most, and the headers fit


def test_chunks_that_are_recorded_are_whole_after_readers_were_killed(range_server, tmp_path):
    path = write_kind("shards", tmp_path / "made")
    url, cache = f"{range_server.url}/{serve(path, range_server.folder)}", tmp_path / "cache"
    with watched(cache) as most:
        assert int(run_python(SCRIPT, url, cache, LIMIT, KILLS)) == 0
    assert 0 < most.num_bytes <= LIMIT and most.looks > 20

    file = open_remote(url, Remote(cache=cache, max_bytes=LIMIT))
    remote = file.remote
    cached = remote.cache.cached
    complete = [chunk for chunk in cached.records.kept().tolist() if cached.presence(chunk).complete]
    assert len(complete) > 10
    for number in complete:
        chunk = remote.table.chunk(number)
        with remote.holding_header(chunk.shard):
            ranges = remote.source.ranges(chunk, cached)
        copy, whole = remote.path(chunk.shard).read_bytes(), (path.parent / file.shards.names[chunk.shard]).read_bytes()
        assert all(copy[begin:end] == whole[begin:end] for begin, end in ranges), chunk
    remote.close()
