"""What commands print: text of models commands no terminal, and JSON holds it as it is."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import onnx
import pytest
from rich.table import Table
from rich.text import Text

from conftest import Call
from qdqtune.cli import output, streams

HOSTILE = "\x1b]0;owned\x07[red]\x9b31m:smile:\u202e"
BROKEN = HOSTILE + "\nbroken"
SPELT = "\\x1b]0;ow"


def hostile(model: Path) -> Path:
    """The model with names that are commands to a terminal, markup, emoji and a line break."""
    proto = onnx.load(model)
    for node in proto.graph.node:
        node.name = BROKEN + node.name
        for names in (node.input, node.output):
            names[:] = [BROKEN + name if name in "abcdefg" else name for name in names]
    onnx.save(proto, model)
    return model


@pytest.mark.parametrize("command", ["inspect", "check --layers", "check", "tune"])
def test_names_cannot_command_a_terminal(call: Call, model: Path, tmp_path: Path, command: str) -> None:
    data = ["--calibration-data", hostile(model).with_suffix(".npz")]
    quick = ["--calibration-method", "minmax", "--no-bias-correction"]
    if command == "check":
        assert call("quantize", model, *data, *quick, "-o", tmp_path / "q.onnx")[0] == 0
    told = {
        "inspect": [model, "-v"],
        "check --layers": [model, *data],
        "check": [tmp_path / "q.onnx", *data],
        "quantize": [model, *data, *quick, "--report", "-o", tmp_path / "q.onnx"],
        "tune": [model, *data, *quick, "--engine", "fake", "--builds", "4", "-v", "-o", tmp_path / "out"],
    }[command]
    code, out, err = call(*command.split(), *told)
    assert code in (0, 3, 4), err
    assert {c for c in out + err if not c.isprintable()} <= {"\n"}
    assert not [line for line in (out + err).splitlines() if line.strip().startswith("broken")]
    assert SPELT in out or command == "tune"  # which shows names of nodes where units have prices only


def test_a_console_takes_text_as_text() -> None:
    written = io.StringIO()
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(Text(HOSTILE))
    table.add_row("[bold]plain[/bold]")
    with redirect_stdout(streams.SafeStream(written)):
        shown = output.console(width=200)
        shown.print(table)
        shown.print(HOSTILE)
    assert written.getvalue().count(SPELT) == 4
    assert "[bold]plain[/bold]" in written.getvalue()
    assert {c for c in written.getvalue() if not c.isprintable()} <= {"\n"}


def test_json_is_as_it_was(call: Call, model: Path) -> None:
    code, out, _ = call("inspect", hostile(model), "--json")
    assert code == 0
    assert BROKEN in json.loads(out)["regions"][-1]["nodes"][0]
