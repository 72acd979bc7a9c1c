"""A tree of an object store is that of the same files on disk; what changes there after it was listed is noticed."""

from __future__ import annotations

import io
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from small_trees import archived, make, picture, write
from store_servers import S3, RangeServer, put_folder

from fastload.errors import FileChangedError, ImageError, MissingFileError, PackError, SourceError
from fastload.pack.plain import from_bytes, to_bytes
from fastload.remote import ranges
from fastload.remote.ranges import announce, reader_of
from fastload.remote.urls import ObjectPath, Remote, path_of, requests_as
from fastload.sources.layouts import list_source
from fastload.sources.open_tree import open_tree
from fastload.sources.spans import ranges_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = "b/2.jpg", "a/10.jpg", "a/9.jpg", "top.txt", "a/b/é x.jpg", ".hidden.jpg", "a/.no/1.jpg"
    root = make(tmp_path / "set", *names)
    write(root / "empty.txt", "")
    return root


def test_a_folder_of_objects_is_the_folder_on_disk(s3: S3, folder: Path) -> None:
    here, there = open_tree(folder), open_tree(put_folder(s3, folder, "deep/set"))
    assert there.names == here.names and there.folders == here.folders and there.notes == here.notes
    assert there.sizes.tolist() == here.sizes.tolist()
    for i, name in enumerate(there.names):
        assert there.files.read(i) == here.files.read(i), name
        assert there.files.read_head(i, 3) == here.files.read_head(i, 3), name
        assert there.where(i) == f"s3://bucket/deep/set/{name}"
    assert str(there.given) == "s3://bucket/deep/set" and not there.in_place and here.in_place


def test_a_whole_bucket_is_a_tree_and_a_folder_s_marker_is_a_folder(s3: S3) -> None:
    s3.put("a/1.jpg", b"x")
    s3.put("empty/", b"")
    s3.put("ab/1.jpg", b"y")
    tree = open_tree("s3://bucket")
    assert tree.names == ["a/1.jpg", "ab/1.jpg"] and tree.folders == ["a", "ab", "empty"]
    assert open_tree("s3://bucket/a").names == ["1.jpg"]  # not ab


def test_nothing_there_is_an_error_that_names_the_url(s3: S3, range_server: RangeServer) -> None:
    with pytest.raises(MissingFileError, match=r"s3://bucket/none: there is no such object, and none below it"):
        open_tree("s3://bucket/none")
    with pytest.raises(MissingFileError, match=r"s3://bucket/\{0\.\.9\}\.tar: .*Patterns are not expanded"):
        open_tree("s3://bucket/{0..9}.tar")
    with pytest.raises(MissingFileError, match="a web server has no list of a folder"):
        open_tree(f"{range_server.url}/none")


@pytest.mark.parametrize("suffix", [".tar", ".zip"])
@pytest.mark.parametrize("at", ["s3", "http"])
def test_an_archive_is_read_by_ranges(
    s3: S3, range_server: RangeServer, folder: Path, tmp_path: Path, suffix: str, at: str
) -> None:
    path = archived(folder, tmp_path / f"set{suffix}", "inside")
    url = f"{range_server.url}/set{suffix}"
    if at == "s3":
        url = put_folder(s3, path, f"set{suffix}")
    else:
        (range_server.folder / path.name).write_bytes(path.read_bytes())
    here, there = open_tree(path), open_tree(url)
    assert there.names == here.names and there.archive and str(there.path) == url
    rows = np.arange(len(here.names))
    expected = [here.files.read(i) for i in rows.tolist()]
    assert [there.files.read(i) for i in rows.tolist()] == expected
    announce(ranges_of(there.files, rows, heads=False))
    again = pickle.loads(pickle.dumps(there.files)).take(rows[::-1])
    assert [again.read(i) for i in rows.tolist()] == expected[::-1]


def test_a_tar_is_listed_in_a_few_large_requests(range_server: RangeServer) -> None:
    with tarfile.open(range_server.folder / "many.tar", "w") as tar:
        for i in range(600):
            member = tarfile.TarInfo(f"{i}.jpg")
            member.size = 10_000
            tar.addfile(member, io.BytesIO(bytes(10_000)))
    assert len(open_tree(f"{range_server.url}/many.tar").names) == 600
    assert len(range_server.log()) < 10


@pytest.mark.parametrize("suffix", [".csv", ".npy"])
def test_a_lone_table_is_a_tree_of_that_file(s3: S3, tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"table{suffix}", "a,b\n1,2\n")
    tree = open_tree(put_folder(s3, path, f"d/table{suffix}"))
    assert tree.names == [path.name] and tree.file == path.name and str(tree.given) == f"s3://bucket/d/{path.name}"
    assert tree.files.read(0) == path.read_bytes()


def test_a_table_names_images_by_their_urls(s3: S3, tmp_path: Path) -> None:
    for i in range(3):
        picture(tmp_path / "set" / "images" / f"{i}.png", i)
    rows = "".join(f"s3://bucket/set/images/{i}.png,{i % 2}\n" for i in range(3))
    write(tmp_path / "set" / "labels.csv", f"image,label\n{rows}")
    listing = list_source(put_folder(s3, tmp_path / "set", "set"), "manifest")
    assert listing.keys == ("images/0.png", "images/1.png", "images/2.png")


