"""What a run has learned of prices serves the next one, and is never more than a first word."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from models import build, normal
from observers import Log
from qdqtune.engines import EngineSpec
from qdqtune.errors import BadOption, OutputError
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.loop import tune
from qdqtune.tuning.observer import Silent
from qdqtune.tuning.price_cache import usual_path
from qdqtune.tuning.result import Result
from qdqtune.tuning.settings import Mode, Settings
from runs import cost, hopeless, mixed, rows, settings, write
from workers import Workers


def asked(model: Path, out: str, **changes: object) -> Settings:
    known = settings(model, mode="cut", output_dir=model.parent / out, price_cache=model.parent / "prices.json")
    return replace(known, **changes)


def origins(result: Result) -> Sequence[str]:
    return [trial.proposal.origin for trial in result.history]


@pytest.mark.parametrize("batch", [8, 24])
def test_a_second_model_of_the_kind_begins_with_the_cut(batch: int, model: Path, workers: Workers) -> None:
    """One with other weights, and one that is given more at once."""
    first = tune(asked(model, "a"))
    assert origins(first)[0] != "cut"
    path = write(mixed(batch, seed=1), model.parent, "other")
    usual = tune(asked(path, "usual", price_cache=None))
    second = tune(asked(path, "b"))
    assert origins(second)[0] == "cut" != origins(usual)[0]
    assert set(origins(second)) > {"cut"}  # prices may be wrong: what may ship is tried all the same
    few = tune(asked(path, "c", builds=2))
    assert few.summary["final_ms"] == usual.summary["final_ms"] == second.summary["final_ms"]
    assert cost(path.parent / "b" / "optimized_final.onnx") == cost(path.parent / "usual" / "optimized_final.onnx")
    assert [note for note in second.notes if "began with what they say is fastest; `price_cache` none" in note]
    assert not [note for note in (*first.notes, *usual.notes) if "`price_cache`" in note]


def test_a_model_with_larger_inputs_begins_with_the_cut_on_a_real_engine(tmp_path: Path) -> None:
    text = """net (float[1,32,S,S] x) => (float[1,32,S,S] y) {
        a = Conv <pads=[1,1,1,1]> (x, w0)
        b = Relu(a)
        y = Conv <pads=[1,1,1,1]> (b, w1)
    }"""

    def run(size: int, builds: int) -> Result:
        model = build(text.replace("S", str(size)), {"w0": normal(64, 32, 3, 3), "w1": normal(32, 64, 3, 3)})
        path = write(model, tmp_path, f"net{size}")
        quick = asked(path, f"out{size}", engine=EngineSpec("onnxruntime", {"threads": 1}), builds=builds)
        return tune(replace(quick, plan=Plan((12,), turn_seconds=0.0), rewrites="off"))

    first = run(20, builds=4)
    assert origins(first)[0] != "cut"
    assert (origins(run(28, builds=2))[0] == "cut") is bool(first.placement)  # where pairs pay on this machine


def test_a_resumed_run_ignores_changes_of_the_cache(model: Path, workers: Workers) -> None:
    tune(asked(model, "a"))
    whole = tune(asked(model, "b"))
    assert any(r["kind"] == "prices" and r["prices"]["units"] for r in rows(asked(model, "b").state))
    (model.parent / "prices.json").unlink()
    again = tune(asked(model, "b", builds=11))
    assert origins(again) == origins(whole)
    assert origins(tune(asked(model, "c")))[0] != "cut"  # a fresh one has nothing to begin with
    assert origins(tune(asked(model, "c", builds=11)))[0] != "cut"  # though by then there is something


@pytest.mark.parametrize("mode", ["cut", "region", "subgraph"])
def test_a_run_in_another_mode_begins_with_what_was_found_for_the_model(mode, model, workers):
    first = tune(asked(model, "a"))
    other = tune(asked(model, "b", mode=mode))
    seed = next(t for t in other.history if t.placement == first.placement)
    assert seed.number <= 2  # behind what subgraph mode makes of its groups, where that is not the same
    assert mode == "subgraph" or seed.proposal.origin == "earlier run"
    assert other.summary["final_ms"] <= first.summary["final_ms"]


def test_prices_of_another_engine_are_not_used(model: Path, workers: Workers) -> None:
    tune(asked(model, "a"))
    other = tune(asked(model, "b", engine=EngineSpec("fake", {"asymmetric": True})))
    assert origins(other)[0] != "cut"
    sections = json.loads((model.parent / "prices.json").read_text())["sections"]
    assert [s["conditions"]["engine"]["numbers"] for s in sections] == ["symmetric", "asymmetric"]


@pytest.mark.parametrize("content", ["{", "[1]", '{"version": 99, "sections": []}', '{"version": 1, "sections": [3]}'])
def test_a_file_that_is_no_cache_is_refused_if_named_and_else_noted_and_kept(content, model, workers, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))
    file = usual_path()
    for place in (model.parent / "prices.json", file):
        place.parent.mkdir(exist_ok=True)
        place.write_text(content)
    with pytest.raises(BadOption, match=r"prices.json was there before, .*choose another `price_cache`"):
        tune(asked(model, "a"))
    notes = Log()
    assert tune(asked(model, "a", price_cache=file), notes).improved
    assert notes.notes == [
        f"{file} is no price cache of this version (delete it, or name another with `price_cache`): "
        "the search goes on without"
    ]
    assert file.read_text() == (model.parent / "prices.json").read_text() == content
    with pytest.raises(OutputError, match="it is a folder"):
        tune(asked(model, "b", price_cache=model.parent))


@pytest.mark.parametrize("times", [0.01, 2.0, 50.0])
def test_wrong_prices_cost_builds_but_no_speed(times: float, model: Path, workers: Workers) -> None:
    """Every price that the cache tells is another than it was: the run's own count."""
    usual = tune(asked(model, "a"))
    cache = model.parent / "prices.json"
    content = json.loads(cache.read_text())
    for row in content["sections"][0]["prices"]["units"]:
        row[-1] *= times
    cache.write_text(json.dumps(content))
    misled = tune(asked(model, "b"))
    assert misled.summary["final_ms"] == usual.summary["final_ms"]


