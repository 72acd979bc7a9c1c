"""What is packed to a URL is what a local pack gives; until it is complete nothing of it can be seen there."""

from __future__ import annotations

import importlib.util
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import golden_sources
import numpy as np
import pytest
from child_processes import child_environment
from click.testing import CliRunner
from PIL import Image
from store_servers import S3, objects, put_folder

from fastload import index_files, index_plan, pack_images, pack_shard, plan_images
from fastload.cli import app
from fastload.errors import (
    MissingExtraError,
    MissingFileError,
    ObjectMissingError,
    OptionError,
    OutputError,
    PackError,
    ResumeError,
    SourceError,
)
from fastload.pack import output_url, target
from fastload.sources.open_tree import open_tree


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that outputs behind URLs are made in."""
    monkeypatch.setenv("FASTLOAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return golden_sources.SOURCES["folder"](tmp_path / "photos")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """40 images of 300 x 320 pixels: 11 MiB when packed, of which a store gets more than one part of 5 MiB."""
    random = np.random.default_rng(0)
    for i in range(40):
        path = tmp_path / "large" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.resize(random.integers(0, 256, (4, 320, 3), np.uint8), (300, 320, 3))).save(path)
    return tmp_path / "large"


def left_here(cache: Path) -> set[str]:
    """The names of what lies in the cache; of folders of outputs only `pack`."""
    return {path.name if path.is_file() else path.name.split("-")[0] for path in cache.rglob("*")}


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in another process, which ends by SIGKILL if the code says so."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", golden_sources.SOURCES)
def test_a_source_in_a_store_packs_to_the_same_file(s3: S3, tmp_path: Path, name: str) -> None:
    if name == "parquet" and importlib.util.find_spec("pyarrow") is None:
        pytest.skip("pyarrow is not installed")
    source = golden_sources.SOURCES[name](tmp_path / "source")
    url = put_folder(s3, source, f"there/{source.name}")
    if name == "hdf5":
        with pytest.raises(SourceError, match=r"HDF5 behind a URL cannot be read in place\. Copy it here"):
            pack_images(url, tmp_path / "there.h5")
        return
    pack_images(source, tmp_path / "here.h5", workers=0)
    report = pack_images(url, tmp_path / "there.h5", workers=0)
    assert (tmp_path / "there.h5").read_bytes() == (tmp_path / "here.h5").read_bytes()
    assert report.num_samples > 0


def test_workers_in_processes_read_from_the_store(s3: S3, tmp_path: Path) -> None:
    source = tmp_path / "many"
    for i in range(100):
        path = source / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((12, 16, 3), i, np.uint8)).save(path)
    url = put_folder(s3, source, "many")
    pack_images(source, tmp_path / "here.h5", chunk_bytes=4096)
    pack_images(url, tmp_path / "there.h5", chunk_bytes=4096, workers=2)
    # The command forks its workers where it may, which it may not after it has asked a store.
    command = "pack", url, str(tmp_path / "by command.h5"), "--chunk-bytes", "4096", "--workers", "2"
    result = run("from fastload.cli import main; main()", *command)
    assert result.returncode == 0, result.stderr
    for name in ("there.h5", "by command.h5"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "here.h5").read_bytes()


def test_a_file_at_a_url_is_that_of_a_local_pack_and_nothing_stays_here(
    s3: S3, photos: Path, tmp_path: Path, cache: Path
) -> None:
    pack_images(photos, tmp_path / "here.h5", workers=0)
    said: list[tuple[str, int, int]] = []
    report = pack_images(photos, f"{s3.url}/d/out.h5", workers=0, progress=lambda *now: said.append(now))
    assert objects(s3) == {"d/out.h5": (tmp_path / "here.h5").read_bytes()}
    assert str(report.path) == f"{s3.url}/d/out.h5" and report.file_bytes == (tmp_path / "here.h5").stat().st_size
    assert said[-1] == ("uploading", report.num_samples, report.num_samples)
    assert not left_here(cache)


def test_shards_at_a_url_are_those_of_a_local_pack_by_one_call_and_by_a_plan(
    s3: S3, photos: Path, tmp_path: Path, cache: Path
) -> None:
    options: dict[str, Any] = {"shards": 3, "spread": 2, "workers": 0}
    (tmp_path / "here").mkdir()
    whole = pack_images(photos, tmp_path / "here" / "out.h5", **options)
    expected = {
        str(path.relative_to(tmp_path / "here")): path.read_bytes() for path in (tmp_path / "here").rglob("*.h5")
    }
    report = pack_images(photos, f"{s3.url}/a/out.h5", **options)
    for name in ("num_samples", "splits", "converted", "notes", "chunks", "pixel_bytes", "file_bytes", "image_shape"):
        assert getattr(report, name) == getattr(whole, name), name
    plan = plan_images(photos, f"{s3.url}/b/out.h5", **options)
    with pytest.raises(OutputError, match=r"s3://bucket/b/out\.h5\.plan: exists"):
        plan_images(photos, f"{s3.url}/b/out.h5", **options)
    with pytest.raises(PackError, match="3 of 3 shards are not packed: 0, 1, 2"):
        index_plan(str(plan.path), f"{s3.url}/b/out.h5")
    for number in (2, 0, 1, 1):
        pack_shard(str(plan.path), number)
    assert index_plan(str(plan.path), f"{s3.url}/b/out.h5").splits == whole.splits
    there = objects(s3)
    secret = [key for key, data in there.items() if b"a-test-secret" in data or b"a-test-key" in data]
    assert not secret and there.pop("b/out.h5.plan")
    assert there == {f"{folder}/{name}": data for folder in "ab" for name, data in expected.items()}
    assert not left_here(cache)


def test_an_index_is_made_of_urls_by_the_command_too(s3: S3, photos: Path, tmp_path: Path) -> None:
    pack_images(photos, tmp_path / "out.h5", shards=2, workers=0)
    names = [f"out-0000{number}-of-00002.h5" for number in range(2)]
    for name in names:
        s3.put(f"d/{name}", (tmp_path / name).read_bytes())
    urls = [f"{s3.url}/d/{name}" for name in names]
    result = CliRunner().invoke(app, ["index", *urls, "-o", f"{s3.url}/d/out.h5"])
    assert result.exit_code == 0 and "s3://bucket/d/out.h5" in result.output, result.output
    assert objects(s3)["d/out.h5"] == (tmp_path / "out.h5").read_bytes()
    with pytest.raises(OutputError, match=r"s3://bucket/d/out\.h5: exists"):
        index_files(urls, f"{s3.url}/d/out.h5")
    with pytest.raises(OptionError, match=r"lies where they do.* Give a URL, such as s3://bucket/d/out\.h5"):
        index_files(urls, tmp_path / "index.h5")
    with pytest.raises(OptionError, match=r"s3://bucket/d/out-.*: lies outside of s3://bucket/e"):
        index_files(urls, f"{s3.url}/e/out.h5")
    with pytest.raises(ObjectMissingError, match=r"s3://bucket/d/none\.h5"):
        index_files([f"{s3.url}/d/none.h5"], f"{s3.url}/d/other.h5")
    with pytest.raises(SourceError, match=r"s3://bucket/d/out\.h5: is an index itself"):
        index_files([f"{s3.url}/d/out.h5"], f"{s3.url}/d/other.h5")


def test_an_output_that_exists_is_an_error_before_any_work_and_stays(s3: S3, photos: Path) -> None:
    s3.put("d/out.h5", b"somebody's")
    for more in ({}, {"shards": 2}):
        with pytest.raises(OutputError, match=r"s3://bucket/d/out\.h5: exists.*--overwrite"):
            pack_images(photos / "none", f"{s3.url}/d/out.h5", workers=0, **more)
    assert objects(s3) == {"d/out.h5": b"somebody's"}
    pack_images(photos, f"{s3.url}/d/out.h5", workers=0, overwrite=True)
    assert objects(s3)["d/out.h5"].startswith(b"\x89HDF")


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_object_made_meanwhile_is_not_overwritten(
    s3: S3, photos: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool, overwrite: bool
) -> None:
    monkeypatch.setattr(output_url, "AT_ONCE_BYTES", 2**26 if at_once else 0)
    if overwrite:
        s3.put("out.h5", b"earlier")

    def make(stage: str, done: int, total: int) -> None:
        if stage == "packing":
            s3.put("out.h5", b"somebody's")

    with pytest.raises(OutputError, match=r"out\.h5: (exists|was replaced by somebody else)"):
        pack_images(photos, f"{s3.url}/out.h5", workers=0, overwrite=overwrite, progress=make)
    assert objects(s3) == {"out.h5": b"somebody's"}
    assert left_here(cache) == {"pack", "out.h5", "out.h5.packed"}  # what was packed is not lost
    report = pack_images(photos, f"{s3.url}/out.h5", workers=0, overwrite=True)
    assert report.chunks_decoded == 0 and objects(s3)["out.h5"].startswith(b"\x89HDF")
    assert not left_here(cache)


KILLED = """
import os, signal, sys, boto3
from fastload import pack_images
from fastload.pack import output_url, target
output_url.AT_ONCE_BYTES, output_url.PART_BYTES = 0, 5 * 2**20
client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
def now(stage, done, total):
    if stage == "uploading":
        while not client.list_multipart_uploads(Bucket="bucket").get("Uploads"):
            pass
        os.kill(os.getpid(), signal.SIGKILL)
