"""By a plan any process packs the same shards as one call does, whatever the source and whoever else is at it."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import golden_sources as sources
import numpy as np
import pytest
from click.testing import CliRunner
from golden_packs import command
from hypothesis import given
from hypothesis import strategies as st
from interrupted import stop_at

from fastload import pack_images, pack_shard, plan_images
from fastload.cli import app
from fastload.errors import FormatError, MissingFileError, OptionError, OutputError, PackError, ResumeError, SourceError
from fastload.inspection.verify import verify_file
from fastload.pack.pack_options import journal_path
from fastload.pack.plain import from_bytes, to_bytes
from fastload.pack.plan import PlanFile
from fastload.pack.run import index_plan
from fastload.sources.spans import ListedFile

CHOICES: dict[str, dict[str, Any]] = {
    **{name: {} for name in sources.SOURCES},
    "coco": {"masks": "instance"},
    "jpeg_folder": {"store": "source", "source": sources.jpeg_folder},
    "padded masks": {"source": sources.mask_folders, "size": 12, "fit": "pad"},
    "mask values": {"source": sources.mask_folders, "mask_values": "keep", "mask_size": "image"},
    "skipped": {"source": partial(sources.broken_folder, sizes=True), "on_error": "skip"},
    "of pixels": {"source": sources.sized_folder, "store": "mixed:0.5", "chunk_bytes": 700},
}


@pytest.mark.parametrize("name", CHOICES)
def test_shards_by_a_plan_are_those_of_one_call(name: str, tmp_path: Path) -> None:
    if name == "parquet" and importlib.util.find_spec("pyarrow") is None:
        pytest.skip("pyarrow is not installed")
    options = {"workers": 0, "shards": 2, "spread": 2, **CHOICES[name]}
    source = options.pop("source", sources.SOURCES.get(name))(tmp_path / "source")
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    whole = pack_images(source, tmp_path / "here" / "out.h5", **options)
    plan = plan_images(source, tmp_path / "there" / "out.h5", **options)
    assert plan.num_shards == 2 and plan.source == str(source)
    # The temporary file that images of Parquet are unpacked to is gone with the process that listed them.
    code = "import sys; from fastload import pack_shard; [pack_shard(sys.argv[1], number) for number in (1, 0)]"
    subprocess.run([sys.executable, "-c", code, str(plan.path)], check=True)
    report = index_plan(plan.path, tmp_path / "there" / "out.h5")
    assert report.splits == whole.splits and report.num_samples == whole.num_samples
    for file in sorted((tmp_path / "here").rglob("*.h5")):
        assert file.read_bytes() == (tmp_path / "there" / file.relative_to(tmp_path / "here")).read_bytes(), file.name


def leaves() -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda n, kind: np.arange(n).astype(kind), st.integers(0, 5), st.sampled_from(["u1", "<i8", "S3"])
    )
    numbers = st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none()
    surrogates = st.text(st.characters())  # names of files may hold bytes that are no UTF-8
    return (
        numbers
        | surrogates
        | st.binary()
        | arrays
        | st.builds(Path, st.text("ab/", min_size=1))
        | st.just(np.dtype("<u2"))
    )


@given(
    st.recursive(
        leaves(),
        lambda some: st.lists(some) | st.lists(some).map(tuple) | st.dictionaries(st.text() | st.integers(), some),
        max_leaves=9,
    )
)
def test_values_are_read_as_they_were_written(value: Any) -> None:
    def described(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return "array", value.dtype.str, value.tolist()
        if isinstance(value, (list, tuple)):
            return type(value).__name__, [described(item) for item in value]
        if isinstance(value, dict):
            return [(key, described(item)) for key, item in value.items()]
        return type(value).__name__, value

    assert described(from_bytes(to_bytes(value))) == described(value)


def test_only_classes_that_hold_samples_are_made_of_a_plan() -> None:
    good = to_bytes(ListedFile("a", 1, 2))
    assert from_bytes(good) == ListedFile("a", 1, 2)
    with np.load(io.BytesIO(good)) as members:
        text = members["structure"].tobytes().decode()
    assert "fastload.sources.spans:ListedFile" in text
    for name in (
        "os:system",
        "fastload.sources.spans:os",
        "fastload.system.files:save_bytes",
        "fastload.sources.spans:x",
    ):
        into = io.BytesIO()
        np.savez(
            into, structure=np.frombuffer(text.replace("fastload.sources.spans:ListedFile", name).encode(), np.uint8)
        )
        with pytest.raises(ValueError, match="is no class of this release"):
            from_bytes(into.getvalue())


@pytest.fixture
def plan(tmp_path: Path) -> PlanFile:
    return plan_images(sources.folder(tmp_path / "source"), tmp_path / "out.h5", workers=0, shards=3)


def test_a_dataset_object_stays_where_it_is(tmp_path: Path) -> None:
    items = [(sources.noise(f"item {n}", 6, 8, 3), n) for n in range(4)]
    with pytest.raises(OptionError, match="exists in this process only"):
        plan_images(items, tmp_path / "out.h5", shards=2)
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_with_a_plan_is_said(plan: PlanFile, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"other.h5.plan: is missing"):
        pack_shard(tmp_path / "other.h5.plan", 0)
    for number, said in ((-1, "0 or more"), (3, "there is no shard 3; it has 0 to 2")):
        with pytest.raises(OptionError, match=said):
            pack_shard(plan.path, number)
    with pytest.raises(OutputError, match=r"out.h5.plan: exists"):
        plan_images(tmp_path / "source", plan.output, workers=0, shards=2)
    good = plan.path.read_bytes()
    for bad in (b"", b"nothing", good[: len(good) // 2]):
        plan.path.write_bytes(bad)
        with pytest.raises(FormatError, match="cannot be read as a plan"):
            pack_shard(plan.path, 0)
    plan.path.write_bytes(good)
    changed(plan, fastload_plan=2)
    with pytest.raises(FormatError, match="another release"):
        pack_shard(plan.path, 0)
    plan.path.write_bytes(good)
    changed(plan, decoder="libjpeg 6b")
    with pytest.raises(ResumeError, match="the decoder was libjpeg 6b, here it is"):
        pack_shard(plan.path, 0)
    assert not list(tmp_path.glob("out-*"))


def changed(plan: PlanFile, **values: object) -> None:
    """Writes a plan again with other values in its `plan.json`."""
    with zipfile.ZipFile(plan.path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    members["plan.json"] = json.dumps(json.loads(members["plan.json"]) | values).encode()
    with zipfile.ZipFile(plan.path, "w") as new:
        for name, data in members.items():
            new.writestr(name, data)


def test_an_index_names_the_shards_that_are_missing(plan: PlanFile) -> None:
    pack_shard(plan.path, 1)
    plan.shard(2).write_bytes(plan.shard(1).read_bytes())
    with pytest.raises(PackError, match=r"2 of 3 shards are not packed: 0, 2.* Others have the names of 2: for these"):
        index_plan(plan.path, plan.output)
    with pytest.raises(OutputError, match=r"out-00002-of-00003.h5: exists"):
        pack_shard(plan.path, 2)
    pack_shard(plan.path, 2, overwrite=True)
    pack_shard(plan.path, 0)
    index_plan(plan.path, plan.output)
    assert verify_file(plan.output, source=plan.source, workers=0).ok


def test_a_source_that_changed_is_an_error_and_leaves_nothing(plan: PlanFile) -> None:
    image = next(Path(plan.source).rglob("*.png"))
    image.write_bytes(image.read_bytes() + b" ")
    failed = 0
    for number in range(3):
        try:
            pack_shard(plan.path, number)
        except SourceError as exc:
            failed += 1
            said = str(exc)
            assert "was written to or replaced since it was listed" in said
            assert said.endswith("else make out.h5.plan anew.") and "the same command continues" not in said
    assert failed == 1
    assert len(list(plan.path.parent.glob("out-*"))) == 2, "those that could be packed"


def test_what_an_interrupted_pack_would_replace_stays(plan: PlanFile) -> None:
    plan.shard(0).write_bytes(b"something else")
    journal_path(plan.shard(0)).write_bytes(b"")
    with pytest.raises(OutputError, match=r"out-00000-of-00003.h5: exists"):
        pack_shard(plan.path, 0)
    assert plan.shard(0).read_bytes() == b"something else"


def test_a_source_that_changed_is_never_what_skip_leaves_out(tmp_path: Path) -> None:
    source = sources.folder(tmp_path / "source")
    plan = plan_images(source, tmp_path / "out.h5", workers=0, shards=1, on_error="skip")
    image = next(source.rglob("*.png"))
    os.utime(image, (1, 1))
    with pytest.raises(SourceError, match="1 samples are not what they were"):
        pack_shard(plan.path, 0)
    assert not list(tmp_path.glob("out-*"))
    with pytest.raises(OutputError, match="plans have this ending"):
        index_plan(plan.path, plan.path, overwrite=True)
    with pytest.raises(OptionError, match="`--engine ray`"):
        pack_images(source, tmp_path / "out.h5", workers=0, shards=1, address="auto")


def test_attempts_at_one_shard_do_each_other_no_harm(plan: PlanFile, tmp_path: Path) -> None:
    again = plan_images(plan.source, tmp_path / "again.h5", workers=0, shards=3)
    expected = [pack_shard(again.path, number).path.read_bytes() for number in range(3)]
    code = "import sys; from fastload import pack_shard\nfor number in (0, 1, 2, 1, 0): pack_shard(sys.argv[1], number)"
    processes = [subprocess.Popen([sys.executable, "-c", code, str(plan.path)]) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert [plan.shard(number).read_bytes() for number in range(3)] == expected
    assert sorted(path.name for path in tmp_path.glob("out-*")) == [plan.shard(number).name for number in range(3)]


def test_what_a_killed_attempt_left_is_removed_by_the_next(plan: PlanFile, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from fastload import pack_shard\n"
        "pack_shard(sys.argv[1], 0, progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(plan.path)]).returncode == -signal.SIGKILL
    left = {path.name for path in tmp_path.glob("out-00000*")}
    assert len(left) == 2 and not plan.shard(0).exists()
    other = tmp_path / next(iter(left)).replace(".try-", ".try-elsewhere")  # of a machine that cannot be asked
    other.touch()
    with pytest.raises(KeyboardInterrupt):
        pack_shard(plan.path, 0, progress=stop_at(1))
    assert [path.name for path in tmp_path.glob("out-00000*")] == [other.name]
    for number in range(3):
        pack_shard(plan.path, number)
    assert other.exists()
    index_plan(plan.path, plan.output)
    assert not other.exists()


def test_a_complete_shard_is_kept(plan: PlanFile) -> None:
    first = pack_shard(plan.path, 0)
    written = plan.shard(0).stat()
    kept = pack_shard(plan.path, 0)
    assert plan.shard(0).stat() == written
    assert first.chunks_decoded == first.chunks == kept.chunks_kept and kept.chunks_decoded == 0
    good = plan.shard(0).read_bytes()
    plan.shard(0).write_bytes(good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])  # rotted, its attributes right
    assert pack_shard(plan.path, 0, overwrite=True).chunks_kept == 0
    assert plan.shard(0).read_bytes() == good


def test_the_command_packs_the_shards_that_are_its_own(tmp_path: Path) -> None:
    source, output = sources.folder(tmp_path / "source"), tmp_path / "out.h5"
    printed = command("pack", source, output, "--shards", 5, "--plan", "--workers", 0)
    assert "--shard-index I" in printed and "for each I from 0 to 4" in printed
    for index in range(2):
        command("pack", source, output, "--shard-index", index, "--num-shards", 2, "--workers", 0)
        assert len(list(tmp_path.glob("out-*.h5"))) == (3, 5)[index]
    assert "indexed" in command("index", f"{output}.plan", "-o", output)
    assert "nothing to pack" in command("pack", source, output, "--shard-index", 6, "--num-shards", 7)
    for words, said in (
        (["--shard-index", "5"], "counts from 0 to 4"),
        (["--num-shards", "5"], "belongs to `--shard-index`"),
        (["--shard-index", "0", "--size", "8"], "`--size` cannot go with"),
    ):
        result = CliRunner().invoke(app, ["pack", str(source), str(output), *words])
        assert result.exit_code == 1 and said in " ".join(result.output.split()), result.output
    result = CliRunner().invoke(app, ["pack", str(tmp_path), str(output), "--shard-index", "0"])
    assert "is a plan of" in result.output
    result = CliRunner().invoke(app, ["pack", str(source), "--shard-index", "0", "--dry-run"])
    assert "`--dry-run` cannot go with" in result.output
