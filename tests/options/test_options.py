"""An option is declared once: arguments, their types, help, pages and checks come from the field."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import click
import pytest
from click.testing import CliRunner

from fastload import pack_images
from fastload.cli.command_line import Argument, Given, command
from fastload.errors import OptionError
from fastload.options import check_options, declared, from_arguments, option, takes
from fastload.options.keywords import PackKeywords
from fastload.options.pack import EncodingOption, PackCall, PackOptions, pack_call
from fastload.options.parse import parse_bytes, parse_names, parse_path, parse_rows, parse_size

Side = Literal["left", "right"]


@dataclass(frozen=True)
class Crop:
    """Options within others."""

    side: Side = option("left", "left or right.", name="crop_side", group="Crop")
    names: tuple[str, ...] = option(
        (), "Names.", accepts="Sequence[str] | None", parser=parse_names, convert=lambda given: tuple(given or ())
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Job:
    """A class with options, and with a field that is none."""

    where: Path
    crop: Crop = field(default_factory=Crop)
    count: int = option(3, "How many.", "how many of them there are.", least=1, needs="at least 1, such as 3")
    chunk: int = option(1024, "Bytes.", parser=parse_bytes, shown="1K")
    quick: bool = option(False, "Quick.", names=("--quick",))
    hook: Any = option(None, "", "called once.")

    def __post_init__(self) -> None:
        check_options(self)


@takes(Job)
def work(where: Path, **options: Any) -> Job:
    """Does it.

    Args:
        where: a place.
        {options}
    """
    return from_arguments(Job, options, of="work", where=where)


def test_options_are_found_through_the_fields_that_hold_them():
    found = declared(Job)
    assert list(found) == ["crop_side", "names", "count", "chunk", "quick", "hook"]
    assert found["crop_side"].path == ("crop", "side")
    assert found["names"].accepts == "Sequence[str] | None" and found["names"].argument_default is None
    assert found["names"].type() == Sequence[str] | None


def test_arguments_are_converted_and_what_is_not_given_has_its_default():
    made = work(Path("a"), names=["x", "y"], crop_side="right", count=5)
    assert made == Job(Path("a"), Crop("right", ("x", "y")), 5)
    assert work(Path("a")) == Job(Path("a"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cuont": 1}, r"work has no argument cuont=\. Did you mean count=\?"),
        ({"zzz": 1}, r"work has no argument zzz=\. It has crop_side, names, count"),
        ({"crop_side": "up"}, "crop_side='up' is not known; accepted: left, right"),
        ({"count": "5"}, "count='5': give a whole number"),
        ({"count": True}, "count=True: give a whole number"),
        ({"count": 1.5}, "count=1.5: give a whole number"),
        ({"quick": "no"}, "quick='no': give True or False"),
        ({"quick": None}, "quick=None: give True or False"),
        ({"crop_side": None}, "crop_side=None: give one of 'left', 'right'"),
        ({"names": 3}, "names=3: give a list, each text or None"),
        ({"names": ["a", 3]}, "names=.*: give a list, each text or None"),
        ({"count": 0}, "count=0: needs at least 1, such as 3"),
    ],
)
def test_what_is_not_accepted_is_named(given, message):
    with pytest.raises(OptionError, match=message):
        work(Path("a"), **given)


def test_a_function_shows_its_options_in_its_signature_and_docstring():
    parameters = inspect.signature(work).parameters
    assert list(parameters) == ["where", "crop_side", "names", "count", "chunk", "quick", "hook"]
    assert parameters["count"].default == 3 and parameters["names"].default is None
    assert "    count: how many of them there are.\n    chunk: bytes.\n" in (work.__doc__ or "")


def test_a_command_has_the_options_and_hands_over_what_was_typed():
    seen = []

    def run(
        where: Annotated[Path, Argument("WHERE", "A place.")], options: Annotated[dict[str, Any], Given(Job)]
    ) -> None:
        seen.append(from_arguments(Job, options, where=where))

    made = command("run", run)
    result = CliRunner().invoke(made, ["a", "--names", "x, y", "--crop-side", "right", "--chunk", "2K", "--quick"])
    assert result.exit_code == 0, result.output
    assert seen == [Job(Path("a"), Crop("right", ("x", "y")), chunk=2048, quick=True)]
    assert CliRunner().invoke(made, ["a", "--chunk", "x"]).exit_code == 2
    help = CliRunner().invoke(made, ["--help"]).output
    assert "Crop:\n  --crop-side" in help and "[1K]" in help and "hook" not in help


def test_the_types_of_arguments_are_those_of_the_fields():
    known = declared(PackCall)
    assert list(get_type_hints(PackKeywords)) == list(known)
    for name, hint in get_type_hints(PackKeywords).items():
        assert hint == known[name].type(), name
    assert inspect.signature(pack_images).parameters.keys() - {"source", "output"} == set(known)


def test_every_option_of_packing_reaches_its_field():
    given = {
        "labels": ["a"], "mask_size": "image", "mask_values": "0,255", "ignore_index": 255, "size": 8,
        "store": "jpeg:80", "shards": 2, "workers": 0, "on_error": "skip",
    }  # fmt: skip
    call = pack_call("photos", "out.h5", given)
    assert call.options.source.labels == ("a",) and call.options.masks.ignore == "255"
    assert call.options.size == (8, 8) and call.options.store == EncodingOption("jpeg", 80)
    assert (call.shards, call.workers, call.on_error, call.source) == (2, 0, "skip", Path("photos"))
    assert call.options.seed == PackOptions().seed


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_size, "218x178", (218, 178)), (parse_bytes, "8MiB", 2**23), (parse_names, "a, b,", ("a", "b")),
        (parse_rows, "3,17", (3, 17)), (parse_path, "a/b", Path("a/b")),
    ],
)  # fmt: skip
def test_text_is_parsed(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(("parse", "text"), [(parse_size, "big"), (parse_bytes, "many"), (parse_rows, "3-4")])
def test_text_without_meaning_is_an_error_that_says_what_to_write(parse, text):
    with pytest.raises(OptionError, match=f"{text!r} is .*; write "):
        parse(text)
    with pytest.raises(click.BadParameter):
        command_type(parse).convert(text, None, None)


def command_type(parse: Any) -> click.ParamType:
    def run(x: str) -> None: ...

    run.__annotations__ = {"x": Annotated[Any, Argument("X", "It.", parse)], "return": None}
    return command("run", run).params[0].type


def test_the_help_of_packing_imports_nothing_that_is_slow():
    code = (
        "import sys; from fastload.cli import main; sys.argv = ['fastload', 'pack', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('numpy', 'h5py', 'PIL', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "80"}
    )
    assert done.stdout.splitlines()[-1] == "[]"