pack_images(sys.argv[1], sys.argv[2], size=(300, 320), workers=0, progress=now)
"""


def test_after_a_kill_within_an_upload_nothing_is_visible_and_the_same_call_uploads_what_was_packed(
    s3: S3, large: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = run(KILLED, str(large), f"{s3.url}/out.h5")
    assert killed.returncode == -9, killed.stderr
    assert objects(s3) == {}
    assert left_here(cache) == {"pack", "out.h5.lock", "out.h5", "out.h5.packed"}
    assert len(s3.boto3.list_multipart_uploads(Bucket=s3.bucket)["Uploads"]) == 1  # which a lifecycle rule ends
    monkeypatch.setattr(output_url, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(output_url, "PART_BYTES", 5 * 2**20)
    report = pack_images(large, f"{s3.url}/out.h5", size=(300, 320), workers=0)
    assert report.chunks_decoded == 0
    pack_images(large, tmp_path / "here.h5", size=(300, 320), workers=0)
    assert objects(s3) == {"out.h5": (tmp_path / "here.h5").read_bytes()}
    assert not left_here(cache)


def test_an_output_may_be_called_as_the_lock_of_its_folder_was(
    s3: S3, photos: Path, tmp_path: Path, cache: Path
) -> None:
    pack_images(photos, f"{s3.url}/lock", workers=0)
    pack_images(photos, tmp_path / "here.h5", workers=0)
    assert objects(s3) == {"lock": (tmp_path / "here.h5").read_bytes()} and not left_here(cache)


def test_a_file_of_other_samples_left_by_a_kill_is_not_uploaded(
    s3: S3, large: Path, photos: Path, tmp_path: Path
) -> None:
    assert run(KILLED, str(large), f"{s3.url}/out.h5").returncode == -9
    pack_images(photos, f"{s3.url}/out.h5", workers=0)
    pack_images(photos, tmp_path / "here.h5", workers=0)
    assert objects(s3) == {"out.h5": (tmp_path / "here.h5").read_bytes()}


def test_the_call_after_a_kill_keeps_the_shards_that_are_in_the_store(s3: S3, photos: Path, cache: Path) -> None:
    code = """
