"""`qdqtune skill`: the text, its folder, and a link to it."""

import json
from pathlib import Path

from conftest import Call
from qdqtune.cli.skill import FOLDER

TEXT = (FOLDER / "SKILL.md").read_text()


def test_it_prints_the_text_or_the_folder(call: Call, tmp_path: Path) -> None:
    assert call("skill") == (0, TEXT, "")
    code, out, err = call("skill", "--path")
    assert (code, err) == (0, "")
    linked = tmp_path / "qdqtune"  # agents ask for a folder of the name that stands in the text
    linked.symlink_to(out.removesuffix("\n"))
    assert (linked / "SKILL.md").read_text() == TEXT


def test_machines_get_both(call: Call) -> None:
    _, out, _ = call("skill", "--json")
    assert json.loads(out) == {"folder": str(FOLDER), "text": TEXT}
