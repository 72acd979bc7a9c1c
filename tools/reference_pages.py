"""What is made from the package: the pages on every command and every field of their JSON, and types of arguments.

`python tools/refresh_golden.py pages` writes them; a test sees that they are what it would write.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import click

from fastload.cli import app
from fastload.cli.command_line import Command, Commands
from fastload.estimate import EncodingEstimates
from fastload.estimate.rates import DiskRate
from fastload.inspection.chunk_layout import ChunkLayout
from fastload.inspection.info import FileInfo
from fastload.inspection.shuffle_quality import ShuffleQuality
from fastload.inspection.verify import SourceReport, VerifyReport
from fastload.options import declared
from fastload.options.pack import PackCall
from fastload.options.repack import AppendOptions, ExportOptions, MergeOptions, RepackOptions
from fastload.profiling.bench.benchmark import BenchResult
from fastload.profiling.bench.training_loop import LoopFigures
from fastload.profiling.tune.candidates import Row
from fastload.profiling.tune.search import Tuned
from fastload.profiling.verdict import CAUSES
from fastload.remote.contents import CacheCheck, CacheContents
from fastload.timing.results import SCHEMA, Measured, Verdict

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

# --- every command ----------------------------------------------------------------------------------------------------

_COMMANDS_HEAD = """# Commands