import os, signal, sys
from fastload import pack_images
def now(stage, done, total):
    if stage == "packing" and done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
pack_images(sys.argv[1], sys.argv[2], shards=4, workers=0, progress=now)
"""
    assert run(code, str(photos), f"{s3.url}/out.h5").returncode == -9
    assert sorted(objects(s3)) == ["out-00000-of-00004.h5", "out-00001-of-00004.h5"]
    with pytest.raises(OutputError, match=r"out-00000-of-00004\.h5: exists"):  # they are of another pack
        pack_images(photos, f"{s3.url}/out.h5", shards=4, seed=1, workers=0)
    report = pack_images(photos, f"{s3.url}/out.h5", shards=4, workers=0)
    assert report.num_shards == 4 and report.chunks_kept >= 2 and report.chunks_decoded == 4 - report.chunks_kept
    assert len(objects(s3)) == 5 and not left_here(cache)


def test_a_second_packer_of_this_machine_to_the_same_url_is_refused(
    s3: S3, photos: Path, large: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "_ORPHANS_S", 0.2)
    refused = list[PackError]()

    def now(stage: str, done: int, total: int) -> None:
        if stage == "uploading" and not refused:
            with pytest.raises(PackError, match=rf"{s3.url}/out\.h5: another process here is packing") as caught:
                pack_images(photos, f"{s3.url}/out.h5", workers=0, overwrite=True)
            refused.append(caught.value)

    pack_images(large, f"{s3.url}/out.h5", size=(300, 320), workers=0, progress=now)
    pack_images(large, tmp_path / "here.h5", size=(300, 320), workers=0)
    assert refused and objects(s3) == {"out.h5": (tmp_path / "here.h5").read_bytes()} and not left_here(cache)


def test_an_unfinished_pack_with_other_options_is_an_error(s3: S3, photos: Path) -> None:
    code = """
