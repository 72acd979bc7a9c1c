import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_trees import make, refused

from fastload.errors import SourceError
from fastload.pack import pack_images
from fastload.sources.layouts import list_source
from fastload.sources.open_tree import open_tree
from fastload.sources.spans import Paths
from fastload.sources.tree import FolderFiles, key_of

# As a user without rights: root may read everything.
AS_NOBODY = """
import os, sys
from fastload.sources.layouts import list_source
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    list_source(sys.argv[1])
except Exception as exc:
    print(type(exc).__name__, exc)
"""


def test_files_come_folder_by_folder_with_sizes_and_times_and_without_hidden_ones(tmp_path: Path, monkeypatch) -> None:
    make(tmp_path, "b/2.jpg", "a/9.jpg", "a/deep/1.jpg", "a-1/x.txt", "z.jpg")
    make(tmp_path, "a/._1.jpg", ".ipynb_checkpoints/1.jpg", "__MACOSX/a/1.jpg")
    os.utime(tmp_path / "z.jpg", ns=(5, 7))
    monkeypatch.chdir(tmp_path.parent)
    tree = open_tree(tmp_path.name)
    monkeypatch.chdir("/")  # a relative source is found from another folder
    assert tree.notes == ("Passed over as hidden (3): .ipynb_checkpoints, __MACOSX, a/._1.jpg.",)
    assert tree.names == ["z.jpg", "a/9.jpg", "a-1/x.txt", "a/deep/1.jpg", "b/2.jpg"]
    assert tree.folders == ["a", "a-1", "a/deep", "b"]
    assert tree.sizes.tolist() == [5, 7, 9, 12, 7] and tree.mtimes_ns[0] == 7
    assert tree.images.tolist() == [0, 1, 3, 4]
    assert [tree.files.read(i).decode() for i in range(5)] == tree.names
    assert tree.files.read_head(3, 6) == b"a/deep" and tree.files.read_head(0, 99) == b"z.jpg"
    assert open_tree(tree) is tree


def test_linked_folders_are_followed_but_not_in_a_circle(tmp_path: Path) -> None:
    make(tmp_path / "real", "1.jpg")
    make(tmp_path / "set", "a/1.jpg", "b/1.jpg")
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "real", target_is_directory=True)
    (tmp_path / "set" / "again").symlink_to(tmp_path / "real", target_is_directory=True)
    (tmp_path / "set" / "a" / "up").symlink_to("..", target_is_directory=True)
    (tmp_path / "set" / "b" / "self.jpg").symlink_to("self.jpg")
    (tmp_path / "real" / "gone.txt").symlink_to("nothing")
    os.mkfifo(tmp_path / "set" / "pipe.jpg")
    tree = open_tree(tmp_path / "set")
    assert tree.names == ["a/1.jpg", "again/1.jpg", "b/1.jpg", "linked/1.jpg"]
    assert tree.notes == (
        "NOT READ: again/gone.txt is a link to a file that does not exist, linked/gone.txt is a link to a file that "
        "does not exist.",
        "Links that lead back to a folder above them were not followed: a/up.",
    )
    assert tree.broken == [("b/self.jpg", "is a link that leads back to itself"), ("pipe.jpg", "is not a regular file")]


def test_names_that_are_not_utf8_become_escapes_and_can_be_read(tmp_path: Path) -> None:
    folder = os.path.join(os.fsencode(tmp_path), b"caf\xe9")
    os.mkdir(folder)
    for name in (b"\xff1.jpg", "größe.jpg".encode()):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(name)
    listing = list_source(tmp_path, "folder")
    assert listing.keys == ("caf\\xe9/größe.jpg", "caf\\xe9/\\xff1.jpg")
    assert listing.columns["labels"].attrs["names"] == ("caf\\xe9",)
    copy = pickle.loads(pickle.dumps(listing))
    assert copy.files.read(1) == b"\xff1.jpg" and copy.keys == listing.keys
    assert key_of("a\udcff") == "a\\xff"
    with open(os.path.join(folder, b"\\xff1.jpg"), "wb"):
        pass
    refused(r"1 names occur more than once: caf\\xe9/\\xff1.jpg", tmp_path, "folder")


def test_files_pickle_to_little_more_than_their_names() -> None:
    names, numbers = [f"train/class/{i:06d}.jpg".encode() for i in range(10_000)], np.arange(10_000)
    files = FolderFiles(b"/data", Paths.of(names), numbers, -numbers)
    assert len(pickle.dumps(files)) < 10_000 * (22 + 3 * 8) + 1000
    some = files.take(np.array([9_999, 3, 0]))
    assert some.paths.joined == b"train/class/009999.jpgtrain/class/000003.jpgtrain/class/000000.jpg"
    assert some.paths.ends.tolist() == [22, 44, 66]
    assert some.sizes.tolist() == [9_999, 3, 0] and some.mtimes_ns.tolist() == [-9_999, -3, 0]


@pytest.mark.parametrize(
    ("locked", "message"), [("photos/cat", "cannot be listed"), ("photos", "cannot be listed"), (".", "cannot be read")]
)
def test_an_unreadable_folder_is_named(tmp_path: Path, locked: str, message: str) -> None:
    root = tmp_path / "open"
    make(root, "photos/cat/1.jpg")
    for folder in (root, *tmp_path.parents, tmp_path):
        if os.access(folder, os.W_OK) and str(folder).startswith(str(tmp_path.parents[1])):
            folder.chmod(0o755)
    mode = (root / locked).stat().st_mode
    (root / locked).chmod(0)
    try:
        run = [sys.executable, "-c", AS_NOBODY, str(root / "photos")]
        out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    finally:
        (root / locked).chmod(mode)
    assert out.startswith("SourceError") and message in out and "Permission denied" in out


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
@pytest.mark.parametrize("name", ["a.csv", "a.tar", "images.npz", "a.h5", "a"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(SourceError, match="is a pipe or device"):
        pack_images(tmp_path / name, tmp_path / "out.h5")