Every command with its options, as `fastload COMMAND --help` prints them. Errors are one line on stderr and exit code 1;
2 is a usage error, 130 is Ctrl-C; [`doctor`](#fastload-doctor) ends with the exit code of the script that it ran. What
`--json` prints: [JSON](json.md).

<!-- Written by `python tools/refresh_golden.py pages`. -->
"""


def all_commands(group: Commands = app, above: str = "fastload") -> Iterator[tuple[str, Command]]:
    """Yields each command with the words by which it is called, those of groups in their place."""
    context = click.Context(group, info_name=above)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if isinstance(found, Commands):
            yield from all_commands(found, f"{above} {name}")
        else:
            assert isinstance(found, Command), f"{name} is a command of this package"
            yield f"{above} {name}", found


def commands_page() -> str:
    """Returns docs/commands.md."""
    parts = [_COMMANDS_HEAD]
    options = [(", ".join(each.opts), each.help or "") for each in app.params if isinstance(each, click.Option)]
    parts.append(_table("option", "", options))
    for words, command in all_commands():
        usage = " ".join([words, *command.collect_usage_pieces(click.Context(command, info_name=words))])
        parts.append(f"\n## {words}\n\n```text\n{usage}\n```\n\n{_prose(command.help or '')}\n")
        for heading, lines in command.lines.items():
            parts.append(f"\n{_table(heading[0].lower() + heading[1:], '', lines)}")
        if command.examples:
            parts.append(f"\n```text\n{command.examples}\n```\n")
    return "".join(parts)


def _prose(text: str) -> str:
    """Returns the help of a command as Markdown: its options as code."""
    return re.sub(r"(?<![\w`-])(--[a-z][a-z-]+)", r"`\1`", text)


def _table(first: str, second: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {first} | {second} |", "| --- | --- |"]
    lines += [f"| `{_cell(term)}` | {_cell(_prose(text))} |" for term, text in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# --- every field of their JSON ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """The type of a value in JSON."""

    name: str  # text, integer, number, true or false, null, list, map (an object with any names), object
    parts: tuple[Kind, ...] = ()  # of a list or map its values; of what may be several things ("or") each
    shape: str = ""  # of an object, the name of its shape

    def __str__(self) -> str:
        if self.name == "or":
            return " or ".join(dict.fromkeys(map(str, self.parts)))
        if self.name == "list":
            return f"list of {self.parts[0].plural}"
        if self.name == "map":
            return f"object of {self.parts[0].plural} by name"
        if self.name == "object" and self.shape in TITLES:
            title = TITLES[self.shape]
            return f"object: [{title[0].lower()}{title[1:]}](#{title.lower().replace(' ', '-')})"
        return self.name

    @property
    def plural(self) -> str:
        """Several of them."""
        if self.name == "or":
            return " or ".join(dict.fromkeys(part.plural for part in self.parts))
        if self.name not in ("list", "map", "object", "text", "integer", "number"):
            return str(self)
        first, *rest = re.split(r"(?=[ :])", str(self), maxsplit=1)
        return "".join([f"{first}s", *rest])

    def objects(self) -> Iterator[tuple[str, str]]:
        """Yields the shapes within it, each with the way there: `[]` through a list, `.NAME` through a map."""
        if self.name == "object":
            yield "", self.shape
        step = {"list": "[]", "map": ".NAME"}.get(self.name, "")
        for part in self.parts:
            yield from ((step + way, shape) for way, shape in part.objects())


@dataclass(frozen=True)
class Entry:
    """A field of an object."""

    name: str
    kind: Kind
    text: str
    optional: bool = False  # whether it is there only where it was asked for


TEXT, INTEGER, NUMBER, TRUTH, NULL = map(Kind, ("text", "integer", "number", "true or false", "null"))
_PLAIN = {"str": TEXT, "Path": TEXT, "int": INTEGER, "float": NUMBER, "bool": TRUTH, "Any": Kind("any value")}

# Shapes of their own section, since several commands have them.
TITLES = {
    "Measured": "A measured run", "Verdict": "A verdict", "LoopFigures": "A training loop", "Spread": "A spread",
    "Row": "A candidate",
}  # fmt: skip

# What `to_dict` changes of a class: fields left out, and fields added or of another type (its text is a property's
# docstring where it is empty).
_FILE = ("file", "str", "name of the file, or the whole URL")
_LEFT_OUT = {"BenchResult": {"path"}, "Tuned": {"name"}}
_ADDED: dict[str, list[tuple[str, str, str]]] = {
    "FileInfo": [
        _FILE,
        ("needs", "dict[str, str]", ""),
        ("shuffle_quality", "ShuffleQuality", "with `--shuffle-quality` alone"),
        ("store_estimates", "EncodingEstimates", "with `--stores` alone"),
    ],
    "VerifyReport": [_FILE, ("ok", "bool", "")],
    "OrderQuality": [("as_good", "bool", ""), ("verdict", "str", "")],
    "BenchResult": [_FILE],
    "BenchOptions": [
        ("shuffle", "str", "True, False, full, or ChunkWindow(chunks=N)"),
        ("source", "bool", "whether one was given"),
    ],
    "Tuned": [
        _FILE,
        ("chosen", "Row | None", "the best one, with its figures of the last race; null: nothing was measured"),
    ],
    "Candidate": [("shuffle", "Any", "full, false, or an object whose `chunks` are those of a window")],
    "Row": [
        ("samples_per_s", "float", ""),
        ("cpu_s_per_1000", "float", "CPU seconds for 1,000 samples, likewise"),
        ("cpu_share", "float", "share of the CPUs that this rank may use, likewise"),
        ("stall_share", "float | None", ""),
        ("over_budget", "bool", "whether it takes more of the CPUs than `--cpu-budget` allows"),
        ("reason", "str", "of the chosen one alone: why"),
    ],
    "CachedContent": [("name", "str", "")],
    "CacheCheck": [("ok", "bool", "whether every chunk is as it was downloaded")],
}  # fmt: skip
_OPTIONAL = {"shuffle_quality", "store_estimates", "reason", "others_cpus of Spread"}

# Shapes that are no class.
_WRITTEN: dict[str, list[tuple[str, str, str]]] = {
    "Spread": [
        ("median", "float", "of all passes or pairs"),
        ("lowest", "float", "of them"),
        ("highest", "float", "of them"),
        ("count", "int", "how many there were"),
        ("others_cpus", "float", "CPUs that other programs used meanwhile; absent where that is not known"),
    ],
    "CacheChecks": [("datasets", "list[CacheCheck]", "that were checked")],
    "Cleared": [
        ("removed", "list[str]", "names of the datasets that were removed"),
        ("in_use", "list[str]", "names of those that were left, since some process has them open"),
        ("bytes", "int", "that all files of the cache take now"),
    ],
}

COMMANDS = {
    "info": ("FileInfo", "fastload info FILE --json"),
    "verify": ("VerifyReport", "fastload verify FILE --json"),
    "bench": ("BenchResult", "fastload bench FILE --json"),
    "tune": ("Tuned", "fastload tune FILE --json"),
    "doctor": ("Measured", "fastload doctor --json FILE -- COMMAND"),
    "cache list": ("CacheContents", "fastload cache list --json"),
    "cache verify": ("CacheChecks", "fastload cache verify --json"),
    "cache clear": ("Cleared", "fastload cache clear --json"),
}
"""What prints JSON -> its shape, and the command."""

_CLASSES: dict[str, type] = {
    each.__name__: each
    for each in (
        BenchResult, CacheCheck, CacheContents, ChunkLayout, DiskRate, EncodingEstimates, FileInfo, LoopFigures,
        Measured, Row, ShuffleQuality, SourceReport, Tuned, Verdict, VerifyReport,
    )
}  # fmt: skip
"""Classes by the names of their shapes; those that they name are added as they are met."""


def shape(name: str) -> list[Entry]:
    """Returns the fields of an object."""
    if name in _WRITTEN:
        return [_entry(name, *one) for one in _WRITTEN[name]]
    made, added = _CLASSES[name], {field: (hint, text) for field, hint, text in _ADDED.get(name, ())}
    texts, hints = dict[str, str](), dict[str, str]()
    for each in reversed(made.__mro__):  # options of two commands have a base
        hints |= {field: _written(hint) for field, hint in inspect.get_annotations(each).items()}
        texts |= _texts_of(each) if inspect.get_annotations(each) else {}
    if is_dataclass(made):
        options = {one.path[0]: one.option for one in declared(made).values()}
        texts |= {field: (one.doc or one.help).rstrip(".") for field, one in options.items()}
    entries = []
    for field in dict.fromkeys(["file"] * ("file" in added) + [*hints, *added]):
        if field not in _LEFT_OUT.get(name, ()):
            hint, text = added.get(field) or (hints[field], "")
            entries.append(_entry(name, field, hint, text or texts.get(field, ""), made))
    return entries


def _written(hint: Any) -> str:
    """Returns an annotation as it is written."""
    return str(getattr(hint, "__forward_arg__", hint))  # of a named tuple


def _entry(shape: str, field: str, hint: str, text: str, made: type | None = None) -> Entry:
    if not text and isinstance(found := getattr(made, field, None), property):
        text = (found.__doc__ or "").partition("\n")[0].rstrip(".")
    kind = _kind_of(ast.parse(hint, mode="eval").body, vars(sys.modules[made.__module__]) if made else {})
    text = text.replace("`fastload.profiling.verdict.CAUSES`", ", ".join(map("`{}`".format, CAUSES)))
    text = re.sub(r"\bNone\b", "null", text[:1].lower() + text[1:] if text[1:2].islower() else text)
    return Entry(field, kind, text, field in _OPTIONAL or f"{field} of {shape}" in _OPTIONAL)


def _kind_of(hint: ast.expr, module: Mapping[str, Any]) -> Kind:
    """Returns the type in JSON of a value that Python calls so; `module` has the names that it uses."""
    match hint:
        case ast.Constant(value=None):
            return NULL
        case ast.BinOp(left=left, right=right):
            return Kind("or", (_kind_of(left, module), _kind_of(right, module)))
        case ast.Subscript(value=ast.Name(id="dict" | "Mapping"), slice=ast.Tuple(elts=[_, value])):
            return Kind("map", (_kind_of(value, module),))
        case ast.Subscript(value=ast.Name(id="tuple" | "list" | "Sequence"), slice=inner):
            several = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return Kind("list", (_kind_of(several[0], module),))
        case ast.Subscript(value=ast.Name(id="Literal")):
            return TEXT
        case ast.Name(id=name) if name in _PLAIN:
            return _PLAIN[name]
        case ast.Name(id=name) if name in _WRITTEN:
            return Kind("object", shape=name)
        case ast.Name(id=name):
            found = module.get(name, _CLASSES.get(name))
            if isinstance(found, type) and inspect.get_annotations(found):
                _CLASSES[name] = found
                return Kind("object", shape=name)
            return TEXT  # another name for some texts
    raise TypeError(f"no type of JSON: {ast.unparse(hint)}")


def _texts_of(made: type) -> dict[str, str]:
    """Returns what the source says of each field of a class: behind it, above it, or in the docstring's list."""
    fields, texts = inspect.get_annotations(made).keys(), dict[str, str]()
    listed = (inspect.getdoc(made) or "").partition("\nAttributes:\n")[2]
    for names, text in re.findall(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8,}.*)*)", listed, re.MULTILINE):
        texts |= dict.fromkeys(names.split(", "), text)
    above = list[str]()
    for code, comment in _lines_with_comments(inspect.getsource(made)):
        if not code.strip():
            above = [*above, comment] if comment else []
            continue
        text, found = " ".join(above), re.match(r" {4}(\w+): ", code)
        group = re.match(r"(\w+(?:, \w+)*): (.*)", text)
        if group and set(names := group[1].split(", ")) <= fields:  # of several fields
            texts |= dict.fromkeys(names, group[2])
            text = ""
        if found and found[1] in fields and (comment or text):
            texts[found[1]] = comment or text
        above = []
    return {name: " ".join(text.split()).rstrip(".") for name, text in texts.items()}


