"""The diffs of README.md, each of which has a whole file as its new side: what they name, and the script before."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"\A--- [^\n]+\n\+\+\+ (\S+)\n@@\n")


class FileDiff(NamedTuple):
    """A `diff` block that begins with `+++ PATH`, and parts its hunks by lines of @@."""

    path: Path
    before: str  # the whole text of the file with the lines that the diff takes away in place of those it adds

    @classmethod
    def of(cls, block: str) -> FileDiff | None:
        """None: the block names no file. AssertionError: a hunk is not in the file, or in several places."""
        if (named := _FILE.match(block)) is None:
            return None
        path, hunks = ROOT / named[1], re.split(r"^@@\n", block[named.end() :], flags=re.MULTILINE)
        text = path.read_text()
        for hunk in hunks:
            old, new = sides(hunk)
            assert text.count(f"\n{new}\n") == 1, f"not once in {named[1]}:\n{new}"
            text = text.replace(f"\n{new}\n", f"\n{old}\n")
        return cls(path, text)


def sides(diff: str) -> tuple[str, str]:
    """The old and the new text of a `diff`."""
    lines = diff.splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] != gone) for gone in "+-")  # type: ignore[return-value]


def file_diffs(page: Path = ROOT / "README.md") -> list[FileDiff]:
    """All such diffs of a page, in order."""
    return [found for kind, text in BLOCK.findall(page.read_text()) if kind == "diff" and (found := FileDiff.of(text))]
