"""Builds docs/ as a static site with Sphinx: `bash tools/docs.sh`. Warnings are errors there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]

project = "fastload"
author = "The fastload authors"
copyright = "2026, the fastload authors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # links such as packing.md#after-a-kill, as on GitHub
default_role = "code"  # docstrings mark code with single backticks
python_maximum_signature_line_length = 80  # longer ones: a parameter a line

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # a class's attributes as a list, not as entries of their own
napoleon_attr_annotations = False  # their types stand in the signature

nitpicky = True
nitpick_ignore_regex = [
    # Types of other projects: their inventories would have to be downloaded.
    ("py:class", r"NDArray|(collections|numpy|os|pathlib|torch)\..+"),
    # Types of results and arguments that are not public names.
    ("py:class", r"fastload\.\w+\..+"),
    # The same as FastLoader's own signature writes them.
    (
        "py:class",
        r"Dataset|Source|Shuffle|Ends|ShareOption|WorkersOption|Echo|CacheOption|BatchOption|Read|CheckOption",
    ),
]

html_theme = "furo"
html_title = f"fastload {release}"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["fastload.css"]
html_copy_source = False

_NDARRAY = re.compile(r"~?numpy\.ndarray\[\(?~?(?:typing\.)?(?:tuple|Any)[^\]]*\]?, ~?numpy\.dtype\[([^\]]+)\]\]")


def shorten_arrays(app: Sphinx, what: str, name: str, obj: object, options: object, *texts: str | None) -> Any:
    """Returns the signature and its result with `NDArray[...]` in place of what NumPy makes of it."""
    return tuple(text and _NDARRAY.sub(r"NDArray[\1]", text) for text in texts)


SEARCH_WORDS = {
    "augmentation": ("crop", "resize", "torchvision", "transforms"),
    "clusters": ("ray", "slurm", "dask"),
    "coming-from-hf-datasets": ("huggingface",),
    "frameworks": ("accelerate", "dataloader", "lightning", "timm", "trainer"),
    "install": ("docker", "install", "pip", "windows"),
    "layouts": ("coco", "formats", "imagenet", "labels", "numpy", "yolo"),
    "measuring": ("bottleneck", "doctor", "profile", "utilization"),
    "object-storage": ("bucket", "cloud", "s3"),
    "own-data": ("custom dataset", "workers"),
    "packing": ("boxes", "jpeg", "masks"),
    "resume": ("checkpoint", "resume", "state_dict"),
    "several-gpus": ("ddp", "distributed", "gpu", "multi-gpu", "nccl", "torchrun"),
    "shuffling": ("imbalanced", "sampler", "seed", "shuffle", "weights"),
    "training": ("batch size", "epoch", "split", "splits"),
    "troubleshooting": ("bug", "crash", "error", "faq", "hang", "help", "out of memory", "slow"),
    "validation": ("evaluation", "test set", "validation"),
}
"""What people type into the search -> the page that answers, which comes first then, before names of the API."""


def add_search_words(app: Sphinx, doctree: nodes.document) -> None:
    """Marks a page as the main entry for its words of `SEARCH_WORDS`."""
    if words := SEARCH_WORDS.get(app.env.docname):
        entries = [("single", word, "", "main", None) for word in words]
        next(doctree.findall(nodes.section)).insert(1, addnodes.index(entries=entries))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", shorten_arrays)
    app.connect("doctree-read", add_search_words)
