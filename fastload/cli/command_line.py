"""Commands of the shell made from Python functions: their parameters are the arguments and options, parsed by click.

A parameter's annotation has its type and how it is shown: `as_json: Annotated[bool, Option("Print...")]`. One
parameter may stand for all options that a dataclass declares: `options: Annotated[dict, Given(RepackOptions)]`.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import click
from click.shell_completion import CompletionItem

from fastload.errors import OptionError
from fastload.options import Option, declared

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # takes no arguments before click 8.4

_OWN = "Options"
"""The heading of options without another; the last, since `--help` is one of them."""
_NAMES_WIDTH = 24
_LEAST_WIDTH, _MOST_WIDTH = 60, 120


@dataclass(frozen=True)
class Argument:
    """Describes how a parameter without a name is shown, under its metavar, and parsed."""

    metavar: str
    help: str
    parser: Callable[[str], Any] | None = None


@dataclass(frozen=True)
class Given:
    """Describes a parameter that stands for all options of a dataclass: a dict of their values by name."""

    options: type
    without: tuple[str, ...] = ()  # options that the command does not have


class _Parsed(_ParamType):
    """Values that a function makes of a text, which may be a path."""

    name = "text"

    def __init__(self, parser: Callable[[str], Any]) -> None:
        self.parser = parser

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parser(value) if isinstance(value, str) else value
        except OptionError as exc:
            raise click.BadParameter(str(exc), ctx, param) from exc

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


@dataclass(frozen=True)
class _Type:
    """A parameter's type as click has it, and its word in the help."""

    of_value: _ParamType
    metavar: str
    many: bool = False
    is_flag: bool = False

    @classmethod
    def of(cls, hint: Any, shown: Option | Argument) -> _Type:
        """Returns the type of a parameter with this annotation."""
        least = shown.least if isinstance(shown, Option) else None
        if NoneType in get_args(hint):  # of a list, or one value, or None: a list
            hint = next(each for each in get_args(hint) if each is not NoneType)
        if shown.parser is not None and get_origin(hint) is not list:
            return cls(_Parsed(shown.parser), "TEXT")
        if get_origin(hint) is list:
            one = cls.of(get_args(hint)[0], shown)
            return cls(one.of_value, one.metavar, many=True)
        if get_origin(hint) is Literal:
            return cls(click.Choice([str(each) for each in get_args(hint)]), "|".join(map(str, get_args(hint))))
        if hint is bool:
            return cls(click.BOOL, "", is_flag=True)
        if hint is int and least is not None:
            return cls(click.IntRange(min=least), "N")
        if hint is float and least is not None:
            return cls(click.FloatRange(min=least), "X")
        return {
            int: cls(click.INT, "N"),
            float: cls(click.FLOAT, "X"),
            str: cls(click.STRING, "TEXT"),
            Path: cls(click.Path(path_type=Path), "PATH"),
        }[hint]


