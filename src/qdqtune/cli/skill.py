"""`qdqtune skill`: how an agent uses qdqtune, in the form that agents read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from qdqtune.cli.command import AS_JSON, command
from qdqtune.cli.output import print_json
from qdqtune.options import SWITCH, Flag, Options, option

FOLDER = Path(__file__).parent.parent / "skill"
"""The folder that is the skill: agents look for one with a SKILL.md in it."""


@dataclass(kw_only=True)
class SkillOptions(Options):
    """The options of `skill`."""

    path: Flag = option(
        SWITCH, False, "Print the folder of the skill instead, to link or copy it.", "Output", short="print its folder"
    )


@command("skill", SkillOptions, AS_JSON)
def skill_command(options: SkillOptions, as_machine: bool) -> None:
    """Print how an agent uses qdqtune: which command when, how to read results, what never to do.

    \b
    qdqtune skill
    ln -s "$(qdqtune skill --path)" .agents/skills/qdqtune     or .claude/skills/qdqtune
    """
    text = (FOLDER / "SKILL.md").read_text(encoding="utf-8")
    if as_machine:
        print_json({"folder": str(FOLDER), "text": text})
    else:
        click.echo(str(FOLDER) if options.path else text.rstrip("\n"))
