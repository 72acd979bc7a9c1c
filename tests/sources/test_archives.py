import gzip
import os
import pickle
import random
import re
import struct
import tarfile
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_trees import notes_of, refused, refused_or_skipped, write_tar

from fastload.errors import FileChangedError, ImageError
from fastload.sources.layouts import list_source
from fastload.sources.open_tree import open_tree

NOISE = random.Random(0).randbytes(70_000)  # does not compress
TEXT = b"fastload " * 9_000  # compresses a hundredfold


def write_zip(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def add_to_tar(path: Path, *members: tuple[str, bytes, str]) -> None:
    """Appends members by their name, type and target."""
    with tarfile.open(path, "a") as archive:
        for name, kind, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)


def in_directory(path: Path, member: int, at: int, kind: str, value: int) -> None:
    """Changes a number in the n-th entry of a zip's list."""
    data = bytearray(path.read_bytes())
    entries = [match.start() for match in re.finditer(rb"PK\x01\x02", data)]
    struct.pack_into(kind, data, entries[member] + at, value)
    path.write_bytes(data)


def contents(path: Path) -> dict[str, bytes]:
    tree = open_tree(path)
    return {name: tree.files.read(i) for i, name in enumerate(tree.names)}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zip_members_and_their_heads_are_read(tmp_path: Path, method: int) -> None:
    members = {"a/1.jpg": NOISE, "a/2.jpg": TEXT, "b/3.jpg": b"", "b/4.jpg": b"x"}
    path = write_zip(tmp_path / "x.zip", members, method)
    assert contents(path) == members
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(open_tree(path).files.read, [0, 1, 2, 3] * 50)) == [*members.values()] * 50
    tree = pickle.loads(pickle.dumps(open_tree(path)))
    for i, data in enumerate(members.values()):
        for size in (1, 100, 512, 40_000, 10**6):
            assert tree.files.read_head(i, size) == data[:size]
    assert tree.sizes.tolist() == [70_000, 81_000, 0, 1]
    assert set(tree.mtimes_ns.tolist()) == {path.stat().st_mtime_ns}


def test_a_zip_behind_other_data_and_streamed_members_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with open(path, "wb") as file:
        # Cannot seek: zipfile then writes data descriptors behind the members.
        pipe: Any = SimpleNamespace(write=file.write, flush=file.flush)
        write_zip(pipe, {"1.jpg": TEXT})
    assert contents(path) == {"1.jpg": TEXT}
    path.write_bytes(b"#!/bin/sh\n" * 60 + path.read_bytes())
    assert contents(path) == {"1.jpg": TEXT}


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_members_of_every_format_are_read(tmp_path: Path, format: int) -> None:
    long = "/".join(["a" * 60] * 3) + "/1.jpg"  # ustar splits it, the others have headers of their own
    members = {long: NOISE, "./cat/2.jpg": b"two", ".//dog/3.jpg": b""}
    path = write_tar(tmp_path / "x.tar", members, format)
    assert contents(path) == {long: NOISE, "cat/2.jpg": b"two", "dog/3.jpg": b""}
    if format != tarfile.USTAR_FORMAT:
        longer = {"b" * 300 + ".jpg": b"1"}
        assert contents(write_tar(tmp_path / "y.tar", longer, format)) == longer


def test_tar_names_that_are_not_utf8_and_zip_names_without_the_flag_or_with_backslashes(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"caf\udce9/1.jpg": b"1", "größe/1.jpg": b"2"}, tarfile.GNU_FORMAT)
    assert list_source(tmp_path / "x.tar").keys == ("caf\\xe9/1.jpg", "größe/1.jpg")
    path = write_zip(tmp_path / "x.zip", {"größe/1.jpg": b"1"})
    in_directory(path, 0, 8, "<H", 0)
    assert open_tree(path).names == ["größe/1.jpg"]
    windows = write_zip(tmp_path / "w.zip", {"cat\\1.jpg": b"1", "dog\\1.jpg": b"2"})
    assert open_tree(windows).names == ["cat/1.jpg", "dog/1.jpg"]
    mixed = {"train\\cat\\1.jpg": b"1", "train/dog/1.jpg": b"2", "val\\cat/1.jpg": b"3", "val/dog\\1.jpg": b"4"}
    listing = list_source(write_zip(tmp_path / "m.zip", mixed))
    assert listing.split_names == ("train", "val") and listing.columns["labels"].values.tolist() == [0, 1, 0, 1]
    assert any("Names with backslashes were read as folders (3): train\\cat\\1.jpg" in note for note in listing.notes)