import os, signal, sys
from fastload import pack_images
pack_images(sys.argv[1], sys.argv[2], workers=0,
            progress=lambda stage, *_: os.kill(os.getpid(), signal.SIGKILL) if stage == "packing" else None)
"""
    assert run(code, str(photos), f"{s3.url}/out.h5").returncode == -9
    with pytest.raises(ResumeError, match=r"option seed was 0, now it is 1.*--overwrite"):
        pack_images(photos, f"{s3.url}/out.h5", seed=1, workers=0)
    pack_images(photos, f"{s3.url}/out.h5", seed=1, workers=0, overwrite=True)


def test_two_packers_at_once_make_one_dataset(s3: S3, photos: Path, tmp_path: Path) -> None:
    code = """
import sys
from fastload import pack_images
from fastload.remote.urls import Remote
sys.stdin.readline()
pack_images(sys.argv[1], sys.argv[2], shards=3, workers=0, remote=Remote(cache=sys.argv[3]))
"""

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(photos), f"{s3.url}/out.h5", str(tmp_path / name)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=child_environment(), **pipes)

    both = [start(name) for name in ("one", "other")]  # as on two machines: each has a cache of its own
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        said = process.communicate(timeout=300)[1]
        # The slower one may find the index there when it begins.
        assert process.returncode == 0 or "out.h5: exists" in said, said
    assert any(process.returncode == 0 for process in both)
    pack_images(photos, tmp_path / "out.h5", shards=3, workers=0)
    assert objects(s3) == {path.name: path.read_bytes() for path in tmp_path.glob("*.h5")}


def test_an_index_that_another_has_written_meanwhile_stays(
    s3: S3, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(stage: str, done: int, total: int) -> None:
        if stage == "uploading" and done == total:
            s3.put("out.h5", b"somebody's")

    with pytest.raises(OutputError, match=r"s3://bucket/out\.h5: exists"):
        pack_images(photos, f"{s3.url}/out.h5", shards=2, workers=0, progress=make)
    assert objects(s3)["out.h5"] == b"somebody's"


def test_what_cannot_be_written_to_is_refused_before_any_work(
    s3: S3, photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OutputError, match=r"a web server cannot be written to\. Give a URL of a store"):
        pack_images(photos / "none", "https://127.0.0.1/out.h5")
    with pytest.raises(OutputError, match=r"s3://bucket: names a bucket\. Name an object in it"):
        pack_images(photos / "none", "s3://bucket")
    with pytest.raises(ObjectMissingError, match=r"s3://no-such-bucket/out\.h5: there is no such bucket"):
        pack_images(photos / "none", "s3://no-such-bucket/out.h5")
    for url in ("https://host/out.h5?signature=tiger", "sftp://me:tiger@host/out.h5"):
        for arguments in ((str(photos), url), (url, "out.h5")):
            with pytest.raises(OptionError, match="comes with a user, a password or a query") as caught:
                pack_images(*arguments)
            assert "tiger" not in str(caught.value)
            result = CliRunner().invoke(app, ["pack", *arguments])
            assert result.exit_code == 2 and "tiger" not in result.output
    assert "tiger" not in caplog.text


def test_no_secret_is_logged_or_pickled(s3: S3, photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="fastload"):
        url = put_folder(s3, photos, "photos")
        pickled = pickle.dumps(open_tree(url).files)
        pack_images(url, f"{s3.url}/out.h5", workers=0)
    for text in (pickled, caplog.text.encode(), *objects(s3).values()):
        assert b"a-test-secret" not in text and b"a-test-key" not in text


@pytest.mark.parametrize("which", ["source", "output", "index"])
def test_without_the_package_for_stores_it_is_said_how_to_install_it(photos: Path, tmp_path: Path, which: str) -> None:
    command = {
        "source": ["pack", "s3://bucket/photos", str(tmp_path / "out.h5")],
        "output": ["pack", str(photos), "s3://bucket/out.h5"],
        "index": ["index", "s3://bucket/a.h5", "-o", "s3://bucket/out.h5"],
    }[which]
    code = (
        f"import sys; sys.modules['obstore'] = None; from fastload.cli import main; sys.argv[1:] = {command!r}; main()"
    )
    result = run(code)
    assert result.returncode == 1 and "pip install 'fastload-hdf5[cloud]'" in result.stderr, result.stderr
    assert issubclass(MissingExtraError, ImportError)


def test_a_dry_run_says_what_would_be_packed_and_writes_nothing(s3: S3, photos: Path, cache: Path) -> None:
    url = put_folder(s3, photos, "photos")
    before = objects(s3)
    result = CliRunner().invoke(app, ["pack", url, f"{s3.url}/out.h5", "--dry-run", "--workers", "0"])
    assert result.exit_code == 0 and "nothing was written" in result.output, result.output
    assert objects(s3) == before and not cache.exists()


def test_what_fsspec_serves_is_packed_from_and_to(photos: Path, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    store = fsspec.filesystem("memory")
    for path in photos.rglob("*.*"):
        store.pipe_file(f"/{tmp_path.name}/photos/{path.relative_to(photos)}", path.read_bytes())
    pack_images(photos, tmp_path / "out.h5", workers=0)
    report = pack_images(f"memory://{tmp_path.name}/photos", f"memory://{tmp_path.name}/out.h5", workers=0)
    assert store.cat_file(f"/{tmp_path.name}/out.h5") == (tmp_path / "out.h5").read_bytes()
    assert str(report.path) == f"memory://{tmp_path.name}/out.h5"
    assert pack_images(photos, f"file://{tmp_path}/file.h5", workers=0).path == tmp_path / "file.h5"


def test_a_missing_source_is_named(s3: S3, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"s3://bucket/photos: there is no such object, and none below it"):
        pack_images(f"{s3.url}/photos", tmp_path / "out.h5")


@pytest.mark.slow
def test_nodes_of_a_cluster_upload_their_shards(s3: S3, photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    url = put_folder(s3, photos, "photos")
    code = """
import sys
from fastload import pack_images
if __name__ == "__main__":
    pack_images(sys.argv[1], sys.argv[2], shards=3, engine="ray", address="local")
"""
    result = run(code, url, f"{s3.url}/d/out.h5")
    assert result.returncode == 0, result.stderr
    pack_images(photos, tmp_path / "out.h5", shards=3, workers=0)
    there = {key.removeprefix("d/"): data for key, data in objects(s3).items() if key.startswith("d/")}
    assert there.keys() == {path.name for path in tmp_path.glob("*.h5")}
