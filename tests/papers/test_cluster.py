"""Commands about clusters in docs/ that want more machines than a test has: their options exist, and fit together."""

import re
import shlex

import click
import pytest

from documents import ROOT, blocks
from qdqtune.cli.main import app

PAGES = ("many-models", "cluster", "schedulers")
TEXT = "\n".join((ROOT / "docs" / "how-to" / f"{page}.md").read_text() for page in PAGES)
LINES = [line.partition("  #")[0].strip() for block in blocks(TEXT) for line in block.text.splitlines()]
LINES += re.findall(r"`((?:qdqtune|ray) [^`]+)`", TEXT)


def told(program: str) -> list[list[str]]:
    """The arguments of each call of a program."""
    found = [re.search(rf"(?:^|[ ]){program} (?!start --head --port=6379 --block &$)(.*)", line) for line in LINES]
    return [shlex.split(m[1].removesuffix("&")) for m in found if m and not line_is_path(m[1])]


def line_is_path(words: str) -> bool:
    return words.startswith("/")


@pytest.mark.parametrize("words", told("qdqtune"), ids=" ".join)
def test_commands_of_ours_take_what_they_are_given(words: list[str]) -> None:
    with app.make_context("qdqtune", list(words)) as group:
        name, command, rest = app.resolve_command(group, words)
        assert command is not None
        assert name in {"tune", "run", "doctor"}
        with command.make_context(name, list(rest), parent=group) as context:
            assert context.params


def test_commands_of_ray_take_what_they_are_given() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    calls = told("ray")
    assert len(calls) >= 4
    for words in calls:
        command: click.Command = scripts.cli.commands[words[0]]
        command.make_context(words[0], words[1:])
