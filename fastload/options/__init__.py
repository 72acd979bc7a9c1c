"""Options of functions and commands, each declared once: a field of a dataclass, with its help, parser and check.

A field made by `option` is an option of the class. A field whose type is a dataclass with options stands for all of
them, so `PackCall` has the options of `PackOptions`, `SourceOptions` and `MaskOptions`. From the fields come

- the arguments of the function, checked and with a guess for a misspelt name (`from_arguments`), and its signature and
  docstring (`takes`);
- the options of the command (`fastload.cli.command_line`), and the page docs/commands.md;
- the types that editors and mypy know: `keywords`, which `python tools/refresh_golden.py pages` writes.

Imports nothing that is slow, since every `--help` and every completion of the shell reads these modules. What a check
needs of `format`, `images` and `remote` is imported where it runs.
"""

from __future__ import annotations

import difflib
import inspect
import numbers
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from fastload.errors import OptionError, check_choice, is_whole

_OF_OPTION = "option"  # the metadata of a field

Function = TypeVar("Function", bound=Callable[..., Any])
Options = TypeVar("Options")


@dataclass(frozen=True)
class Option:
    """What is known of an option beside its type and default."""

    help: str
    """The line of the command's help; the default follows in brackets, unless it is None, empty or a flag's, or the
    text says one. Empty: the function alone has it."""
    doc: str = ""
    """What the function's docstring says; empty: the same as `help`."""
    name: str = ""
    """The argument's name, where it is not the field's."""
    names: tuple[str, ...] = ()
    """Of the command, such as `--json`, `-o`, `--shuffle/--no-shuffle`; by default two dashes and the name."""
    metavar: str = ""
    """The word for the value; by default the choices of a Literal, N for a number, PATH for a path, else TEXT."""
    group: str = ""
    """The heading that the command's help has it under."""
    parser: Callable[[str], Any] | None = None
    """Makes the argument of what was typed."""
    shown: str = ""
    """The default, as a user of the command would type it."""
    accepts: str = ""
    """The argument's type, where it is another one than the field's."""
    convert: Callable[[Any], Any] | None = None
    """Makes the field's value of the argument."""
    least: int | None = None
    """The lowest number that is accepted."""
    needs: str = ""
    """What messages say of a number that is lower; by default that it has to be as high."""


def option(
    default: Any,
    help: str,
    doc: str = "",
    *,
    name: str = "",
    names: tuple[str, ...] = (),
    metavar: str = "",
    group: str = "",
    parser: Callable[[str], Any] | None = None,
    shown: str = "",
    accepts: str = "",
    convert: Callable[[Any], Any] | None = None,
    least: int | None = None,
    needs: str = "",
) -> Any:
    """Returns a field of a dataclass that is an option; `Option` says what the arguments mean."""
    known = Option(help, doc, name, names, metavar, group, parser, shown, accepts, convert, least, needs)
    return field(default=default, metadata={_OF_OPTION: known})


@dataclass(frozen=True)
class Declared:
    """An option of a class, found through the fields that hold it."""

    name: str  # the argument's
    path: tuple[str, ...]  # names of the fields that lead to it, the last one its own
    default: Any  # the field's
    hint: str  # the field's type, as it is written
    module: str  # where that was written
    option: Option

    @property
    def accepts(self) -> str:
        """The type of the argument, as it is written."""
        return self.option.accepts or self.hint

    @property
    def argument_default(self) -> Any:
        """The argument's default."""
        return None if self.accepts.endswith("| None") and not self.default else self.default

    def type(self) -> Any:
        """Returns the argument's type."""
        return eval(self.accepts, vars(sys.modules[self.module]))  # as typing.get_type_hints does, for one field


def declared(options: type[Any]) -> Mapping[str, Declared]:
    """Returns the options of a dataclass by their arguments' names, in the order of its fields."""
    found = dict[str, Declared]()
    for each in fields(options):
        known = each.metadata.get(_OF_OPTION)
        if known is not None:
            name, module = known.name or each.name, _module_of(options, each.name)
            found[name] = Declared(name, (each.name,), each.default, str(each.type), module, known)
        elif (inner := _class_of(options, each.name, str(each.type))) is not None:
            for one in declared(inner).values():
                found[one.name] = Declared(
                    one.name, (each.name, *one.path), one.default, one.hint, one.module, one.option
                )
    return found


def _module_of(options: type, name: str) -> str:
    """Returns the module of the class, or of its base, that declares a field."""
    return next(each.__module__ for each in options.__mro__ if name in inspect.get_annotations(each))


def _class_of(options: type, name: str, hint: str) -> type | None:
    """Returns the dataclass with options that a field holds, or None."""
    made = vars(sys.modules[_module_of(options, name)]).get(hint)
    return made if isinstance(made, type) and is_dataclass(made) and declared(made) else None