def test_a_named_file_that_cannot_be_written_is_noted(model, workers, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    notes = Log()
    tune(asked(model, "a", price_cache=usual_path()), notes)
    assert not notes.notes
    tune(asked(model, "b", price_cache=Path("/dev/null/prices.json")), notes)
    assert [note.partition(": cannot")[0] for note in notes.notes] == ["prices are not kept for other models"]


def test_the_usual_file_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert usual_path() == tmp_path / "qdqtune" / "prices.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")  # relative ones do not count, as the standard has it
    monkeypatch.setenv("HOME", str(tmp_path))
    assert usual_path() == tmp_path / ".cache" / "qdqtune" / "prices.json"


class _Ended(Exception):
    """What ends a run in the middle."""


class Ending(Silent):
    """Ends a run behind so many candidates."""

    def __init__(self, count: int) -> None:
        self._left = count

    def trial(self, *_: object) -> None:
        self._left -= 1
        if self._left < 0:
            raise _Ended


@pytest.mark.parametrize("mode", ["cut", "region", "subgraph"])
@pytest.mark.parametrize("why", ["nothing faster", "too inaccurate", "interrupted at 0", "interrupted at 2"])
def test_a_run_that_found_nothing_leaves_nothing(mode: Mode, why: str, model: Path, workers: Workers) -> None:
    """Nor does one that was ended: what comes after it is as if it had not been."""
    path = write(hopeless(), model.parent, "other") if why == "nothing faster" else model
    asking = asked(path, "a", mode=mode, builds=8, min_sqnr=200.0 if why == "too inaccurate" else None)
    if why.startswith("interrupted"):
        with pytest.raises(_Ended):
            tune(asking, Ending(int(why[-1])))
    else:
        assert not tune(asking).placement
    assert not (model.parent / "prices.json").exists()


def test_a_front_searches_in_full_whatever_earlier_runs_have_learned(model: Path, workers: Workers) -> None:
    def front(out: str, **changes: object) -> Result:
        return tune(asked(model, out, front=True, builds=25, min_sqnr=None, **changes))

    usual = front("usual", price_cache=None)
    tune(asked(model, "a"))
    after = front("b")
    assert len(after.summary["front"]) >= len(usual.summary["front"])
    assert not [note for note in after.notes if "`price_cache`" in note]
