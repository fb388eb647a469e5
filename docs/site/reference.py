"""Writes the pages of the reference from the code: commands, functions, files, JSON, exit codes, rules.

    python docs/site/reference.py

They lie in docs/reference, and nobody edits them: a test compares them with what `pages` gives.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import json
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import click
import msgspec

import qdqtune
from examples import fields, results
from qdqtune import errors, options
from qdqtune.api import CallOptions
from qdqtune.autotune import __main__ as autotune
from qdqtune.cli import main
from qdqtune.cli.command import Command
from qdqtune.cli.output import with_flags
from qdqtune.commands.compare import CompareOptions
from qdqtune.engines.facts import ENGINES, PROVIDERS
from qdqtune.engines.library_settings import OnnxRuntimeOptions, OpenVinoOptions
from qdqtune.engines.tensorrt.options import CachedOptions
from qdqtune.engines.tensorrt.rtx import RtxOptions
from qdqtune.engines.tensorrt.trtexec import TrtexecOptions
from qdqtune.placement import engine_rules
from qdqtune.system.checks import LIST
from qdqtune.tuning.deploy import DeploySettings
from qdqtune.tuning.folder import (
    BASELINE,
    DEPLOY,
    FINAL,
    FRONT,
    GROUP_MODELS,
    LOGS,
    PLACEMENT,
    PROGRESS,
    RAW,
    REGION_MODELS,
    REPORT,
    RUN,
    SUMMARY,
)
from qdqtune.tuning.settings import STATE
from qdqtune.tuning.summary import RunLog, Summary

OF_RUNS = {"summary.json": Summary, "run.json": RunLog, "deploy/settings.json": DeploySettings}
"""JSON files of a run, with the types that read them."""

ENGINE_OPTIONS = {
    "onnxruntime": OnnxRuntimeOptions,
    "openvino": OpenVinoOptions,
    "tensorrt": CachedOptions,
    "tensorrt-rtx": RtxOptions,
    "trtexec": TrtexecOptions,
}

FILES = {
    FINAL: "The model to deploy; your model in float if nothing faster was found.",
    BASELINE: "Your model in float, written the same way.",
    f"{DEPLOY}/": "`run.py` runs the result, which has to stay beside `deploy/`, without qdqtune, by `settings.json`, "
    "which `qdqtune verify` reads.",
    PLACEMENT: "Every edge that carries a pair, by the names of the ONNX file.",
    REPORT: "A page with the verdict, layer times, a map of the model, and reasons.",
    RUN: "What was asked, on which machine, and what became of each candidate.",
    SUMMARY: "Latency, ratio with its interval, output SQNR, builds, versions.",
    f"{FRONT}/": "A model for each point from the fastest to the most exact; with `front`.",
    RAW: "All groups that gain alone, before validation; with `mode` subgraph.",
    f"{GROUP_MODELS}/": "Each group as a model; with `mode` subgraph.",
    PROGRESS: "Progress, for people and scripts; with `mode` subgraph.",
    "MODEL.fp16.graph.json": "The groups as trtexec exported them, with `.build.log`; with `mode` subgraph.",
    f"{REGION_MODELS}/": "The whole model with the best scheme of each pattern; with `mode` region.",
    STATE: "Every measurement with all its samples, from which a run goes on.",
    "autotuner_state_pattern_cache.yaml": "The best schemes of each pattern, for `qdqtune.autotune --pattern_cache`.",
    f"{LOGS}/": "What the engine printed, one file a build.",
    LIST: "The names of the files that qdqtune wrote there.",
}
"""What a run writes in its folder, and what each file or subfolder holds."""

DOCS = Path(__file__).parents[1]
OVERVIEW = "reference/index.md"
KEYWORDS: dict[str, type[options.Options]] = {"compare": CompareOptions}
"""Functions that pass keywords on, and the options that these are."""


def pages() -> dict[str, str]:
    """The text of each page, by its path from `docs/`."""
    commands = {name: later.command for name, later in sorted(main.app.commands.items())}
    return {
        OVERVIEW: _overview(commands),
        **{path: command_page(f"qdqtune {n}", commands[n]) for path, n in zip(command_paths(), commands, strict=True)},
        **{path: page() for path, page in OTHERS.items()},
    }


def command_paths() -> list[str]:
    """The paths of the pages of commands."""
    return [f"reference/commands/{name}.md" for name in sorted(main.app.commands)]


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; cells are put as they are, on one line each."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(' '.join(cell.split()) for cell in line)} |\n" for line in lines)


def code(text: object) -> str:
    """Text in the font of code, also within a table."""
    return f"`{str(text).replace('|', ' or ')}`"


def prose(text: str) -> str:
    """Help of the command line as Markdown: names of files, options and placeholders keep their characters."""
    pieces = re.split(r"(`[^`]*`)", text.strip())
    return "".join(p if p.startswith("`") else re.sub(r"([*_<>|\[\]])", r"\\\1", p) for p in pieces)


def _overview(commands: dict[str, Command]) -> str:
    rows = [(f"[{code(name)}](commands/{name}.md)", prose(main.app.commands[name].help or "")) for name in commands]
    return (
        "# Reference\n\nThese pages are made from the code. In a terminal, `--help` explains a "
        "command on one page and `--help-all` option by option.\n\n## Commands\n\n"
        + table(("command", "what it does"), rows)
        + "\nEach takes `-q` (no progress), `-v` (progress line by line) and, where it has a result, "
        "[`--json`](json.md). Underscores work as well as dashes. Results go to standard output, progress and notes to "
        "standard error. The end is told by an [exit code](exit-codes.md).\n\nThe shell "
        'completes commands and options: `eval "$(_QDQTUNE_COMPLETE=bash_source qdqtune)"` in `~/.bashrc`, '
        "`zsh_source` in `~/.zshrc`.\n"
    )


# Commands


def command_page(name: str, command: Command) -> str:
    """The page of a command: its help, then its options by group. `name` is what is typed."""
    context = click.Context(command, info_name=name)
    with context:
        told, examples = _help(command.help or "")
        usage = " ".join(command.collect_usage_pieces(context))
        parts = [f"# {name}\n", told, f"```text\n{name} {usage}\n```\n"]
        if examples:
            parts.append("Examples:\n\n```text\n" + "\n".join(examples) + "\n```\n")
        for group, found in command.groups():
            parts.append(f"## {group}\n")
            parts.append(table(("option", "what it does"), [_option_row(one) for one in found]))
    return "\n".join(parts)


def _help(text: str) -> tuple[str, list[str]]:
    """The sentences of a command's help, and its example lines, which follow a line with a \\b."""
    before, _, after = inspect.cleandoc(text).partition("\b")
    told = "\n\n".join(prose(" ".join(part.split())) for part in before.split("\n\n") if part.strip())
    return told + "\n", [line for line in after.splitlines() if line.strip()]


