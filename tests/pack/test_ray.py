"""On a Ray cluster shards are packed as here, also where nodes are lost or not what they should be.

And Ray Train trains there on a packed file, as `tools/examples/ray_train.py` shows.
"""

from __future__ import annotations

import builtins
import json
import os
import runpy
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_sources import SOURCES
from PIL import Image
from ray_tasks import fail, wait_for_leave
from small_files import write_random

from fastload import pack_images
from fastload.errors import OptionError, PackError, SourceError
from fastload.pack.on_ray import RayCluster

ray = pytest.importorskip("ray", reason="ray is not installed")
from ray.cluster_utils import Cluster  # noqa: E402

_STORE = 80 * 2**20  # bytes of a node's object store, the least that Ray takes


class Nodes:
    """A head without CPUs, and nodes of one CPU; a lost one is noticed within a second, not after ten."""

    def __init__(self) -> None:
        os.environ.update(RAY_health_check_period_ms="500", RAY_health_check_failure_threshold="2")
        self.env = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": _STORE})
        self.nodes = [self.add(), self.add()]

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, **env: str) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=_STORE, env_vars={**self.env, **env})

    def lose(self, node: Any) -> None:
        """Kills a node as a power failure would."""
        self.cluster.remove_node(node, allow_graceful=False)

    def replace(self) -> None:
        """Loses a node, and adds another."""
        self.lose(self.nodes.pop(0))
        self.nodes.append(self.add())

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with closing(Nodes()) as found:
        yield found


@pytest.fixture(scope="module")
def engine(nodes: Nodes) -> Iterator[RayCluster]:
    """One connection, which calls of `pack_images` take, too: worker processes serve all tests."""
    before = builtins.print
    with RayCluster(nodes.address) as found:
        yield found
    assert builtins.print is before


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for i in range(60):
        path = folder / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 256, (5, 6, 3), np.uint8))
        coarse.resize((60, 50)).save(path)
    return folder


def same_files(folder: Path, other: Path) -> None:
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    for file in files:
        assert (folder / file).read_bytes() == (other / file).read_bytes(), file


def test_shards_and_index_are_those_of_one_machine(engine: RayCluster, photos: Path, tmp_path: Path) -> None:
    options = {"size": 24, "shards": 5, "spread": 2}
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    whole = pack_images(photos, tmp_path / "here" / "out.h5", workers=0, **options)
    said: list[tuple[str, int, int]] = []
    report = pack_images(
        photos, tmp_path / "there" / "out.h5", engine="ray", **options,
        progress=lambda *now: said.append(now),
    )  # fmt: skip
    same_files(tmp_path / "here", tmp_path / "there")
    for name in ("num_samples", "splits", "converted", "notes", "num_shards", "chunks", "pixel_bytes", "file_bytes"):
        assert getattr(report, name) == getattr(whole, name), name
    counts = [done for stage, done, total in said if stage == "packing" and total == 60]
    assert counts == sorted(counts) and counts[-1] == 60
    assert ("reading headers", 60, 60) in said


@pytest.mark.parametrize("name", ["parquet", "mnist"])
def test_sources_that_this_process_unpacked_are_packed_there(name: str, engine: RayCluster, tmp_path: Path) -> None:
    source = SOURCES[name](tmp_path / "source")
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    pack_images(source, tmp_path / "here" / "out.h5", workers=0, shards=2)
    pack_images(source, tmp_path / "there" / "out.h5", shards=2, engine="ray")
    same_files(tmp_path / "here", tmp_path / "there")


def began(folder: Path) -> int:
    """How many attempts have begun."""
    return len((folder / "began").read_text().splitlines()) if (folder / "began").exists() else 0


def until(true: Callable[[], object], thread: threading.Thread) -> None:
    """Waits until something is true; or the thread has ended, which is an error."""
    while not true():
        assert thread.is_alive(), "it ended too early"
        time.sleep(0.02)


