"""`qdqtune explain` and `report` as a user meets them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import Call
from qdqtune.commands.explain import explain_run


def test_the_table_of_reasons_shortens_names(tuned: Path) -> None:
    explained = explain_run(tuned.parent / "out")
    long = replace(explained.rows[0], nodes=("model/" + "relu;" * 40 + "conv",))
    rows = replace(explained, rows=(long,)).table().rows
    assert [row[-1] for row in rows] == ["…" + long.nodes[0][-35:], ""]


def test_the_command_line_tells_reasons_and_nodes(call: Call, tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tuned.parent / "out"
    code, out, _ = call("explain", folder)
    assert code == 0
    assert "conversions cost more than it saves" in out
    assert "no kernel for this operator" in out
    code, out, _ = call("explain", folder, "s*")
    assert [line.split(" (")[0] for line in out.splitlines() if not line.startswith(" ")] == [
        "second",
        "skip",
        "softmax",
    ]
    assert re.search(r"in float it would take \S+ ms more \((measured|estimated)\)", out)
    code, out, _ = call("explain", folder, "third", "--json")
    told = json.loads(out)
    assert [row["nodes"] for row in told["units"]] == [["third"]]
    assert told["units"][0]["more_ms"] > 0
    code, _, err = call("explain", folder, "th")
    assert code == 2
    assert "near are third" in err
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, call("explain", folder, "s*")[1].splitlines())) <= 60