def _option_row(own: options.Option[Any]) -> tuple[str, str]:
    names = ", ".join(code(name) for name in (*own.spellings, own.negative) if name)
    value = code(own.metavar) if own.metavar else ""
    if own.choices and own.metavar == "|".join(own.choices):
        value = "one of " + ", ".join(map(code, own.choices))
    told = f"{own.help} Default: {own.usual}." if own.usual else own.help
    return f"{names} {value}".strip(), prose(with_flags(told))


# Python


def python_page() -> str:
    """The public functions with their keywords, and the public classes."""
    parts = [
        "# Python\n\nKeywords are the options of the command line with underscores, "
        "but for those about its output (`--json`, `--quiet`, `--verbose`) and `--dry-run`. Every function also takes "
        "`observer`, `progress` and `cancel`: see [from Python](../how-to/python.md). All raise `qdqtune.QdqtuneError` "
        "with one line that says what to do.\n"
    ]
    for name in sorted(qdqtune.__all__):
        value = getattr(qdqtune, name)
        if inspect.isclass(value):
            parts.append(class_part(name, value))
        elif callable(value):
            parts.append(function_part(name, value))
    return "\n".join(parts)


def function_part(name: str, function: Callable[..., Any]) -> str:
    """A function: what it does, and a row for each keyword."""
    told = docstring(function).partition("\nArgs:")[0]
    signature = inspect.signature(function)
    typed = {"layers": "check"}.get(name, name)  # `check --layers`
    page = f"[{code('qdqtune ' + typed)}](commands/{typed}.md)" if typed in main.app.commands else ""
    rows = []
    usual = {field.name for field in dataclasses.fields(CallOptions)}
    kind = KEYWORDS.get(name)
    for parameter in signature.parameters.values():
        if parameter.name in usual or (kind and parameter.kind is parameter.VAR_KEYWORD):
            continue
        rows.append((code(_spelled(parameter)), _default(parameter.default)))
    if kind:
        rows += [
            (code(n), _default(own.default)) for n, own in options.options_of(kind).items()
            if n not in signature.parameters
        ]  # fmt: skip
    plain = ", ".join(f"{name} = {usual}" if usual else name for name, usual in rows)
    return f"## {name}\n\n{_sections(told)}\n" + (f"Keywords are told at {page}: {plain}.\n" if page else f"{plain}\n")


