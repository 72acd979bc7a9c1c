"""Commands and loaders where the system gives less than usual, as real processes: they work, or say what is missing."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import textwrap

import pytest
from child_processes import LIMIT_S, child_environment, under_permissions

PACKED = {"rows": 48, "size": (48, 40, 3), "classes": "abc", "chunk_rows": 8}

SCRIPT = """
    import multiprocessing, os, resource, sys
    BEFORE
    from fastload import FastLoader, PackedDataset

    def same(sample):
        return sample

    def of_some_size(sample):  # does not fit the slots: torch sends such batches by shared memory of its own
        size = sample[0].shape[-1] - 8 * (int(sample[1]) // BATCH % 3)
        return sample[0][:, :size, :size], sample[1]

    if __name__ == "__main__":
        method, transform, *paths = sys.argv[1:]
        if method != "threads":
            multiprocessing.set_start_method(method)
        for path in paths:
            dataset = PackedDataset(path, fields=["images", "row"], transform=globals().get(transform))
            loader = FastLoader(dataset, BATCH, workers=2, shuffle=False)
            for _ in range(2):
                print(sum(len(batch.rows) for batch in loader), flush=True)
            loader.close()
"""


def run(*words, before="", folder=None, **environment):
    """Runs a Python process, behind shell commands that change what it gets."""
    command = [sys.executable, *map(os.fspath, words)]
    if before:
        command = ["sh", "-c", f'{before}\nexec "$@"', "sh", *command]
    return subprocess.run(
        command, env=child_environment(**environment), cwd=folder, stdin=subprocess.DEVNULL,
        capture_output=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def cli(*words, **options):
    return run("-m", "fastload", *words, **options)


def write_script(folder, batch=8, before=""):
    """`before`: a line of Python that changes what the process has, before it imports anything of ours."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("BATCH", str(batch)).replace("BEFORE", before))
    return script


def load(folder, path, method, transform="None", batch=8, **options):
    return run(write_script(folder, batch), method, transform, path, **options)


@pytest.fixture
def load_warm(warm_python, tmp_path):
    """As `load`, in a process that had imported torch before."""
    return lambda path, method, transform="same", before="": warm_python.run(
        write_script(tmp_path, before=before), method, transform, path, cwd=tmp_path
    )


def descriptors(count):
    return f"resource.setrlimit(resource.RLIMIT_NOFILE, ({count}, {count}))"


def text(done):
    said = done.stdout + done.stderr
    return said if isinstance(said, str) else said.decode(errors="backslashreplace")


METHODS = [("threads", "None"), ("fork", "same"), ("forkserver", "same")]


@pytest.mark.parametrize(("method", "transform"), METHODS)
def test_thirty_two_descriptors_are_enough(packed, load_warm, method, transform):
    done = load_warm(packed, method, transform, before=descriptors(32))
    assert done.returncode == 0 and done.stdout == "48\n48\n", text(done)


def test_too_few_descriptors_are_an_error_that_says_so(packed, load_warm):
    done = load_warm(packed, "fork", before=descriptors(15))
    assert done.returncode == 1 and "oo many open files" in text(done) and "ulimit -n" in text(done), text(done)


def test_thirty_two_descriptors_are_enough_to_pack_and_look(image_folder, tmp_path):
    photos, out = image_folder(40), tmp_path / "out.h5"
    for words in (("pack", photos, out, "--workers", "2"), ("info", out), ("verify", out)):
        done = cli(*words, before="ulimit -n 32")
        assert done.returncode == 0, text(done)


def in_a_namespace(commands):
    """Shell commands that run as root of a namespace of their own, with mounts of their own."""
    return f"""exec unshare --user --map-root-user --mount sh -c '{commands}
exec "$@"' sh "$@" """


@pytest.fixture(scope="module")
def namespaces():
    """Whether this user may have mounts of their own."""
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", "mount -t tmpfs -o size=1m none /dev/shm"]
    if shutil.which("unshare") is None or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("the system does not let this user mount anything: no unshare, or no user namespaces")


@pytest.mark.parametrize(("method", "transform"), [("forkserver", "same"), ("fork", "of_some_size")])
def test_a_megabyte_of_dev_shm_is_enough_for_batches_of_any_size(packed, tmp_path, namespaces, method, transform):
    small = in_a_namespace("mount -t tmpfs -o size=1m none /dev/shm")
    done = load(tmp_path, packed, method, transform, before=small)
    assert done.returncode == 0 and done.stdout == b"48\n48\n", text(done)


def test_what_does_not_fit_dev_shm_is_an_error(packed_file, tmp_path, namespaces):
    large = packed_file(rows=24, size=(400, 400, 3), classes="abc", chunk_rows=8)
    small = in_a_namespace("mount -t tmpfs -o size=1m none /dev/shm")
    done = load(tmp_path, large, "fork", "of_some_size", batch=8, before=small)
    assert done.returncode == 1 and "WorkerError" in text(done), text(done)


NO_LOCKS = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
int flock(int fd, int operation) { errno = ENOLCK; return -1; }
"""


@pytest.fixture(scope="module")
def without_locks(tmp_path_factory):
    """A library that refuses locks, as a file system without them does."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler (cc), and Linux, to refuse locks with")
    folder = tmp_path_factory.mktemp("no_locks")
    (folder / "no_locks.c").write_text(NO_LOCKS)
    library = folder / "no_locks.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "no_locks.c"], check=True)
    return {"LD_PRELOAD": str(library)}