def test_an_archive_in_a_zip_and_the_last_part_of_a_split_one_say_what_to_do(tmp_path: Path) -> None:
    refused("unpack .*outer.zip first", write_zip(tmp_path / "outer.zip", {"data.zip": b"PK", "a.txt": b""}))
    refused(
        "Unpack .*packed.zip first. Unpack them: `tar -xf",
        write_zip(tmp_path / "packed.zip", {"d.tar.gz": b"\x1f\x8b"}),
    )
    (tmp_path / "big.z01").write_bytes(b"PK\x07\x08")
    (tmp_path / "big.zip").write_bytes(b"the end of it")
    refused("last part of a split archive, for big.z01 lies next to it.*zip -s 0 .*big.zip --out", tmp_path / "big.zip")


def test_links_inside_a_tar_are_resolved_and_others_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", {"cat/1.jpg": b"one", "dog/1.jpg": b"two"})
    links = "dog/soft.jpg ../cat/1.jpg dog/twice.jpg soft.jpg dog/gone.jpg elsewhere.jpg dog/out.jpg /elsewhere/1.jpg"
    names = f"{links} dog/round.jpg round.jpg dog/note.txt nowhere cow cat".split()
    soft = [(name, tarfile.SYMTYPE, target) for name, target in zip(names[::2], names[1::2], strict=True)]
    add_to_tar(path, ("dog/hard.jpg", tarfile.LNKTYPE, "cat/1.jpg"), *soft)
    tree, found = open_tree(path), contents(path)
    assert found["dog/hard.jpg"] == found["dog/soft.jpg"] == found["dog/twice.jpg"] == b"one"
    assert [name for name, _ in tree.broken] == ["cow", "dog/gone.jpg", "dog/out.jpg", "dog/round.jpg"]
    assert tree.broken[-1][1] == "is a link that leads back to itself"
    assert tree.notes == ("Passed over in the archive (1): dog/note.txt is a link to dog/nowhere, which is not in the "
                          "archive.",)  # fmt: skip
    refused(r"\(4\): cow is a link to a folder.* not in the archive.*/elsewhere/1.jpg, which points out of", path)
    assert [key for key, _ in list_source(path, on_error="skip").skipped] == [name for name, _ in tree.broken]


def test_hidden_members_are_passed_over_and_folders_known_with_and_without_entries(tmp_path: Path) -> None:
    hidden = {"__MACOSX/a/._1.jpg": b"", "a/.b/1.jpg": b"", "a/..c": b""}
    tree = open_tree(write_zip(tmp_path / "x.zip", {"a/1.jpg": b"", "set/empty/": b"", "set/b/1.jpg": b"", **hidden}))
    assert tree.names == ["a/1.jpg", "set/b/1.jpg"] and tree.notes[0].startswith("Passed over as hidden (3): ")
    assert tree.folders == ["a", "set", "set/b", "set/empty"]


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    members = {"a/1.jpg": b"", "./a/1.jpg": b""}
    for path in (write_zip(tmp_path / "x.zip", members), write_tar(tmp_path / "x.tar", members)):
        refused(r"1 names occur more than once: a/1.jpg", path)