def _lines_with_comments(source: str) -> Iterator[tuple[str, str]]:
    """Yields the code of each line, and its comment."""
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {one.start[0]: one for one in found if one.type == tokenize.COMMENT}
    for number, line in enumerate(source.splitlines(), 1):
        comment = comments.get(number)
        yield (line[: comment.start[1]], comment.string.lstrip("# ")) if comment else (line, "")


_JSON_HEAD = """# JSON

What commands print with `--json`, and `fastload doctor` writes with `--json FILE`: one object, and nothing else on
stdout. Every one has `schema`, an integer, now SCHEMA: a field that is renamed, removed or changes its type raises it,
a new one does not.

Units are in the names: `_s` seconds, `bytes` bytes, `_per_s` a second, `_percent` of 100, `share` of 1, `cpus` CPUs;
`num_` and `count` are numbers of things. `file` is the name of a file, `path` where it lies, as it was given. Numbers
that are not finite are null. `[]` stands for each item of a list, `.NAME` for each name of an object. A report
(`--report`) holds its measured runs in the same form.

A name may stand in several objects with another type: `verdict` is an object in a measured run and text in
`shuffle_quality`, `samples_per_s` a number or [a spread](#a-spread). Read fields by their whole path.

<!-- Written by `python tools/refresh_golden.py pages` from the classes of the results. -->
"""