def test_a_file_system_without_locks_is_read_and_packing_there_is_refused(
    packed, image_folder, tmp_path, without_locks
):
    for words in (("info", packed), ("verify", packed)):
        done = cli(*words, **without_locks)
        assert done.returncode == 0, text(done)
    done = load(tmp_path, packed, "fork", "same", **without_locks)
    assert done.returncode == 0 and done.stdout == b"48\n48\n", text(done)
    done = cli("pack", image_folder(4), tmp_path / "out.h5", **without_locks)
    said = " ".join(text(done).split())
    assert done.returncode == 1 and "has no locks" in said and "Traceback" not in said, text(done)
    assert "another process" not in said and not (tmp_path / "out.h5").exists()
    words = ("pack", tmp_path / "photos", tmp_path / "out.h5")
    for more in (("--shards", "2", "--plan"), ("--shard-index", "0"), ("--shard-index", "1")):
        # HDF5 has locks in memory, where it writes; here no file has any.
        done = cli(*words, *more, HDF5_USE_FILE_LOCKING="FALSE", **without_locks)
        assert done.returncode == 0, text(done)
    assert len(list(tmp_path.glob("out-*"))) == 2


@pytest.mark.parametrize("locking", ["TRUE", "FALSE"])
def test_whatever_hdf5_is_told_of_locks_files_are_packed_and_read(packed, image_folder, tmp_path, load_warm, locking):
    environment = {"HDF5_USE_FILE_LOCKING": locking}
    out = tmp_path / "out.h5"
    done = cli("pack", image_folder(4), out, **environment)
    assert done.returncode == 0, text(done)
    done = load_warm(packed, "fork", before=f"assert 'h5py' not in sys.modules; os.environ |= {environment}")
    assert done.returncode == 0 and done.stdout == "48\n48\n", text(done)


