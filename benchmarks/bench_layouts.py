"""How many of torchvision's datasets does `fastload pack` read right, or refuse, by their folder and by their name?

    python benchmarks/bench_layouts.py                      all, by folder and by name: a minute or two
    python benchmarks/bench_layouts.py --only by-folder     one of: by-folder, by-name
    python benchmarks/bench_layouts.py --names DTD LSUN --verbose

`tests/layout_trees.py` draws a small tree of files for each class of torchvision.datasets, with the names and forms of
the real ones. Every image holds a number, so that the packed rows are compared with what the class itself gives: which
images, in which splits, of which label, and whether masks, boxes or captions are there.
`by-folder`: `fastload pack FOLDER`, once for each folder that a user may give (the dataset's own, the one above it).
`by-name`: `fastload pack torchvision:NAME --root FOLDER`.
`right`: as the class has it. `refused`: exit code 1; --verbose prints what is said. `in part`: what is missing is named
by a note NOT READ. `wrong`: exit code 0 with anything else, which should be none.
A dataset counts as the worst of its folders. torchvision must be importable for all but the refusals.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import harness

sys.path.insert(0, str(harness.ROOT / "tests"))

import layout_trees

VERDICTS = ("right", "refused", "in part", "wrong")  # from best to worst


def packed(source: str, output: Path, *options: str) -> tuple[int, str]:
    """The exit code of `fastload pack`, and what it prints."""
    from fastload.cli import app

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            app(["pack", source, str(output), "--workers", "0", "--overwrite", *options], prog_name="fastload")
        except SystemExit as done:
            return int(done.code or 0), " ".join(said.getvalue().split())
    return 0, " ".join(said.getvalue().split())


class Bench:
    """The trees, the truth about them and the journal of one run; each public method is one figure."""

    def __init__(self, options: object, journal: harness.Journal, root: Path) -> None:
        self.options, self.journal, self.root = options, journal, root
        self.names = options.names or list(layout_trees.TREES)  # type: ignore[attr-defined]
        datasets = layout_trees.import_torchvision()
        for name in self.names:
            layout_trees.make(name, root)
        self.truths = {name: layout_trees.truth_of(datasets, name, root / name) for name in self.names}

    def by_folder(self) -> None:
        """`fastload pack FOLDER`."""
        verdicts = {}
        for name in self.names:
            truth = layout_trees.truth_of_folder(name, self.truths[name])
            verdicts[name] = [self._verdict(name, truth, str(folder)) for folder in layout_trees.given(name, self.root)]
        self._note("by-folder", verdicts)

    def by_name(self) -> None:
        """`fastload pack torchvision:NAME`."""
        verdicts = {}
        for name in self.names:
            where = self.root / name
            source = f"torchvision:{name}{layout_trees.FURTHER.get(name, '').format(where)}"
            root = where / layout_trees.SUBROOT.get(name, "")
            verdicts[name] = [self._verdict(name, self.truths[name], source, "--root", str(root))]
        self._note("by-name", verdicts)

    def _verdict(self, name: str, truth: object, source: str, *options: str) -> str:
        output = self.root / "out.h5"
        code, said = packed(source, output, *options)
        if code:
            found, what = ("refused", said) if code == 1 else ("wrong", f"exit code {code}: {said}")
        else:
            wrong = layout_trees.compare(name, truth, *layout_trees.packed_of(output))
            named = "NOT READ" in said or "Only the images with masks are listed" in said
            part = named and all(one.startswith("no ") or "missing" in one for one in wrong)
            found, what = "right" if not wrong else "in part" if part else "wrong", "; ".join(wrong)
        if found == "wrong" or self.options.verbose:  # type: ignore[attr-defined]
            print(f"{found:8} {name}, {source.replace(str(self.root), '')}: {what}")
        return found

    def _note(self, figure: str, verdicts: dict[str, list[str]]) -> None:
        worst = {name: max(found, key=VERDICTS.index) for name, found in verdicts.items()}
        counts = Counter(worst.values())
        wrong = sorted(name for name, verdict in worst.items() if verdict == "wrong")
        self.journal.note(
            f"layouts-{figure}", target="0 wrong", file={"datasets": len(verdicts)},
            **{verdict.replace(" ", "_"): counts[verdict] for verdict in VERDICTS}, which_wrong=", ".join(wrong),
        )  # fmt: skip


def main() -> None:
    """Count what the command line asks for."""
    parser = harness.command_line("Count the datasets of torchvision that are packed right, refused or packed wrongly.",
                                  "layouts", figures=("by-folder", "by-name"))  # fmt: skip
    parser.add_argument(
        "--names", nargs="+", choices=list(layout_trees.TREES), metavar="NAME", help="some of them only"
    )
    parser.add_argument("--verbose", action="store_true", help="print what is said of each")
    options = parser.parse_args()
    if options.quick:
        options.names = ["Flowers102", "ImageFolder", "Kinetics"]
    warnings.simplefilter("ignore")  # torchvision's, of Pillow and of files that it leaves open
    os.environ["COLUMNS"] = "20000"  # messages in one line
    journal = harness.begin(options)
    root = Path(tempfile.mkdtemp(dir=options.data))
    try:
        harness.take_figures(Bench(options, journal, root), options.only)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
