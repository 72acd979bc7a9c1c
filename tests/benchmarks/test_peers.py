"""`benchmarks/peers`: fastload beside other loaders, and the page that its records make."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benchmarks" / "peers"


@pytest.fixture
def in_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def test_the_page_is_what_its_records_make(in_benchmarks):
    from peers import page

    assert (ROOT / "docs" / "comparison.md").read_text() == page.page()[0]


def test_the_hand_written_gather_and_fastload_give_the_same_images(warm_python, tmp_path):
    out = tmp_path / "peers.jsonl"
    words = ["--quick", "--here", "--only", "memmap", "--data", str(tmp_path), "--out", str(out)]
    words += ["--work", "rows_32", "jpeg_faces", "pack_faces", "--photos", str(tmp_path / "none")]
    warm_python.finish(Path(__file__).with_name("peers_in_forks.py"), *words, cwd=tmp_path)
    found = {(one["work"], one["peer"]): one for one in map(json.loads, out.read_text().splitlines())}
    assert len(found) == 6
    for peer in ("fastload", "memmap"):
        one = found["rows_32", peer]
        told = one["verify"].pop("expected")
        assert one["verify"] == pytest.approx(told) and told["distinct"] == told["images"] == 384
        assert one["alone"]["images_per_s"] > 0 and one["memory"]["bytes"] > 0
    assert found["jpeg_faces", "fastload"]["verify"]["images"] == 128
    assert found["jpeg_faces", "memmap"]["unsupported"] and found["pack_faces", "memmap"]["unsupported"]
    packed = found["pack_faces", "fastload"]
    assert packed["bytes"] > 128 * 218 * 178 * 3 and packed["cpu_s"] > 0
    # So few images may be packed before the clock says so.
    killed = packed["killed"]
    assert killed["how"] == "was done before it could be killed" or (killed["how"] == "packed" and killed["same_bytes"])


def test_every_adapter_pins_what_it_needs_and_has_a_name_on_the_page(in_benchmarks):
    from peers import environments, records

    for name in environments.adapters():
        assert name in records.NAMES
        assert isinstance(environments.literal(name, "PACKS"), bool)
        for requirement in environments.literal(name, "REQUIREMENTS"):
            assert "==" in requirement or requirement == "pillow", requirement


def test_an_epoch_that_repeats_or_mislabels_an_image_has_other_sums(in_benchmarks, tmp_path):
    from peers.work import Data, Epoch, Work

    work = Work("rows", Data("rows", tmp_path, 8, (4, 6, 3), None, tmp_path), 4, "raw")
    rows, labels = np.random.default_rng(0).integers(0, 256, (8, 4, 6, 3), dtype=np.uint8), np.arange(8) % 3

    def sums(images, of):
        epoch = Epoch(work)
        for first in (0, 4):
            epoch.add(images[first : first + 4], of[first : first + 4])
        return epoch.found()

    right, order = sums(rows, labels), np.random.default_rng(1).permutation(8)
    assert sums(rows[order], labels[order]) == right
    first = np.ascontiguousarray(rows[order].transpose(0, 3, 1, 2))
    assert {**sums(first, labels[order]), "layout": "NHWC"} == right
    twice = np.where(np.arange(8) == 7, 0, np.arange(8))
    assert sums(rows[twice], labels[twice])["distinct"] == 7
    assert sums(rows, labels[::-1])["checksum"] != right["checksum"]
    assert sums(rows[:, :3], labels)["wrong"]


def record(number, peer, rate, **more):
    about = {"run": "1", "command": "run.py", "commit": "c", "options": {"quick": False}}
    about["machine"] = {"cores": 2, "cpu": "a CPU", "memory_gib": 8, "system": "Linux"}
    return {"pass": number, "work": "rows_32", "peer": peer, "alone": {"images_per_s": rate}, **about, **more}


def test_a_loader_that_wins_is_in_bold_and_its_ratio_is_taken_within_a_pass(in_benchmarks):
    from peers import page, records

    rates = [("fastload", 100.0, 50.0), ("ffcv", 200.0, 100.0), ("dali", 25.0, 10.0)]
    found = records.Records(record(at, peer, rates[at]) for peer, *rates in rates for at in range(2))
    assert found.ratios("rows_32", "ffcv", records.RATE) == [0.5, 0.5]
    assert found.ratios("rows_32", "dali", records.RATE) == [4.0, 5.0]
    features = tomllib.loads((PEERS / "features.toml").read_text())
    text = page.Page(found, {"dali": {"failed": "no wheel", "python": "3.11"}}, features).text()
    assert "| FFCV | **150 (100 to 200)** | 0.50 |" in text
    assert "Images/s: Pixels, 32x32x3, FFCV 2.00. " in text


def test_what_the_cells_of_features_rest_on_is_there(in_benchmarks):
    from peers import page

    features = tomllib.loads((PEERS / "features.toml").read_text())
    columns = {key for _, keys in page.FEATURES for key in keys}
    for peer, cells in features.items():
        for key, cell in cells.items():
            if peer != "read":
                assert key in columns, key
                assert (ROOT / cell[1]).exists() or "/" in cell[1] or cell[1].startswith("our "), cell
                assert peer != "fastload" or (ROOT / cell[1]).exists(), cell