def in_thread(work: Callable[..., Any], *args: Any, **options: Any) -> tuple[threading.Thread, list[Any]]:
    """Runs a function in a thread, as nodes start and end in the main one; its result comes into the list."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work(*args, **options)), daemon=True)
    thread.start()
    return thread, results


def test_a_task_whose_node_is_lost_runs_elsewhere(nodes: Nodes, engine: RayCluster, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    tasks = [(str(folder), 300.0) for folder in folders]
    thread, found = in_thread(lambda: dict(engine.run(wait_for_leave, tasks)))
    until(lambda: all(map(began, folders)), thread)
    nodes.replace()
    # Its worker outlives it by up to a second, and would hand its result over: so none has leave before that.
    until(lambda: sum(map(began, folders)) == 3, thread)
    for folder in folders:
        (folder / "leave").touch()
    thread.join()
    assert found == [dict(enumerate(map(str, folders)))]


@pytest.mark.parametrize(
    ("kind", "error", "times", "said"),
    [
        ("source", SourceError, 1, "no images"),
        ("storage", PackError, 3, "No space left"),
        ("worker", PackError, 3, "died|crash"),
    ],
)
def test_what_the_source_causes_is_final_and_the_rest_tried_again(
    kind: str,
    error: type[Exception],
    times: int,
    said: str,
    engine: RayCluster,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=said):
        list(engine.run(fail, [(str(tmp_path), kind)]))
    assert began(tmp_path) == times


def test_a_node_lost_in_the_middle_of_a_pack_changes_no_byte(
    nodes: Nodes, engine: RayCluster, photos: Path, tmp_path: Path
) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    options = {"size": 64, "shards": 6, "chunk_bytes": 64 * 64 * 3}
    pack_images(photos, tmp_path / "here" / "out.h5", workers=0, **options)
    there = tmp_path / "there"
    thread, found = in_thread(pack_images, photos, there / "out.h5", engine="ray", **options)
    until(lambda: any(there.glob("*.try-*.part")), thread)
    nodes.replace()
    thread.join()
    assert found[0].num_samples == 60
    same_files(tmp_path / "here", there)


def test_after_a_repair_the_same_command_goes_on(
    nodes: Nodes, engine: RayCluster, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    shutil.copytree(photos, tmp_path / "photos")
    image = next((tmp_path / "photos").rglob("*.jpg"))
    good = image.read_bytes()
    image.write_bytes(good[:-200])
    options = {"size": 24, "shards": 2, "engine": "ray"}
    with pytest.raises(SourceError, match=image.name):
        pack_images(tmp_path / "photos", tmp_path / "there" / "out.h5", **options)
    image.write_bytes(good)
    assert pack_images(tmp_path / "photos", tmp_path / "there" / "out.h5", **options).num_samples == 60
    assert len(list((tmp_path / "there").iterdir())) == 3


_DIFFERENT = """
import importlib.metadata, os
version, opened = importlib.metadata.version, os.open
importlib.metadata.version = lambda name: "9.9" if name == "fastload-hdf5" else version(name)
def missing(path, *args, **options):
    if os.fsdecode(path).endswith(".jpg"):
        raise FileNotFoundError(2, "No such file or directory")
    return opened(path, *args, **options)
os.open = missing
"""


def test_a_node_that_differs_is_named_before_anything_is_packed(
    nodes: Nodes, engine: RayCluster, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(_DIFFERENT)
    (tmp_path / "out").mkdir()
    other = nodes.add(PYTHONPATH=os.pathsep.join([str(tmp_path / "other"), nodes.env["PYTHONPATH"]]))
    try:
        with pytest.raises(PackError, match=r"nodes differ from this machine") as caught:
            pack_images(photos, tmp_path / "out" / "out.h5", shards=2, engine="ray")
    finally:
        nodes.lose(other)
    said = str(caught.value)
    assert said.count("fastload 9.9") == 1
    assert "does not see the source: cannot be read: No such file" in said
    assert not list((tmp_path / "out").iterdir())


def test_what_cannot_be_packed_there_is_said(engine: RayCluster, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="exists in this process only"):
        pack_images([(np.zeros((4, 4), np.uint8), 0)], tmp_path / "out.h5", shards=1, engine="ray")
    with pytest.raises(OptionError, match="say how many"):
        pack_images(photos, tmp_path / "out.h5", engine="ray")
    with pytest.raises(OptionError, match="accepted: ray"):
        pack_images(photos, tmp_path / "out.h5", shards=2, engine="dask")  # type: ignore[arg-type]
    code = "import sys, fastload; fastload.pack_images(*sys.argv[1:3], shards=2, engine='ray', address='127.0.0.1:9')"
    ended = subprocess.run(
        [sys.executable, "-c", code, photos, tmp_path / "out.h5"], capture_output=True, text=True, check=False
    )
    assert "PackError: no Ray cluster can be reached at 127.0.0.1:9" in ended.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # its own modules, of each other
def test_ranks_of_ray_train_see_each_sample_once_an_epoch_in_a_new_order(
    engine: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("pandas", "pyarrow", "pydantic", "torch"):
        pytest.importorskip(package, reason=f"{package}, which Ray Train needs, is not installed")
    script = Path(__file__).parents[2] / "tools" / "examples" / "ray_train.py"
    rows, epochs = 64, 2
    packed = write_random(tmp_path / "file.h5", rows=rows, size=(8, 8, 3), classes="0123456789", chunk_rows=4)
    monkeypatch.chdir(tmp_path)
    words = [packed.name, "--epochs", str(epochs), "--results", "results", "--seen", "seen"]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # so soon is the end noticed, not after two seconds
    runpy.run_path(str(script), run_name="__main__")  # in this process, whose connection it takes
    seen = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("seen.*"))]
    assert len(seen) == 2
    for epoch in range(epochs):
        shares = [seen[rank][epoch] for rank in range(2)]
        assert sorted(shares[0] + shares[1]) == list(range(rows)), f"epoch {epoch}"
        assert len(shares[0]) == len(shares[1])
    assert seen[0][0] + seen[1][0] != seen[0][1] + seen[1][1]