def test_an_object_replaced_since_it_was_listed_is_refused(s3: S3, folder: Path, tmp_path: Path) -> None:
    tree = open_tree(put_folder(s3, folder, "set"))
    at = tree.names.index("a/9.jpg")
    s3.put("set/a/9.jpg", b"a/8.jpg")  # as many bytes, within the same second
    with pytest.raises(ImageError, match="was written to or replaced since it was listed"):
        tree.files.read(at)
    assert open_tree("s3://bucket/set").mtimes_ns[at] != tree.mtimes_ns[at]
    s3.boto3.delete_object(Bucket=s3.bucket, Key="set/a/9.jpg")
    with pytest.raises(ImageError, match="cannot be read: there is no such object any more"):
        tree.files.read(at)
    archive = open_tree(put_folder(s3, archived(folder, tmp_path / "set.tar"), "set.tar"))
    s3.put("set.tar", bytes(20_000))
    with pytest.raises(FileChangedError, match=r"s3://bucket/set\.tar: was replaced or removed since"):
        archive.files.read(archive.names.index("a/9.jpg"))


def test_a_store_that_fails_is_no_fault_of_the_image(s3: S3, folder: Path) -> None:
    tree = open_tree(put_folder(s3, folder, "set"))
    s3.refuse()
    with pytest.raises(PackError, match=r"s3://bucket/set/a/10\.jpg: access was refused"):
        tree.files.read(tree.names.index("a/10.jpg"))


def test_readers_hold_no_secret_and_pass_through_a_plan(s3: S3, folder: Path) -> None:
    with requests_as(Remote(cache="/somewhere", in_flight=3, timeout=7)):
        tree = open_tree(put_folder(s3, folder, "set"))
    for files in (pickle.loads(pickle.dumps(tree.files)), from_bytes(to_bytes(tree.files))):
        assert files.read(0) == tree.files.read(0)
        assert files.remote == Remote(in_flight=3, timeout=7)
    assert b"a-test" not in pickle.dumps(tree.files) and b"a-test" not in to_bytes(tree.files)


def test_what_was_announced_is_read_at_the_same_time(range_server: RangeServer) -> None:
    with tarfile.open(range_server.folder / "set.tar", "w") as tar:
        for i in range(40):
            member = tarfile.TarInfo(f"{i:02d}.jpg")
            member.size = 1000
            tar.addfile(member, io.BytesIO(bytes([i]) * 1000))
    tree = open_tree(f"{range_server.url}/set.tar")
    before = len(range_server.log())
    range_server.set(latency_s=0.2)
    order = np.arange(40)[::-1]
    announce(ranges_of(tree.files, order, heads=False))
    assert [tree.files.read(i)[0] for i in order.tolist()] == order.tolist()
    assert range_server.most_at_once() > 10
    assert len(range_server.log()) == before + 40  # each once


def test_no_more_is_held_than_was_not_read_yet(range_server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "HELD_BYTES", 4000)
    with zipfile.ZipFile(range_server.folder / "set.zip", "w") as archive:
        for i in range(40):
            archive.writestr(f"{i:02d}.jpg", bytes([i]) * 1000)
    tree = open_tree(f"{range_server.url}/set.zip")
    reader = reader_of(range_server.url + "/", Remote())
    for rows in (np.arange(40), np.arange(40)[::-1]):
        wanted = ranges_of(tree.files, rows, heads=False)
        announce(wanted)
        for one, i in zip(wanted, rows.tolist(), strict=True):
            assert tree.files.read(i)[0] == i
            with reader._changed:
                assert reader._held < 4000 + one.stop - one.first
        reader.forget("set.zip")
        assert reader._held == 0 and not reader._queue


def test_small_files_that_are_read_in_their_order_are_fetched_ahead(s3: S3, tmp_path: Path) -> None:
    for i in range(30):
        write(tmp_path / "set" / f"{i:02d}.xml", f"{i}")
        write(tmp_path / "set" / f"{i:02d}.jpg", "")
    tree = open_tree(put_folder(s3, tmp_path / "set", "set"))
    reader = reader_of("s3://bucket", tree.files.remote)  # type: ignore[attr-defined]
    texts = [i for i, name in enumerate(tree.names) if name.endswith(".xml")]
    tree.files.read(texts[0])
    tree.files.read(texts[1])
    with reader._changed:
        waiting = {key for key in reader._there if key.startswith("set/")}
    assert {f"set/{i:02d}.xml" for i in range(5, 30)} <= waiting and not any(key.endswith(".jpg") for key in waiting)
    assert [tree.files.read(i) for i in texts] == [f"{i}".encode() for i in range(30)]


def test_arrow_files_and_hdf5_are_refused_by_name(s3: S3, tmp_path: Path) -> None:
    write(tmp_path / "set" / "rows.h5", "x")
    with pytest.raises(SourceError, match="HDF5 behind a URL cannot be read in place"):
        list_source(put_folder(s3, tmp_path / "set", "set"), "hdf5")


def test_a_path_of_a_url_joins_names_and_shows_the_url() -> None:
    path = path_of("S3://bucket/a/out.h5")
    assert isinstance(path, ObjectPath) and str(path) == "s3://bucket/a/out.h5" and path.name == "out.h5"
    assert str(path.with_name("b.h5")) == "s3://bucket/a/b.h5" and str(path.parent / "c") == "s3://bucket/a/c"
    assert pickle.loads(pickle.dumps(path)) == path and isinstance(from_bytes(to_bytes(path)), ObjectPath)
    assert path.absolute() == path == path.resolve() and not path.exists()
    assert path_of("file:///data/a%20b") == Path("/data/a b") and path_of("data/x") == Path("data/x")
