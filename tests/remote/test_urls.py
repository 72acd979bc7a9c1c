"""Options of a dataset behind a URL."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from fastload.errors import OptionError
from fastload.remote.urls import Remote, is_url, shown


@pytest.mark.parametrize(
    ("given", "count"),
    [(None, None), (1, 1), ("64MiB", 64 * 2**20), ("500 GB", 500 * 10**9), ("2TB", 2 * 10**12), ("1.5 GiB", 3 * 2**29)],
)
def test_sizes_are_numbers_or_texts_with_a_unit(given, count) -> None:
    assert Remote(max_bytes=given).limit() == count


@pytest.mark.parametrize(
    "options",
    [
        {"max_bytes": 0}, {"max_bytes": "much"}, {"max_bytes": True}, {"max_bytes": 1.5}, {"in_flight": 0},
        {"in_flight": 2.5}, {"timeout": 0}, {"timeout": "30"}, {"timeout": float("nan")}, {"give_up_after": -1},
        {"check": "always"}, {"cache": 3}, {"cache": ""}, {"cache": "s3://bucket/cache"},
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_is_accepted(options) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(options))}=.*give") as caught:
        Remote(**options)
    assert repr(next(iter(options.values()))) in str(caught.value)


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("FASTLOAD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Remote().cache_folder() == tmp_path / ".cache" / "fastload"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Remote().cache_folder() == tmp_path / "xdg" / "fastload"
    monkeypatch.setenv("FASTLOAD_CACHE", str(tmp_path / "own"))
    assert Remote().cache_folder() == tmp_path / "own"
    assert Remote(cache="~/here").cache_folder() == tmp_path / "here"
    assert Remote(cache=Path("there")).cache_folder() == Path("there")


def test_options_are_equal_after_a_pickle() -> None:
    remote = Remote("cache", max_bytes="1GB", in_flight=8, timeout=3, give_up_after=9.5, check=False)
    assert pickle.loads(pickle.dumps(remote)) == remote


@pytest.mark.parametrize("text", ["s3://bucket/a.h5", "file:///a", "http://h", "memory://x", "abfs+x://y"])
def test_a_scheme_makes_a_url(text) -> None:
    assert is_url(text)


@pytest.mark.parametrize(
    "text", ["a.h5", "/a/b.h5", "C:\\a.h5", "c:/a.h5", "://x", "a/s3://b", Path("s3://b"), None, b"s3://"]
)
def test_paths_are_no_urls(text) -> None:
    assert not is_url(text)


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("https://me:pw@host:8/a%20b.h5?X-Amz-Signature=pw#pw", "https://host:8/a%20b.h5"),
        ("s3://key:pw@bucket/a/b", "s3://bucket/a/b"),
        ("file:///a/b.h5", "file:///a/b.h5"),
        ("http://me:pw@[bad/x?pw", "http://[bad/x"),
        ("http://host?pw", "http://host"),
        ("abfss://train@account.dfs.core.windows.net/x.h5", "abfss://train@account.dfs.core.windows.net/x.h5"),
        ("abfss://me:pw@account.dfs.core.windows.net/x.h5?sig=pw", "abfss://account.dfs.core.windows.net/x.h5"),
    ],
)
def test_messages_show_no_user_and_no_query(url, seen) -> None:
    assert shown(url) == seen