def test_read_only_media_are_read_and_packing_there_is_refused(packed_copy, image_folder, tmp_path, namespaces):
    packed_copy.chmod(0o444)
    media, work = tmp_path / "media", tmp_path / "work"
    media.mkdir()
    work.mkdir()
    path = packed_copy.rename(media / "a.h5")
    photos = image_folder(4)
    read_only = in_a_namespace(f'mount --bind "{media}" "{media}" && mount -o remount,bind,ro "{media}"')
    for words in (("info", path), ("verify", path)):
        done = cli(*words, before=read_only)
        assert done.returncode == 0, text(done)
    done = load(work, path, "fork", "same", before=read_only)
    assert done.returncode == 0 and done.stdout == b"48\n48\n", text(done)
    done = cli("pack", photos, media / "out.h5", before=read_only)
    said = " ".join(text(done).split())
    assert done.returncode == 1 and "Read-only file system" in said and "Traceback" not in said, text(done)
    assert sorted(os.listdir(media)) == ["a.h5"]


def test_a_folder_that_may_not_be_written_to_is_read(packed_copy, image_folder, tmp_path):
    folder, photos = tmp_path / "media", image_folder(4)
    folder.mkdir()
    path = packed_copy.rename(folder / "a.h5")
    folder.chmod(0o555)
    try:
        for words, code in ((("info", path), 0), (("verify", path), 0), (("pack", photos, folder / "out.h5"), 1)):
            done = cli(*words, before=f'set -- {shlex.join(under_permissions())} "$@"')
            assert done.returncode == code and "Traceback" not in text(done), text(done)
    finally:
        folder.chmod(0o755)


ODD = (
    "a\nb.h5",
    "  100%s%(x)s {0}'\"`$HOME`#?a:b  .h5",
    "-a.h5",
    os.fsdecode(b"a\xff\xfe.h5"),
    "写真-ß-🙂.h5",
    "x" * 240 + ".h5",
)

COMMANDS = """
    import sys
    from fastload.cli import main

    folders, names = sys.argv[1::2], sys.argv[2::2]
    for folder, name in zip(folders, names, strict=True):
        for words in (["pack", folder, name, "--workers", "1"], ["info", name], ["verify", name]):
            sys.argv = ["fastload", *words]
            try:
                main()
            except SystemExit as end:
                assert not end.code, (words, end.code)
    print("done")
"""


def test_odd_names_are_packed_read_verified_and_loaded(warm_python, image_folder, tmp_path):
    folder, photos = tmp_path / "here", image_folder(8)
    photo_folders = {name: f"photos {name[:200]}" for name in ODD}
    for photo_folder in photo_folders.values():
        shutil.copytree(photos, folder / photo_folder)
    words = {name: f"./{name}" if name.startswith("-") else name for name in ODD}
    pairs = [word for name in ODD for word in (f"./{photo_folders[name]}", words[name])]
    (tmp_path / "commands.py").write_text(textwrap.dedent(COMMANDS))
    done = warm_python.run(tmp_path / "commands.py", *pairs, cwd=folder)
    assert done.returncode == 0 and done.stdout.endswith("\ndone\n"), done.stdout + done.stderr
    assert sorted(os.listdir(folder)) == sorted([*photo_folders.values(), *ODD])
    done = warm_python.run(write_script(tmp_path), "fork", "same", *words.values(), cwd=folder)
    assert done.returncode == 0 and done.stdout == "16\n16\n" * len(ODD), done.stdout + done.stderr


def test_very_long_paths_are_packed_and_loaded_or_refused_in_one_line(image_folder, tmp_path, load_warm):
    deep = tmp_path
    while len(os.fspath(deep)) < 3500:
        deep = deep / ("d" * 200)
    os.makedirs(deep)
    photos = image_folder(8)
    out = deep / "a.h5"
    done = cli("pack", photos, out, "--workers", "1")
    assert done.returncode == 0, text(done)
    done = load_warm(out, "fork")
    assert done.returncode == 0 and done.stdout == "16\n16\n", text(done)
    for longer in (deep / ("n" * 300 + ".h5"), deep / "/".join(["e" * 200] * 4) / "a.h5"):
        for words in (("pack", photos, longer), ("info", longer), ("verify", longer)):
            done = cli(*words)
            assert done.returncode == 1 and "Traceback" not in text(done), text(done)
            assert "too long" in " ".join(text(done).split()), text(done)