def from_arguments(options: type[Options], arguments: Mapping[str, Any], *, of: str = "", **others: Any) -> Options:
    """Returns the options that a function's arguments say; those that are not given have their defaults.

    Args:
        options: the dataclass.
        arguments: by name.
        of: the function, for messages.
        others: values of fields that are no options.

    Raises:
        OptionError: an argument of no option, or one that is not accepted.
    """
    known = declared(options)
    if unknown := [name for name in arguments if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"Did you mean {near[0]}=?" if near else f"It has {', '.join(known)}."
        raise OptionError(f"{of or options.__name__} has no argument {unknown[0]}=. {hint}")
    given = dict[tuple[str, ...], Any]()
    for name, value in arguments.items():
        one, hint = known[name], known[name].type()
        if not _fits(value, hint):
            raise OptionError(f"{name}={value!r}: give {_in_words(hint)}.")
        value = int(value) if is_whole(value) else value  # also NumPy's, which JSON does not take
        given[one.path] = value if one.option.convert is None else one.option.convert(value)
    made: Options = _made(options, given, others)
    return made


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of a type that an option accepts; which of a Literal's values it is, `check_options` sees."""
    kind, parts = get_origin(hint), get_args(hint)
    if hint is Any or kind is Literal:
        return hint is Any or value is not None
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Callable:
        return callable(value)
    if kind is tuple:
        return isinstance(value, (tuple, list)) and len(value) == len(parts) and all(map(_fits, value, parts))
    if kind in (list, Sequence):  # a lone text is what the option says it is
        return isinstance(value, str) or (
            isinstance(value, (list, tuple)) and all(_fits(one, parts[0]) for one in value)
        )
    if hint is int:
        return is_whole(value)
    if hint is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def _in_words(hint: Any) -> str:
    """Returns what a type accepts, for messages."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(map(_in_words, parts))
    if kind is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if kind is Callable:
        return "a function"
    if kind is tuple:
        return f"({', '.join(map(_in_words, parts))})"
    if kind in (list, Sequence):
        return f"a list, each {_in_words(parts[0])}"
    known = {int: "a whole number", float: "a number", str: "text", bool: "True or False", Path: "a path"}
    return known.get(hint, "None" if hint is NoneType else f"a {getattr(hint, '__name__', hint)}")


def _made(options: type, given: Mapping[tuple[str, ...], Any], others: Mapping[str, Any]) -> Any:
    values = dict(others)
    for each in fields(options):
        if (each.name,) in given:
            values[each.name] = given[each.name,]
        elif _OF_OPTION not in each.metadata and each.name not in values:
            inner = _class_of(options, each.name, str(each.type))
            if inner is not None:
                below = {path[1:]: value for path, value in given.items() if path[0] == each.name}
                values[each.name] = _made(inner, below, {})
    return options(**values)


def check_options(options: Any) -> None:
    """Raises OptionError for a field of a Literal that has none of its values, and for a number that is too low.

    A dataclass with options calls it in its `__post_init__`.
    """
    for each in declared(type(options)).values():
        if len(each.path) > 1:
            continue  # that class checks its own
        value = getattr(options, each.path[0])
        if value is None:
            continue
        if "Literal" in each.hint or each.hint.partition(" ")[0] in _literals(each.module):
            choices = [part for part in (each.type(), *get_args(each.type())) if get_origin(part) is Literal]
            check_choice(each.name, value, [choice for part in choices for choice in get_args(part)])
        elif each.option.least is not None and value < each.option.least:
            raise OptionError(f"{each.name}={value}: needs {each.option.needs or f'at least {each.option.least}'}.")


@cache
def _literals(module: str) -> frozenset[str]:
    """Returns the names of Literals in a module."""
    return frozenset(name for name, found in vars(sys.modules[module]).items() if get_origin(found) is Literal)


def takes(options: type) -> Callable[[Function], Function]:
    """Returns a decorator: the function's `**options` are shown as those of a dataclass, in `help` and in the docs.

    Its docstring has a line `{options}` where they are to stand.
    """

    def decorated(function: Function) -> Function:
        signature = inspect.signature(function)
        parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        lines = []
        for one in declared(options).values():
            kind, default = inspect.Parameter.KEYWORD_ONLY, one.argument_default
            parameters.append(inspect.Parameter(one.name, kind, default=default, annotation=one.type()))
            text = one.option.doc or one.option.help
            line = f"{one.name}: {text[:1].lower() + text[1:] if text[1:2].islower() else text}"
            lines.append(textwrap.fill(line, 112, subsequent_indent="    ", break_long_words=False))
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # PEP 362
        doc = inspect.cleandoc(function.__doc__ or "")
        indent = (re.search(r"^( *)\{options\}", doc, re.MULTILINE) or [""])[0].partition("{")[0]
        text = textwrap.indent("\n".join(lines), indent)
        function.__doc__ = doc.replace(f"{indent}{{options}}", text)
        return function

    return decorated
