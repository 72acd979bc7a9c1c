"""Writes docs/comparison.md, and the pictures on it, from the records of run.py and features.toml.

python benchmarks/peers/page.py            the page and the pictures
python benchmarks/peers/page.py --check    says by its exit code whether the page is what the records make
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers.records import BESIDE, COSTS, NAMES, PACKING, RATE, STARTS, Figure, Records, seconds, spread, whole

PEERS = Path(__file__).resolve().parent
ROOT = PEERS.parents[1]
RESULTS = PEERS.parent / "results"
PAGE = ROOT / "docs" / "comparison.md"

OPENING = """
fastload beside other ways to load images for training, at the same work, on one machine without a GPU. The best of a
column is in bold. Below: each work by itself, with ranges and settings; where [others are
ahead](#where-others-are-ahead); [what each can do](#what-each-can-do); and the [conditions](#conditions) under which
this was measured. `benchmarks/peers/page.py` writes the page from the records: no figure in a table is typed by hand.
"""
METHOD = """
Each loader runs in an environment of its own, one process a measurement; in each pass all of them in shuffled order. A
cell is the median, with the lowest and the highest unless they look alike; a ratio is taken within a pass, and its
median is told. The main thread takes each batch and reads all of its bytes once, in memory order. Each loader has the
settings that a short search found fastest, among the worker counts 0, 1, 2 and 4 and what its manual advises; whoever
knows how an adapter in `benchmarks/peers/adapters/` could do better is asked to send the change. fastload runs at its
defaults, with its compiled loops, without which it takes up to twice as long. A run during which others
used more than 0.2 CPUs is repeated:
"""
SAME_WORK = """
What is the same, and what is not. Batches are shuffled anew in each epoch: fastload within windows of 16
chunks of 8 MB, of a file that was packed in random order; WebDataset within a buffer of 1,000 samples in each worker;
LitData within one chunk of 64 MB after another; all others as a whole. Without a transform, every image comes exactly
once with its label: a sum over all pixels is compared. Behind a transform, labels are compared, and the mean of all
pixels within 3 %; where fewer images came, workers dropped short batches of their own. fastload decodes the rows of a
JPEG that the crop needs, at a smaller scale where enough pixels are left; DALI and tf.data decode the part that the
crop needs, FFCV and the others all of it. WebDataset, Streaming, LitData, h5py, datasets and ImageFolder crop by
torchvision and decode by Pillow: the torchvision that goes with this build of torch comes without its own decoder,
with which JPEGs would come faster.
"""
SCOPE = """
All data are on a local disk, and fit into the page cache. What DALI does on a GPU is not measured here, nor what
Streaming, LitData and WebDataset are made for: object storage, and data larger than the memory.
"""
BESIDE_TEXT = """
Pixels of 218x178x3 again. The main thread reads a batch and then works about 10 ms: a step on another device, for
which it only waits, eager training of a small torch net, or pure Python. The share is that of the time which its own
work takes when nothing runs beside it; 1 means that it never waited and was never slowed down, and what is above 1 is
how unsteady that time is.
"""
STARTS_TEXT = """
From the construction of the loader, imports done, to its first batch; from the beginning of each later epoch to its
first; and the former where the files' pages were dropped from the page cache before.
"""
COSTS_TEXT = """
Of the process with all its children: CPU seconds also of those that ended; anonymous and shared memory at its highest
during an epoch, without the pages of mapped files, but with Python and torch, some 150 MB in each.
"""
PACKING_TEXT = """
8,192 faces as JPEG files, decoded and stored as pixels: the whole process from its start to its end, with as many
workers as there are CPUs where it has workers; then with the time to sync what it wrote. fastload syncs by itself, so
its two figures are alike. Last, what it makes of a kill -9 of all its processes after three quarters of that time:
how much of the whole CPU time the same call then takes.
"""
RESUMING_TEXT = """
An epoch of the same pixels is left at its half, and a new loader goes on from what the first one told. Some whose
adapter has no state can have one with more work of one's own, as said below.
"""
FEATURES_TEXT = """
A number leads to what the cell rests on: a test or a page of ours, or a file or page of theirs. "None found" was
looked for, which proves no absence; what an empty cell would say is not established.
"""

GIVES_UP = {
    "memmap": "nothing is read ahead, so in training its time adds to the step's; no transform, rank or resuming",
    "ffcv": "no resuming within an epoch was found, and it has to be compiled",
    "dali": "its pipelines are written in operators of its own",
    "torchdata_nodes": "the gather and its transforms are one's own code",
    "tf_data": "with `source=tensor` all images lie in memory",
    "lmdb_loader": "the order, its resuming and what a value holds are one's own code",
}
WHY = {  # by the heading of a figure
    "images/s": "Small rows are copied in groups of 12 MB, past the CPU's cache, and half of the CPU time goes into "
    "planning and handing over; a gather in the main thread finds its output in the cache. Its threads spin: beside "
    "another busy process it all but stands still.",
    "main thread trains": "fastload's threads share two cores and their memory with the training.",
    "main thread in pure Python": "fastload's threads share two cores and Python's lock with it.",
    "first batch": "fastload first checks the file's header, about 10 ms, and starts its threads.",
    "cold: first batch": "fastload reads ahead at once: 140 MB when the first batch, of 30 MB, is there.",
    "CPU s per 1,000 images": "A gather by hand plans nothing, hands nothing over, and its output stays in the cache.",
    "memory, MB": "fastload has five batches: three that the user may hold without a copy, two that are being filled.",
    "bytes on disk, MB": "fastload keeps pixels as they are.",
}

WORKS = {
    "rows_218x178": ("Pixels, 218x178x3", "8,192 faces of 116 KB, batches of 256, uint8"),
    "rows_32": ("Pixels, 32x32x3", "24,576 images of 3 KB, batches of 1,024, uint8"),
    "rows_256": ("Pixels, 256x256x3", "2,048 images of 197 KB, batches of 128, uint8"),
    "raw_augment": (
        "Pixels, 256x256x3, augmented",
        "the same, RandomResizedCrop 224, flip and normalization to float32, batches of 128",
    ),
    "jpeg_photos": (
        "JPEG photos",
        "2,496 photos of about 400x533, decoded in each epoch, RandomResizedCrop 224, batches of 64, uint8",
    ),
    "jpeg_faces": (
        "Small JPEGs",
        "8,192 faces of 218x178, decoded in each epoch, RandomResizedCrop 128, batches of 256, uint8",
    ),
}
FEATURES = (
    ("What it reads", {"formats": "formats", "cloud": "cloud", "integrity": "integrity"}),
    ("In training", {"resume": "resumes within an epoch", "ends": "last batches", "ddp": "several ranks"}),
    ("Work beside training", {"processes": "workers", "gpu": "augmentation on a GPU", "echo": "echo"}),
    ("To have it", {"pack_resume": "packing resumed", "verdicts": "verdicts", "install": "install"}),
    ("Its release", {"licence": "licence"}),
)


def prose(text: str) -> list[str]:
    """The lines of a paragraph."""
    return textwrap.wrap(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def bold_best(cells: dict[str, tuple[float | None, str]], more: bool) -> dict[str, str]:
    """The cells, that of the best median in bold, and each whose median reads the same."""
    known = [(value, text.partition(" (")[0]) for value, text in cells.values() if value is not None]
    best = (max if more else min)(known)[1] if known else None
    return {peer: f"**{text}**" if text.partition(" (")[0] == best else text for peer, (_, text) in cells.items()}


def table(heads: list[str], rows: Iterable[list[str]]) -> list[str]:
    """A table in Markdown."""
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]


def told(settings: dict[str, Any] | None) -> str:
    """Settings in a cell."""
    return ", ".join(f"`{name}={value}`" for name, value in (settings or {}).items()) or "defaults"


class Page:
    """The page, part by part."""

    def __init__(self, records: Records, installed: dict[str, Any], features: dict[str, Any]) -> None:
        self.records, self.installed, self.features = records, installed, features

    def text(self) -> str:
        """The whole of it."""
        parts = [self.opening(), self.overview(), *(self.rates(work) for work in WORKS)]
        parts += [self.beside(), self.starts(), self.costs(), self.packing(), self.resuming(), self.wins()]
        parts += [self.table_of_features(), self.conditions(), self.environments()]
        return "\n\n".join("\n".join(part) for part in parts if part) + "\n"

    def opening(self) -> list[str]:
        return ["# Side by side", "", *prose(OPENING)]

    def overview(self) -> list[str]:
        """The median rates of all works, loaders in the order of the first."""
        works = [work for work in WORKS if self.records.peers(work)]
        if not works:
            return ["There are no records yet."]
        medians = {
            work: {peer: statistics.median(self.records.values(work, peer, RATE)) for peer in self.records.peers(work)}
            for work in works
        }
        columns = [
            bold_best({peer: (value, whole(value)) for peer, value in found.items()}, more=True)
            for found in medians.values()
        ]
        peers = [peer for peer in NAMES if any(peer in column for column in columns)]
        peers.sort(key=lambda peer: -medians[works[0]].get(peer, 0.0))
        rows = [[NAMES[peer], *(column.get(peer, "") for column in columns)] for peer in peers]
        return ["Images/s, medians:", "", *table(["loader", *(WORKS[work][0] for work in works)], rows)]

    def conditions(self) -> list[str]:
        any_record = next((runs[0] for runs in self.records.runs.values()), None)
        if any_record is None:
            return []
        lines = [
            "## Conditions",
            "",
            "```sh",
            "python benchmarks/peers/environments.py   # an environment for each loader, with pinned versions",
            "python benchmarks/peers/run.py --search   # data, packed files, and the settings of each loader",
            "python benchmarks/peers/run.py            # the figures",
            "python benchmarks/peers/page.py           # this page",
            "```",
        ]
        machine = any_record["machine"]
        commands = sorted({one["command"] for runs in self.records.runs.values() for one in runs})
        commits = sorted({one["commit"] for runs in self.records.runs.values() for one in runs})
        measured = [one for runs in self.records.runs.values() for one in runs]
        repeated = sum(bool(one.get("repeated")) for one in measured)
        lines += [
            "",
            *prose(
                f"""Measured on {machine["cores"]} cores ({machine["cpu"]}), {machine["memory_gib"]} GiB of memory,
                {machine["system"]}, without a GPU, at fastload {", ".join(commits)}; a + stands for changes that
                were not committed. Passes were added at several times; fastload ran in all of them. Another machine
                gives other numbers: with more cores, loaders that need more processes gain."""
            ),
            "",
            *prose(f"{METHOD} {repeated} of {len(measured)} were."),
            "",
            *prose(SAME_WORK),
            "",
            *prose(SCOPE),
            "",
            *prose("Commands of the records: " + "; ".join(f"`{command}`" for command in commands) + "."),
        ]
        return lines

    def rates(self, work: str) -> list[str]:
        title, about = WORKS[work]
        peers = self.records.peers(work)
        if not peers:
            return []
        medians = {peer: statistics.median(self.records.values(work, peer, RATE)) for peer in peers}
        cells = bold_best(
            {peer: (medians[peer], spread(self.records.values(work, peer, RATE), whole)) for peer in peers}, more=True
        )
        rows = []
        for peer in sorted(peers, key=lambda peer: -medians[peer]):
            one = self.records.runs[work, peer][0]
            ratio = "" if peer == "fastload" else spread(self.records.ratios(work, peer, RATE), "{:.2f}".format)
            passes = str(len(self.records.values(work, peer, RATE)))
            rows.append([NAMES[peer], cells[peer], ratio, passes, told(one.get("settings")), self.agrees(work, peer)])
        lines = [f"## {title}", "", f"{about[0].upper()}{about[1:]}; page cache warm, nothing beside.", ""]
        lines += table(["loader", "images/s", "fastload over it", "passes", "settings", "the same images"], rows)
        lines += ["", f"![Images per second: {title}](../benchmarks/results/peers_{work}.png)"]
        if unmeasured := self.records.unmeasured(work):
            lines += [
                "",
                "Not measured: " + "; ".join(f"{NAMES[peer]} ({why})" for peer, why in unmeasured.items()) + ".",
            ]
        return lines

    def agrees(self, work: str, peer: str) -> str:
        """Whether the images and labels of an epoch were those that were prepared."""
        for one in self.records.runs[work, peer]:
            found = one.get("verify")
            if not found:
                continue
            if "failed" in found:
                return f"not checked: {found['failed']}"
            if found["wrong"]:
                return found["wrong"]
            if found["images"] != found["expected"]["images"]:
                return f"**{found['images']:,} of {found['expected']['images']:,}**"
            if "checksum" in found:
                same = all(found[key] == found["expected"][key] for key in ("images", "labels", "checksum", "distinct"))
                return "equal, each once" if same else "**differ**"
            ours = next((own["verify"] for own in self.records.runs[work, "fastload"] if "verify" in own), None)
            if ours is None:
                return ""
            near = abs(found["mean"] - ours["mean"]) <= 0.03 * max(1.0, abs(ours["mean"]))
            labels = found["labels"] == ours["labels"] and found["images"] == ours["images"]
            kind = "" if one.get("antialiased") else ", not antialiased"
            return ("labels equal, mean alike" if near and labels else "**differ**") + kind
        return ""

    def columns(self, work: str, figures: tuple[Figure, ...]) -> list[str]:
        """A table of several figures of one work, fastload first."""
        peers = [
            peer for peer in self.records.peers(work) if any(self.records.values(work, peer, one) for one in figures)
        ]
        if not peers:
            return []
        columns = []
        for figure in figures:
            cells: dict[str, tuple[float | None, str]] = {}
            for peer in peers:
                values = self.records.values(work, peer, figure)
                cells[peer] = (statistics.median(values) if values else None, spread(values, figure.write))
            columns.append(bold_best(cells, figure.more))
        rows = [[NAMES[peer], *(column[peer] for column in columns)] for peer in peers]
        return table(["loader", *(figure.heading for figure in figures)], rows)

    def beside(self) -> list[str]:
        found = self.columns("rows_218x178", BESIDE)
        return found and [
            "## Beside a main thread that works",
            "",
            *prose(BESIDE_TEXT),
            "",
            *found,
        ]

    def starts(self) -> list[str]:
        lines = []
        for work in ("rows_218x178", "jpeg_photos"):
            if found := self.columns(work, STARTS):
                lines += ["", f"{WORKS[work][0]}:", "", *found]
        return lines and [
            "## First batches, and a cold page cache",
            "",
            *prose(STARTS_TEXT),
            *lines,
        ]

    def costs(self) -> list[str]:
        lines = []
        for work in WORKS:
            if found := self.columns(work, COSTS):
                lines += ["", f"{WORKS[work][0]}:", "", *found]
        return lines and [
            "## CPU and memory",
            "",
            *prose(COSTS_TEXT),
            *lines,
        ]

    def packing(self) -> list[str]:
        work = "pack_faces"
        peers = [peer for peer in NAMES if self.records.values(work, peer, PACKING[0])]
        if not peers:
            return []
        columns = []
        for figure in PACKING:
            cells: dict[str, tuple[float | None, str]] = {}
            for peer in peers:
                values = self.records.values(work, peer, figure)
                cells[peer] = (statistics.median(values), spread(values, figure.write))
            columns.append(bold_best(cells, figure.more))
        ratios = {peer: spread(self.records.ratios(work, peer, PACKING[1]), "{:.2f}".format) for peer in peers}
        rows = [
            [
                NAMES[peer],
                *(column[peer] for column in columns),
                "" if peer == "fastload" else ratios[peer],
                self.killed(peer),
            ]
            for peer in peers
        ]
        heads = ["loader", *(figure.heading for figure in PACKING), "fastload over it, synced", "killed on its way"]
        return [
            "## Packing",
            "",
            *prose(PACKING_TEXT),
            "",
            *table(heads, rows),
        ]

    def killed(self, peer: str) -> str:
        """What came of a packer that was killed."""
        every = [one["killed"] for one in self.records.runs["pack_faces", peer] if "killed" in one]
        if not every:
            return ""
        found = every[-1]
        if found["how"] != "packed":
            return found["how"]
        share = found["cpu_over_whole"]
        what = "goes on" if share < 0.8 else "starts anew"
        same = "the same" if found["same_bytes"] else "other"
        return f"{what}, {share:.2f} of the CPU time; {same} bytes"

    def resuming(self) -> list[str]:
        rows = []
        for peer in self.records.peers("rows_218x178"):
            found = next((one["resume"] for one in self.records.runs["rows_218x178", peer] if "resume" in one), None)
            if found is None:
                continue
            if "failed" in found:
                rows.append([NAMES[peer], f"failed: {found['failed']}", "", ""])
            elif found["how"] == "none":
                rows.append([NAMES[peer], "none in its adapter", "", ""])
            else:
                order = "yes" if found["same_rest"] else "no"
                rows.append([NAMES[peer], f"{found['state_bytes']} bytes", seconds(found["first_batch_s"]), order])
        return rows and [
            "## Resuming within an epoch",
            "",
            *prose(RESUMING_TEXT),
            "",
            *table(["loader", "state", "to the first batch", "the same order as uninterrupted"], rows),
        ]

    def wins(self) -> list[str]:
        """Where others are ahead, and why, or what they give up for it."""
        lines = []
        for figure in (RATE, *BESIDE, *STARTS, *COSTS, *PACKING[1:]):
            found = []
            for work in ("pack_faces",) if figure in PACKING else WORKS:
                ahead = self.ahead(work, figure)
                if ahead:
                    found.append(f"{WORKS[work][0]}, {', '.join(ahead)}" if work in WORKS else ", ".join(ahead))
            if found:
                heading = figure.heading
                line = f"- {heading[0].upper()}{heading[1:]}: {'; '.join(found)}."
                lines.append(f"{line} {WHY[heading]}" if heading in WHY else line)
        gives_up = [f"{NAMES[peer]}: {what}" for peer, what in GIVES_UP.items()]
        text = "Or less than 5 % behind: how many times as good, the median within a pass."
        return lines and [
            "## Where others are ahead",
            "",
            text,
            "",
            *lines,
            "",
            *prose(f"What some of them give up for it: {'; '.join(gives_up)}."),
        ]

    def ahead(self, work: str, figure: Figure) -> list[str]:
        """The loaders ahead of fastload, or close behind, and how many times as good they are."""
        times = {}
        for peer in NAMES:
            ratios = self.records.ratios(work, peer, figure) if peer != "fastload" else []
            if ratios and (ratio := statistics.median(ratios)) > 0:
                times[peer] = 1 / ratio if figure.more else ratio
        order = sorted((peer for peer in times if times[peer] >= 0.95), key=lambda peer: -times[peer])
        return [f"{NAMES[peer]} {times[peer]:.2f}" for peer in order]

    def environments(self) -> list[str]:
        rows, failed = [], []
        for peer in NAMES:
            one = self.installed.get(peer)
            if one is None:
                continue
            if "failed" in one:
                failed.append(f"- {NAMES[peer]}: {one['failed']}")
            else:
                said = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
                rows.append([NAMES[peer], said, one.get("built") or "not established", f"{one['mib']:,}"])
        if not rows:
            return []
        lines = ["## Versions", "", "Python " + next(iter(self.installed.values()))["python"] + "."]
        lines += ["", *table(["loader", "versions", "its archive is of", "environment, MiB"], rows)]
        return [*lines, "", "What could not be installed:", "", *failed] if failed else lines

    def table_of_features(self) -> list[str]:
        features = {peer: told for peer, told in self.features.items() if peer in NAMES}
        lines = ["## What each can do", "", *prose(FEATURES_TEXT)]
        sources: list[str] = []
        for title, columns in FEATURES:
            rows = []
            for peer, cells in features.items():
                row = [NAMES[peer]]
                for key in columns:
                    said, source = cells.get(key, ("", ""))
                    if source and source not in sources:
                        sources.append(source)
                    row.append(f"{said} [{sources.index(source) + 1}]" if source else said)
                if any(row[1:]):
                    rows.append(row)
            lines += ["", f"### {title}", "", *table(["loader", *columns.values()], rows)]
        lines += ["", "### What the cells rest on", ""]
        lines += [f"{number}. {source}" for number, source in enumerate(sources, 1)]
        read = "; ".join(f"{name} at {commit}" for name, commit in self.features["read"].items())
        return [*lines, "", *prose(f"Repositories as read: {read}.")]


def draw(records: Records) -> None:
    """A picture of the rates of each work."""
    from matplotlib import pyplot as plt

    import plots

    plots.style()
    for work, (title, _) in WORKS.items():
        peers = records.peers(work)
        if not peers:
            continue
        rates = {peer: records.values(work, peer, RATE) for peer in peers}
        peers.sort(key=lambda peer: -statistics.median(rates[peer]))
        figure, axes = plt.subplots(figsize=(9, 1.1 + 0.34 * len(peers)))
        axes.grid(axis="x", color="#e6eaec")
        for place, peer in enumerate(peers):
            middle, low, high = statistics.median(rates[peer]), min(rates[peer]), max(rates[peer])
            color = plots.OURS if peer == "fastload" else plots.BASE
            bars = {"ecolor": "#44525a", "lw": 1, "capsize": 2}
            axes.barh(place, middle, 0.7, color=color, xerr=[[middle - low], [high - middle]], error_kw=bars)
            axes.annotate(
                whole(middle), (high, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5
            )
        axes.set_yticks(range(len(peers)), [NAMES[peer] for peer in peers])
        axes.set_ylim(len(peers) - 0.4, -0.6)
        axes.set_xlim(0, 1.15 * max(max(values) for values in rates.values()))
        axes.set_xlabel("images/s")
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda value, _: whole(value))
        axes.set_title(title)
        figure.tight_layout()
        figure.savefig(RESULTS / f"peers_{work}.png", metadata={"Software": None})
        plt.close(figure)


def page(results: Path = RESULTS) -> tuple[str, Records]:
    """The page that the records make, and the records."""
    lines = results / "peers.jsonl"
    records = Records(json.loads(line) for line in lines.read_text().splitlines()) if lines.exists() else Records(())
    installed = results / "peers_installed.json"
    features = tomllib.loads((PEERS / "features.toml").read_text())
    return Page(records, json.loads(installed.read_text()) if installed.exists() else {}, features).text(), records


def main() -> None:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is another")
    options = parser.parse_args()
    text, records = page()
    if options.check:
        sys.exit(0 if PAGE.read_text() == text else f"{PAGE}: not what the records make; run benchmarks/peers/page.py")
    PAGE.write_text(text)
    draw(records)


if __name__ == "__main__":
    main()