def _spelled(parameter: inspect.Parameter) -> str:
    return {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name


def _default(value: Any) -> str:
    is_absent = value in (inspect.Parameter.empty, dataclasses.MISSING) or value is options.REQUIRED
    return "" if is_absent else code(repr(value))


def class_part(name: str, kind: type) -> str:
    """A class: what it is, and its public fields, properties and methods."""
    rows = []
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        if not field.name.startswith("_"):
            rows.append((code(field.name), type_in_words(field.type)))
    for member, value in vars(kind).items():
        if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            first = docstring(value).partition("\n\n")[0]
            rows.append((code(member + ("()" if inspect.isfunction(value) else "")), prose(" ".join(first.split()))))
    return f"## {name}\n\n{_sections(docstring(kind))}\n" + (table(("member", "what it is"), rows) if rows else "")


def docstring(value: object) -> str:
    """A docstring without indentation; empty if there is none, or only the one that dataclasses make."""
    text = inspect.getdoc(value) or ""
    return "" if text.startswith(f"{getattr(value, '__name__', '')}(") else text


def _sections(text: str) -> str:
    """A docstring as Markdown: sections such as `Raises:` become a paragraph with their entries."""
    parts = []
    for part in text.split("\n\n"):
        title = re.match(r"(Raises|Args|Returns):\n", part)
        lines = textwrap.dedent(part[title.end() :] if title else part).strip()
        parts.append((f"{title[1]}: " if title else "") + prose(" ".join(lines.split())))
    return "\n\n".join(parts) + "\n"


# Files, JSON, exit codes, engines, rules


def files_page() -> str:
    """The files that `tune` writes."""
    rows = [(code(name), prose(what)) for name, what in FILES.items()]
    return (
        "# Files\n\nYour model file is never changed. No command writes to a file that it reads, or through a link out "
        "of the output folder. There, only files listed in `.qdqtune` are overwritten or deleted; another file with "
        "the name of a result is refused before work begins. Results appear whole.\n\n"
        "A second `-o q.onnx` replaces the first, which stands in the list `.qdqtune` beside it. Another "
        "file of that name is refused.\n\n## What tune writes\n\n"
        "In `qdqtune_output/`, or the folder that `-o` names:\n\n" + table(("file", "content"), rows)
    )


def json_page() -> str:
    """The fields of the JSON files of a run, and of what commands print with `--json`."""
    parts = [
        "# JSON\n\n`--json` prints one JSON value, numbers unrounded; unknown values are `null`. Names of fields carry "
        "units, and ratios are shares of the float model's time (0.5 is twice as fast).\n"
    ]
    for file, kind in OF_RUNS.items():
        also = "`qdqtune tune --json` prints it as well, with an array of `notes`. " if file == "summary.json" else ""
        parts.append(f"## {file}\n\n{also}{_sections(docstring(kind))}")
        inner: dict[str, type] = {}
        parts.append(fields_of(kind, inner))
        while inner:
            name, part = inner.popitem()
            if f"### {name}\n" not in "".join(parts):
                parts.append(f"### {name}\n\n{_sections(docstring(part))}")
                parts.append(fields_of(part, inner))
    parts.append(
        "## Results of commands\n\nWhat `--json` prints is the `to_dict()` of the result in Python. These fields are "
        "those of a small model; `[]` stands for each element of an array. `run` and `tune` with several models print "
        "an array with a row for each model.\n"
    )
    for command, value in results().items():
        rows = [(code(path), kind) for path, kind in fields(value)]
        parts.append(f"### qdqtune {command}\n\n" + table(("field", "type"), rows))
    return "\n".join(parts)


def fields_of(kind: type, inner: dict[str, type]) -> str:
    """A row for each field; types of fields that have fields of their own go to `inner`."""
    rows = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        rows.append((code(name), type_in_words(hint, inner)))
    return table(("field", "type"), rows)


def type_in_words(hint: Any, inner: dict[str, type] | None = None) -> str:
    """A type of Python as JSON calls it. Types with fields go to `inner`, by name."""
    origin, given = get_origin(hint), get_args(hint)
    told = [type_in_words(part, inner) for part in given if part is not Ellipsis]
    if isinstance(hint, str):
        return code(hint)
    if origin is NotRequired:
        return f"{told[0]}; may be missing"
    if origin in (Required, Annotated):
        return type_in_words(given[0], inner)
    if origin is Literal:
        return " or ".join(code(f'"{value}"') for value in given)
    if origin in (Union, types.UnionType):
        return " or ".join(told)
    if origin in (list, tuple, Sequence) or hint in (list, tuple):
        return f"array of {', '.join(dict.fromkeys(told))}" if told else "array"
    if isinstance(origin, type) and given:
        key = told[0] if get_origin(given[0]) is Literal else "name"
        return f"object of {told[-1]} by {key}" if len(told) == 2 else origin.__name__
    return _plain(hint, inner)


def _plain(hint: Any, inner: dict[str, type] | None) -> str:
    if hint is type(None):
        return "null"
    if hasfields_of(hint):
        if inner is not None:
            inner[hint.__name__] = hint
        return f"[{hint.__name__}](#{hint.__name__.lower()})" if inner is not None else code(hint.__name__)
    named = {float: "number", int: "integer", str: "text", bool: "true or false", Any: "any value"}
    return named.get(hint, code(getattr(hint, "__name__", hint)))


def hasfields_of(hint: Any) -> bool:
    """Whether a type is an object of JSON with named fields."""
    is_typed = isinstance(hint, type) and (issubclass(hint, msgspec.Struct) or dataclasses.is_dataclass(hint))
    return is_typed or (isinstance(hint, type) and issubclass(hint, dict) and hasattr(hint, "__total__"))


def exit_page() -> str:
    """What exit codes mean, and the errors that Python raises."""
    tree = textwrap.dedent((errors.__doc__ or "").partition("\n\n")[2].rpartition("\n\n")[0])
    rows = [(code(number), prose(what)) for number, what in main.EXIT_CODES.items()]
    return (
        "# Exit codes and errors\n\n" + table(("code", "meaning"), rows) + "\nErrors form one tree, with the exit code "
        f"of the command line. In Python all are `qdqtune.QdqtuneError`.\n\n```text\n{tree.rstrip()}\n```\n"
    )


def engines_page() -> str:
    """The names that `--engine` takes, and their options."""
    options: dict[tuple[str, str, str, str], list[str]] = {}
    for engine, kind in ENGINE_OPTIONS.items():
        for one in dataclasses.fields(kind):
            hint, text = (
                get_type_hints(kind)[one.name],
                get_args(get_type_hints(kind, include_extras=True)[one.name])[1],
            )
            default = "" if one.default in (None, "", ()) else json.dumps(one.default).strip('"')
            options.setdefault((one.name, _engine_value(hint), default, text), []).append(engine)
    return (
        "# Engines\n\nNames that `--engine` takes. `qdqtune doctor` says which work on a machine, and what to install "
        "for the others.\n\n"
        + table(
            ("engine", "what it is"),
            [(code(name), prose(_first_line(facts.module))) for name, facts in ENGINES.items()],
        )
        + "\n## Options\n\n`--engine-option NAME=VALUE` sets them, in Python `engine_options={...}`; execution "
        "providers take those of `onnxruntime`.\n\n"
        + table(
            ("option", "takes", "default", "engines", "meaning"),
            [
                (code(n), takes, default, ", ".join(of), prose(text))
                for (n, takes, default, text), of in options.items()
            ],
        )
        + "\n## Execution providers of ONNX Runtime\n\nSee [execution providers](../how-to/providers.md).\n\n"
        + table(("engine", "provider"), [(code(name), code(ENGINES[name].ep)) for name in PROVIDERS])
    )


def _engine_value(hint: Any) -> str:
    one = (
        next(part for part in get_args(hint) if part is not NoneType)
        if get_origin(hint) in (Union, UnionType)
        else hint
    )
    if get_origin(one) is Literal:
        return ", ".join(get_args(one))
    names = {bool: "true or false", int: "integer", str: "text", Sequence: "list of text", Mapping: "values by name"}
    return names[get_origin(one) or one]


def _first_line(module: str) -> str:
    """The first line of a module's docstring. The module is not imported, since the vendor's library may be missing."""
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    return (ast.get_docstring(ast.parse(Path(found.origin).read_text())) or "").partition("\n")[0]


def rules_page() -> str:
    """The placement rules of `quantize`."""
    rows = [
        (
            code(rule.name),
            rule.effect,
            prose(rule.reason),
            ", ".join(sorted(rule.engines)),
            ", ".join(sorted(rule.quant_types)),
            prose(rule.source),
        )
        for rule in engine_rules.RULES
    ]
    return "# Placement rules\n\nBy these rules `qdqtune quantize` places pairs without measuring.\n\n" + table(
        ("rule", "effect", "reason", "engines", "numbers", "source"), rows
    )


OTHERS: dict[str, Callable[[], str]] = {
    "reference/python.md": python_page,
    "reference/files.md": files_page,
    "reference/json.md": json_page,
    "reference/exit-codes.md": exit_page,
    "reference/engines.md": engines_page,
    "reference/rules.md": rules_page,
    "reference/autotune.md": partial(command_page, "python -m qdqtune.autotune", autotune.command),
}
"""Pages that are not about a command, with the functions that write them."""


def write() -> None:
    """Write all pages, and delete those of commands that are gone."""
    for old in (DOCS / "reference" / "commands").glob("*.md"):
        old.unlink()
    for path, text in pages().items():
        (DOCS / path).parent.mkdir(exist_ok=True)
        (DOCS / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
