"""`fastload cache list`, `verify` and `clear`: what this machine keeps of datasets behind URLs."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from fastload.cli.arguments import AsJson
from fastload.cli.command_line import Argument, Commands
from fastload.cli.output import (
    bold,
    format_seconds,
    one_line,
    one_line_errors,
    print_error,
    print_finding,
    print_json,
    print_table,
    progress_bar,
)
from fastload.options import Option
from fastload.system.advice import advice
from fastload.system.text import counted, format_bytes

if TYPE_CHECKING:
    from fastload.remote.contents import CacheCheck, CacheContents, CachedContent, Cleared
    from fastload.remote.urls import Remote


CacheFolder = Annotated[
    Path | None,
    Option(names=("--cache",), help="Folder of the cache; by default $FASTLOAD_CACHE, else ~/.cache/fastload."),
]
Shared = Annotated[
    bool, Option(names=("--shared",), help="The folder is one that others may write to, as with Remote(shared=True).")
]
CachedUrl = Annotated[str | None, Argument("[URL]", help="Only the dataset that was read from this URL.")]


def list_(folder: CacheFolder = None, shared: Shared = False, as_json: AsJson = False) -> None:
    """List the datasets in the cache: how much of each is there, and when it was last used."""
    with one_line_errors():
        from fastload.remote.contents import list_cache

        found = list_cache(_remote(folder, shared))
        if as_json:
            print_json(found.to_dict())
        else:
            _print_contents(found)


def verify(url: CachedUrl = None, folder: CacheFolder = None, shared: Shared = False, as_json: AsJson = False) -> None:
    """Hash every chunk in the cache, and remove chunks that differ from what was downloaded.

    The next read fetches them again. Ends with exit code 1 if there were any.
    """
    with one_line_errors():
        from fastload.remote.contents import verify_cache

        with progress_bar("chunks") as advance:
            found = verify_cache(url, _remote(folder, shared), progress=partial(advance, "verifying"))
        if as_json:
            print_json({"datasets": [one.to_dict() for one in found]})
        else:
            for one in found:
                _print_check(one)
        wrong = [one for one in found if not one.ok]
        if wrong:
            count = sum(one.wrong for one in wrong)
            print_error(f"{counted(count, 'wrong chunk')} in {counted(len(wrong), 'dataset')} of the cache.")
            raise click.exceptions.Exit(1)


def clear(
    url: CachedUrl = None,
    everything: Annotated[bool, Option(names=("--all",), help="Remove all datasets that nobody uses.")] = False,
    folder: CacheFolder = None,
    shared: Shared = False,
    as_json: AsJson = False,
) -> None:
    """Remove a dataset from the cache, or all of them; a dataset that a process has open stays.

    Only copies are removed: the objects stay where they are.
    """
    if (url is None) != everything:
        raise click.BadParameter("give the URL of a dataset, or --all.")
    with one_line_errors():
        from fastload.remote.contents import clear_cache

        found = clear_cache(url, _remote(folder, shared))
        if as_json:
            print_json(found.to_dict())
        else:
            _print_cleared(found)
        if url is not None and found.in_use:
            raise click.exceptions.Exit(1)


cache = Commands(
    "cache",
    help="What this machine keeps of datasets behind URLs.",
    no_args_is_help=True,
    functions={
        "list": ("fastload.cli.cache:list_", "fastload cache list"),
        "verify": ("fastload.cli.cache:verify", "fastload cache verify\nfastload cache verify s3://bucket/photos.h5"),
        "clear": ("fastload.cli.cache:clear", "fastload cache clear s3://bucket/photos.h5\nfastload cache clear --all"),
    },
)


def _remote(folder: Path | None, shared: bool) -> Remote:
    from fastload.remote.urls import Remote

    return Remote(cache=folder, shared=shared)


def _print_contents(found: CacheContents) -> None:
    if not found.datasets:
        click.echo(f"{bold(found.cache)}: holds no dataset")
        return
    click.echo(f"{bold(found.cache)}: {counted(len(found.datasets), 'dataset')}")
    now_s = time.time()
    rows = [
        (
            one.name,
            format_bytes(one.bytes),
            f"{one.chunks:,} of {one.num_chunks:,}",
            "now" if one.in_use else f"{format_seconds(max(0.0, now_s - one.used_s))} ago",
        )
        for one in found.datasets
    ]
    print_table(("dataset", "on disk", "chunks", "last used"), rows)
    click.echo(
        f"  {format_bytes(found.bytes)} in all; {advice('room of the cache', limit=format_bytes(found.limit_bytes))}"
    )


def _print_check(one: CacheCheck) -> None:
    name = one_line(one.name)
    if one.unreadable:
        print_finding(f"{name}: {advice('clear cache', url=name)}")
        return
    busy = f"; {counted(one.skipped, 'chunk')} not checked, being fetched" if one.skipped else ""
    if not one.wrong:
        click.echo(f"{name}: {counted(one.checked, 'chunk')}, all as downloaded{busy}")
        return
    left = one.wrong - one.removed
    stays = f"; {left:,} of them stay for now, being in use" if left else ""
    print_finding(
        f"{name}: {one.wrong:,} of {counted(one.checked, 'chunk')} differ from what was downloaded: {one.removed:,} "
        f"removed, the next read fetches them again{stays}{busy}"
    )


def _print_cleared(found: Cleared) -> None:
    for one in found.removed:
        click.echo(f"{one_line(one.name)}: removed, {format_bytes(one.bytes)}")
    for one in found.in_use:
        print_finding(_left(one))
    if not found.removed and not found.in_use:
        click.echo("the cache holds no dataset")


def _left(one: CachedContent) -> str:
    return f"{one.name}: left, {format_bytes(one.bytes)}, since some process has it open"