def test_encrypted_and_exotic_members_are_named(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", {"1.jpg": TEXT}, zipfile.ZIP_BZIP2)
    refused(r"1.jpg is compressed with method 12 \(bzip2\)", path)
    path = write_zip(tmp_path / "y.zip", {"1.jpg": TEXT, "2.jpg": TEXT})
    in_directory(path, 0, 8, "B", 1)
    listing = refused_or_skipped(r"1.jpg is encrypted; unpack", path)
    newer = write_zip(tmp_path / "z.zip", {"1.jpg": TEXT})
    in_directory(newer, 0, 6, "B", 235)
    refused("list at the end .* damaged .*zip file version 23.5", newer)
    assert listing.keys == ("2.jpg",) and listing.skipped[0][0] == "1.jpg"


def test_names_links_and_devices_that_leave_a_tar_are_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    path = write_tar(tmp_path / "x.tar", {"a/1.jpg": b"one"})
    bad = {
        "../secret.jpg": (tarfile.REGTYPE, "", "`..` in its name"),
        "a/../b.jpg": (tarfile.REGTYPE, "", "`..` in its name"),
        str(tmp_path / "secret.jpg"): (tarfile.REGTYPE, "", "absolute name"),
        "C:/secret.jpg": (tarfile.REGTYPE, "", "absolute name"),
        "a/soft.jpg": (tarfile.SYMTYPE, "../../secret.jpg", "points out of the archive"),
        "a/hard.jpg": (tarfile.LNKTYPE, "../secret.jpg", "points out of the archive"),
        "a/null.jpg": (tarfile.CHRTYPE, "", "is a device"),
        "a/disk.jpg": (tarfile.BLKTYPE, "", "is a device"),
        "a/pipe.jpg": (tarfile.FIFOTYPE, "", "is a pipe"),
        "a/null2.jpg": (tarfile.SYMTYPE, "null.jpg", "a link to a/null.jpg, which is a device"),
        "a/null3.jpg": (tarfile.LNKTYPE, "a/null.jpg", "a link to a/null.jpg, which is a device"),
        "../../etc/passwd": (tarfile.REGTYPE, "", "`..` in its name"),
    }
    add_to_tar(path, *[(name, kind, target) for name, (kind, target, _) in bad.items()])
    listing = refused_or_skipped(r"cannot be read \(11\)", path)
    assert listing.keys == ("a/1.jpg",) and "(1): ../../etc/passwd has `..`" in notes_of(listing)
    assert {name for name, _ in listing.skipped} == set(bad) - {"../../etc/passwd"}
    assert all(bad[name][2] in reason for name, reason in listing.skipped)


def test_names_and_links_that_leave_a_zip_are_refused_and_named(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", {"a/1.jpg": b"1", "../2.jpg": b"2", "/3.jpg": b"3", "a/../4.jpg": b"4"})
    with zipfile.ZipFile(path, "a") as archive:
        for name, mode in (("a/link.jpg", 0o120777), ("a/pipe.jpg", 0o010644)):
            info = zipfile.ZipInfo(name)
            info.create_system, info.external_attr = 3, mode << 16
            archive.writestr(info, "/etc/passwd")
    tree = open_tree(path)
    assert tree.names == ["a/1.jpg"]
    assert [name for name, _ in tree.broken] == ["../2.jpg", "/3.jpg", "a/../4.jpg", "a/link.jpg", "a/pipe.jpg"]
    assert "symbolic link, which is not followed" in tree.broken[3][1]
    windows = write_zip(tmp_path / "w.zip", {"cat\\1.jpg": b"1", "C:\\dog\\1.jpg": b"2", "cat\\..\\1.jpg": b"3"})
    assert open_tree(windows).names == ["cat/1.jpg"] and len(open_tree(windows).broken) == 2
    path = write_zip(tmp_path / "y.zip", {"1.jpg": b"1", "2.jpg": b"2"})
    path.write_bytes(path.read_bytes().replace(b"1.jpg", b"\0.jpg"))
    tree = open_tree(path)
    assert tree.names == ["2.jpg"] and tree.notes == ("Passed over in the archive (1): a member has no name.",)
    assert open_tree(write_tar(tmp_path / "x.tar", {"": b"1", "2.jpg": b"2"})).names == ["2.jpg"]


def test_a_member_never_inflates_beyond_its_stated_size(tmp_path: Path) -> None:
    members = {"1.jpg": bytes(2**24), "2.jpg": TEXT}
    path = write_zip(tmp_path / "small.zip", members)
    in_directory(path, 0, 24, "<I", 100)
    files = open_tree(path).files
    with pytest.raises(ImageError, match="inflates to more than the 100 bytes stated"):
        files.read(0)
    assert len(files.read_head(0, 1000)) == 100 and files.read(1) == TEXT


def test_a_head_that_deflate_made_longer_is_read_whole(tmp_path: Path) -> None:
    stored = zlib.compressobj(wbits=-15)
    empty = b"\0\0\0\xff\xff" * 300  # blocks that hold nothing
    path = write_zip(tmp_path / "x.zip", {"1.jpg": empty + stored.compress(NOISE) + stored.flush()}, zipfile.ZIP_STORED)
    for at, kind, value in ((10, "<H", 8), (16, "<I", zlib.crc32(NOISE)), (24, "<I", len(NOISE))):
        in_directory(path, 0, at, kind, value)
    files = open_tree(path).files
    assert files.read_head(0, 600) == NOISE[:600] and files.read(0) == NOISE


def test_members_that_would_inflate_hugely_are_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "liar.zip", {"1.jpg": NOISE, "2.jpg": TEXT})
    in_directory(path, 0, 24, "<I", 2**32 - 2)
    assert open_tree(path).broken == [("1.jpg", "claims 4294967294 bytes, more than 70025 compressed ones can hold")]
    path = write_zip(tmp_path / "black.zip", {"1.jpg": bytes(2**24), "2.jpg": TEXT})  # no larger than an image may be
    assert open_tree(path).names == ["1.jpg", "2.jpg"]
    path = tmp_path / "real.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("1.jpg", "w") as member:
        for _ in range(17):
            member.write(bytes(2**24))
    ((name, reason),) = open_tree(path).broken
    assert name == "1.jpg" and f"to {17 * 2**24}, as a decompression bomb does" in reason


def test_members_that_share_bytes_are_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", {"1.jpg": NOISE, "2.jpg": NOISE, "3.jpg": NOISE})
    in_directory(path, 1, 42, "<I", 8)  # the second now begins within the first
    overlaps = "overlaps {} in the zip, as in a decompression bomb"
    assert open_tree(path).names == ["3.jpg"]
    assert open_tree(path).broken == [("1.jpg", overlaps.format("2.jpg")), ("2.jpg", overlaps.format("1.jpg"))]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_member_is_an_error_of_that_image_alone(tmp_path: Path, method: int) -> None:
    path = write_zip(tmp_path / "x.zip", {"1.jpg": NOISE, "2.jpg": NOISE}, method)
    data = bytearray(path.read_bytes())
    data[30_000] ^= 0xFF
    path.write_bytes(data)
    files = open_tree(path).files
    with pytest.raises(ImageError, match="is damaged in the archive"):
        files.read(0)
    assert files.read(1) == NOISE
    data[:2] = b"XX"
    path.write_bytes(data)
    with pytest.raises(ImageError, match="there is no member at its offset"):
        open_tree(path).files.read(0)


def test_a_truncated_archive_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    members = {f"cat/{i}.jpg": NOISE[: 700 * i] for i in range(1, 6)}
    for path in (write_zip(tmp_path / "x.zip", members), write_tar(tmp_path / "x.tar", members)):
        data = path.read_bytes()
        for size in {*range(600, len(data) - 10_000, 977), *range(512, len(data) - 10_240, 512)}:
            path.write_bytes(data[:size])
            refused(r"cut short|damaged", path)
        path.write_bytes(b"")
        refused(r"empty file|damaged", path)


def test_a_tar_that_goes_on_behind_damage_or_its_end_is_refused(tmp_path: Path) -> None:
    one = write_tar(tmp_path / "1.tar", {"a/1.jpg": NOISE, "a/2.jpg": NOISE}).read_bytes()
    damaged = bytearray(one)
    damaged[512 + 70_144 + 3] ^= 0x55  # in the second header
    (tmp_path / "damaged.tar").write_bytes(damaged)
    refused("damaged at byte 70656", tmp_path / "damaged.tar")
    (tmp_path / "both.tar").write_bytes(one + one)
    refused("--ignore-zeros", tmp_path / "both.tar")
    data = bytearray(write_tar(tmp_path / "x.tar", {"1.jpg": b"1", "2.jpg": b"2"}, tarfile.GNU_FORMAT).read_bytes())
    header = data[1024:1536]
    header[124:136] = b"\xff" * 11 + b"\x00"  # base 256: a size of -256 leads back to a header, for ever
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 256 + sum(header[156:]))
    data[1024:1536] = header
    (tmp_path / "x.tar").write_bytes(data)
    # Of tarfile since CPython's gh-130577 (CVE-2025-8194), which ends its list at such a header, the latter.
    refused(r"damaged (or cut short \(2.jpg has the size -256\)|at byte 1024)", tmp_path / "x.tar")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.tar.gz", gzip.compress(b"x" * 2000), r"compressed as a whole \(gzip\).*gunzip"),
        ("x.tar", gzip.compress(b"x" * 2000), "gunzip"),
        ("x.tbz", b"BZh91AY", "bunzip2"),
        ("x.tar.xz", b"\xfd7zXZ\x00 ", "unxz"),
        ("x.7z", b"7z\xbc\xaf\x27\x1c", "7z x"),
        ("x.zip", b"Rar!\x1a\x07", "unrar"),
        ("x.jpg", b"\xff\xd8\xff", "is a single image"),
        ("x.dat", b"hello", "neither a folder nor a .zip or .tar"),
        ("x", b"", "is an empty file"),
        ("x.tar", b"nothing" * 200, "this tar is damaged or cut short"),
        ("x.zip", b"nothing" * 200, "is damaged"),
    ],
)
def test_what_is_no_archive_says_what_to_do(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    refused(message, tmp_path / name)


def test_an_archive_replaced_after_the_listing_is_noticed(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", {"1.jpg": b"1"})
    files = open_tree(path).files
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(FileChangedError, match="since it was listed"):
        files.read(0)
    path.unlink()
    with pytest.raises(FileChangedError, match="can no longer be opened"):
        files.read_head(0, 4)