class Command(click.Command):
    """A command whose help has a line or two for each option, under headings, and examples in the end.

    Args:
        lines: of each heading, the options' names and texts.
        examples: what to type, a line each.
    """

    def __init__(self, *args: Any, lines: dict[str, list[tuple[str, str]]], examples: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lines = lines
        self.examples = examples

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the help as wide as the terminal is, within bounds."""
        words = self.collect_usage_pieces(ctx)
        formatter.write(f"{_head('Usage')} {' '.join([ctx.command_path, *words])}\n\n{_filled(self.help or '')}\n")
        for heading in [*(heading for heading in self.lines if heading != _OWN), _OWN]:
            formatter.write(f"{_head(heading)}\n{_columns(self.lines[heading])}\n")
        if self.examples:
            formatter.write(f"{_head('Examples')}\n{textwrap.indent(self.examples, '  ')}\n")


class Commands(click.Group):
    """Commands by name, each imported when it is called: `module:function` and examples."""

    def __init__(self, *args: Any, functions: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self.functions = functions

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names in the order in which they were given."""
        return [*self.functions, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command of a name; None: there is none."""
        if cmd_name not in self.functions:
            return super().get_command(ctx, cmd_name)
        place, examples = self.functions[cmd_name]
        module, _, function = place.partition(":")
        found = getattr(import_module(module), function)
        return found if isinstance(found, click.Command) else command(cmd_name, found, examples)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the help as wide as the terminal is, within bounds."""
        usage = f"{_head('Usage')} {ctx.command_path} [OPTIONS] COMMAND ...\n\n{_filled(self.help or '')}\n"
        lines = []
        for name in self.list_commands(ctx):
            found = self.get_command(ctx, name)
            lines.append((name, (found.help or "").partition("\n")[0] if found else ""))
        options = [
            (", ".join(each.opts), each.help or "") for each in self.get_params(ctx) if isinstance(each, click.Option)
        ]
        formatter.write(f"{usage}{_head('Commands')}\n{_columns(lines)}\n{_head(_OWN)}\n{_columns(options)}")


def command(name: str, function: Callable[..., None], examples: str = "") -> Command:
    """Returns the command that calls a function; its docstring is the help."""
    parameters = list[click.Parameter]()
    lines: dict[str, list[tuple[str, str]]] = {}
    groups = dict[str, list[str]]()  # parameters that stand for options -> these
    hints, takes_context = get_type_hints(function, include_extras=True), False

    def add(name: str, hint: Any, shown: Option | Argument, default: Any) -> None:
        kind = _Type.of(hint, shown)
        required = default is inspect.Parameter.empty
        metavar = shown.metavar or kind.metavar
        common: dict[str, Any] = {"type": kind.of_value, "required": required}
        common |= {} if required else {"default": default}
        if isinstance(shown, Argument):
            nargs = -1 if kind.many else 1
            parameters.append(click.Argument([name], nargs=nargs, metavar=metavar, **common))
            lines.setdefault("Arguments", []).append((metavar, shown.help))
            return
        names = shown.names or (f"--{name.replace('_', '-')}",)
        common |= {"is_flag": True} if kind.is_flag else {"multiple": kind.many}
        parameters.append(click.Option([name, *names], metavar=metavar, **common))
        known = required or default in (None, "", (), False, True) or "default" in shown.help
        text = shown.help if known else f"{shown.help} [{default}]"
        lines.setdefault(shown.group or _OWN, []).append((_term(names, metavar), text))

    for each in inspect.signature(function).parameters.values():
        if hints[each.name] is click.Context:
            takes_context = True
            continue
        hint, shown = get_args(hints[each.name])
        if not isinstance(shown, Given):
            add(each.name, hint, shown, each.default)
            continue
        of_command = [one for one in declared(shown.options).values() if one.option.help]
        groups[each.name] = [one.name for one in of_command if one.name not in shown.without]
        for one in of_command:
            if one.name in groups[each.name]:
                shown = replace(one.option, least=None)  # which the class checks, as for the function
                add(one.name, one.type(), shown, one.option.shown or one.argument_default)
    lines.setdefault(_OWN, []).append(("-h, --help", "Show this and exit."))

    def callback(*context: click.Context, **values: Any) -> None:
        given = {group: {name: values.pop(name) for name in names} for group, names in groups.items()}
        function(*context, **values, **given)

    called = click.pass_context(callback) if takes_context else callback
    help = inspect.cleandoc(function.__doc__ or "")
    return Command(name, callback=called, params=parameters, help=help, lines=lines, examples=examples)


def _term(names: Iterable[str], metavar: str) -> str:
    return f"{', '.join(sorted(names, key=len))} {metavar}".rstrip()


def _head(text: str) -> str:
    return click.style(f"{text}:", bold=True)


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, _LEAST_WIDTH), _MOST_WIDTH)


def _filled(text: str) -> str:
    """Returns paragraphs whose lines are filled; those after the first are apart only where the text has a gap."""
    paragraphs = text.split("\n\n")
    return "\n\n".join("\n".join(_wrapped(" ".join(each.split()), _width())) for each in paragraphs) + "\n"


def _columns(lines: Iterable[tuple[str, str]]) -> str:
    """Returns names and texts side by side; a name that is too long has a line of its own."""
    result = []
    for term, text in lines:
        head = f"  {term}".ljust(_NAMES_WIDTH)
        wrapped = _wrapped(text, _width() - _NAMES_WIDTH)
        if not head.endswith(" "):
            result.append(head.rstrip())
            head = " " * _NAMES_WIDTH
        result.append(head + wrapped[0] if wrapped else head.rstrip())
        result += [" " * _NAMES_WIDTH + line for line in wrapped[1:]]
    return "".join(f"{line}\n" for line in result)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
