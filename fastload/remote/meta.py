"""The file meta.json of a dataset in the cache: where it was read from, and what its objects were then."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from fastload.remote.cache import VERSION


class Meta:
    """The file meta.json of a dataset: for each URL that it was read from, size and ETag of each object, by name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, dict[str, tuple[int, str | None]]]:
        """Returns by URL, and by name, size and ETag."""
        try:
            found = json.loads(self._path.read_text())
            if found["version"] != VERSION:
                return {}
            return {
                url: {name: (int(size), etag) for name, (size, etag) in objects.items()}
                for url, objects in found["urls"].items()
            }
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def add(self, url: str, objects: dict[str, tuple[int, str | None]]) -> None:
        """Adds objects of a URL, replacing objects of the same names; within the cache's `locked`."""
        urls = self.read()
        urls[url] = urls.get(url, {}) | objects
        fd, part = tempfile.mkstemp(prefix=".meta-", dir=self._path.parent)  # a new file, through no link
        with open(fd, "w") as file:
            file.write(json.dumps({"version": VERSION, "urls": urls}))
            os.fchmod(fd, os.stat(self._path.parent).st_mode & 0o666)  # others may share the cache
        os.replace(part, self._path)
