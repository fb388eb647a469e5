"""`explain`: what is no finished run is refused; decisions are told one by one and together."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import QUICK, Call
from qdqtune.commands.explain import explain_run
from qdqtune.engines.facts import ENGINES
from qdqtune.errors import BadState
from qdqtune.explanation.report import report_of_run
from qdqtune.tuning.bench import FLOAT, Bench
from qdqtune.tuning.summary import read_summary
from qdqtune.types import Layer, Placement
from runs import mixed, write


def test_what_is_no_finished_run_is_refused(tuned: Path, tmp_path: Path) -> None:
    shutil.copytree(tuned.parent / "out", tmp_path / "out")
    (tmp_path / "out" / "autotuner_state.yaml").rename(tmp_path / "elsewhere.yaml")
    with pytest.raises(BadState, match="tune the model again"):
        explain_run(tmp_path / "out")


def test_what_a_provider_leaves_is_told_by_tune_explain_and_the_report(call, tmp_path, monkeypatch):
    """A table is put over the fake engine, and its report says of two layers that they run elsewhere."""
    monkeypatch.setitem(ENGINES, "fake", replace(ENGINES["fake"], source="https://"))
    usual, where = Bench.layers, "on the CPU: no kernel"

    def layers(self: Bench, placement: Placement = FLOAT, **_: object) -> tuple[Layer, ...]:
        found = usual(self, placement)
        return tuple(replace(x, elsewhere=where) if n < 2 else x for n, x in enumerate(found))

    model = write(mixed(), tmp_path)
    monkeypatch.setattr(Bench, "layers", layers)
    out = tmp_path / "out"
    code, _, err = call("tune", model, *QUICK, "--calibration-data", model.with_suffix(".npz"), "-o", out)
    assert code == 0
    assert re.search(r"note: \d of \d+ nodes run elsewhere, .*on the CPU: no kernel", err)
    left = read_summary(out)["fallback"]
    assert {x.reason for x in left.left} == {where}
    assert left.borders
    explained = explain_run(out)
    assert explained.headline.endswith(left.in_words())
    assert any(fact.name == "nodes that run elsewhere" for fact in report_of_run(out).facts)


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
    assert re.findall(r"^ (s\w+) ", out, re.MULTILINE) == ["second", "skip", "softmax"]
    code, out, _ = call("explain", folder, "third")
    assert re.search(r"with it in 8 bits(.|\n)* ms\s+more\s+\((measured|estimated)\)", out)
    code, out, _ = call("explain", folder, "third", "--json")
    told = json.loads(out)
    assert [row["nodes"] for row in told["units"]] == [["third"]]
    assert told["units"][0]["more_ms"] > 0
    for pattern, hint in {"th": "third?", "/SKIP*": "skip?", "thrid": "third?", "*x*y*z": "'*' shows all"}.items():
        code, _, err = call("explain", folder, pattern)
        assert code == 2
        assert hint in err
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", call("explain", folder, "s*")[1])
    assert max(map(len, plain.splitlines())) <= 60
