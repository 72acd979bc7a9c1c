"""Defaults of shuffle and ends, and what is refused."""

import pytest

from fastload.errors import OptionError
from fastload.plan import ChunkWindow, resolve_ends, resolve_shuffle


@pytest.mark.parametrize("shuffle", [True, "auto"])
def test_auto_trusts_a_file_that_was_shuffled_when_packed(shuffle):
    assert resolve_shuffle(shuffle, file_shuffled=True) == ChunkWindow(16)
    assert resolve_shuffle(shuffle, file_shuffled=False) == "full"


@pytest.mark.parametrize("file_shuffled", [True, False])
def test_named_shuffles_do_not_depend_on_the_file(file_shuffled):
    assert resolve_shuffle(False, file_shuffled) is False
    assert resolve_shuffle("full", file_shuffled) == "full"
    assert resolve_shuffle("chunk", file_shuffled) == ChunkWindow(16)
    assert resolve_shuffle(ChunkWindow(3), file_shuffled) == ChunkWindow(3)


@pytest.mark.parametrize("shuffle", [None, 1, 0, 16, "Full", "window", ["full"]])
def test_an_unknown_shuffle_is_refused_with_the_choices(shuffle):
    with pytest.raises(OptionError, match=r'"full", "chunk" or ChunkWindow\(chunks\)'):
        resolve_shuffle(shuffle, file_shuffled=True)


@pytest.mark.parametrize("chunks", [0, -1, 1.5, True, "16"])
def test_a_window_holds_whole_chunks(chunks):
    with pytest.raises(OptionError, match="1 or more"):
        ChunkWindow(chunks)


def test_ends_drop_only_when_shuffling():
    assert resolve_ends(None, False) == "exact"
    assert resolve_ends(None, "full") == resolve_ends(None, ChunkWindow()) == "drop"
    assert resolve_ends("pad", False) == "pad"
    with pytest.raises(OptionError, match='"drop", "pad", "exact" or None'):
        resolve_ends("last", False)