def json_page() -> str:
    """Returns docs/json.md."""
    parts = [_JSON_HEAD.replace("SCHEMA", str(SCHEMA))]
    for command, (name, call) in COMMANDS.items():
        parts.append(f"\n## fastload {command}\n\n`{call}`")
        parts.append(f": one {Kind('object', shape=name)}.\n" if name in TITLES else f"\n\n{_fields(name)}")
    for name, title in TITLES.items():
        parts.append(f"\n## {title}\n\n{_fields(name)}")
    return "".join(parts)


def _fields(name: str) -> str:
    lines = ["| field | type | |", "| --- | --- | --- |"]
    lines += [f"| `{path}` | {kind} | {_cell(text)} |" for path, kind, text in rows(name)]
    return "\n".join(lines) + "\n"


def rows(name: str, before: str = "") -> Iterator[tuple[str, Kind, str]]:
    """Yields the path, type and text of each field of an object, and of those within it that have no section."""
    for entry in shape(name):
        path = f"{before}{entry.name}"
        yield path, entry.kind, entry.text
        for way, inner in entry.kind.objects():
            if inner not in TITLES:
                yield from rows(inner, f"{path}{way}.")


# --- types of functions' arguments ------------------------------------------------------------------------------------

_KEYWORDS_HEAD = '''"""The types of keyword arguments, for editors and for mypy.

Written by `python tools/refresh_golden.py pages` from the fields of the dataclasses.
"""

from __future__ import annotations

'''

_KEYWORDS: dict[str, type] = {
    "PackKeywords": PackCall,
    "RepackKeywords": RepackOptions,
    "MergeKeywords": MergeOptions,
    "AppendKeywords": AppendOptions,
    "ExportKeywords": ExportOptions,
}


def keywords_module() -> str:
    """Returns fastload/options/keywords.py."""
    modules: dict[str, set[str]] = {"typing": {"TypedDict"}}
    classes = []
    for name, made in _KEYWORDS.items():
        lines = [f"class {name}(TypedDict, total=False):", f'    """The options of `{made.__name__}`."""', ""]
        for one in declared(made).values():
            lines.append(f"    {one.name}: {one.accepts}")
            for word in {node.id for node in ast.walk(ast.parse(one.accepts)) if isinstance(node, ast.Name)}:
                if not hasattr(builtins, word) and not any(word in names for names in modules.values()):
                    modules.setdefault(_home(word, one.module), set()).add(word)
        classes.append("\n".join(lines))
    imports = [_import_of(module, sorted(names, key=str.lower)) for module, names in sorted(modules.items())]
    outside = [line for line in imports if "fastload" not in line]
    inside = [line for line in imports if "fastload" in line]
    return _KEYWORDS_HEAD + "\n".join([*outside, "", *inside]) + "".join(f"\n\n\n{each}" for each in classes) + "\n"


def _import_of(module: str, names: list[str]) -> str:
    """Returns the import, formatted as ruff does it."""
    line = f"from {module} import {', '.join(names)}"
    return line if len(line) <= 120 else f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _home(word: str, module: str) -> str:
    """Returns the module that a type is to be imported from: a class's own, of another name for a type its user's."""
    found = vars(sys.modules[module])[word]
    where = str(found.__module__) if isinstance(found, type) else module
    return "pathlib" if where.startswith("pathlib") else where


PAGES = {
    "docs/commands.md": commands_page,
    "docs/json.md": json_page,
    "fastload/options/keywords.py": keywords_module,
}
"""What is written, by its path in the checkout."""


def write_pages() -> None:
    """Writes them."""
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(), encoding="utf-8")
        print(f"wrote {ROOT / name}")
