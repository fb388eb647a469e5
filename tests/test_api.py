"""The package as a library: what notebooks hold in memory, keywords, results that show themselves, logs and ends."""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest

import qdqtune
from models import feeds, joined
from qdqtune import api
from qdqtune.cli import main
from qdqtune.cli.command import Terminal
from qdqtune.errors import BadData, BadModel, BadOption
from qdqtune.options import options_of
from qdqtune.tuning.observer import State
from qdqtune.types import Trial
from runs import mixed, settings, write
from workers import in_process

SHORT: dict[str, Any] = {
    "engine": "fake", "builds": 4, "calibration_method": "minmax", "bias_correction": False, "min_sqnr": None,
}  # fmt: skip


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> qdqtune.Result:
    """What `tune` gives for a model and samples in memory."""
    folder = tmp_path_factory.mktemp("library")
    proto = onnx.load(write(mixed(), folder))
    with in_process():
        return qdqtune.tune(proto, calibration_data=lambda: iter(feeds(mixed(), 3)), output_dir=folder / "out", **SHORT)


def test_each_public_name_can_be_imported() -> None:
    assert all(getattr(qdqtune, name) for name in qdqtune.__all__)
    with pytest.raises(AttributeError, match="no_such"):
        _ = qdqtune.no_such


def test_a_model_and_samples_in_memory_give_a_result_that_shows_itself(tuned: qdqtune.Result) -> None:
    assert tuned.improved
    assert tuned.speedup == 1 / tuned.summary["ratio"] > 1
    assert tuned.file.is_file()
    assert tuned.baseline.is_file()
    assert tuned.report.is_file()
    assert repr(tuned).startswith("<Result: 1.")
    assert len(repr(tuned)) < 200
    assert "\n" not in repr(tuned)
    assert r"| speedup \[interval\] |" in tuned._repr_markdown_()
    shown = str(tuned.table()).splitlines()
    assert shown[0].split() == ["baseline", "final"]
    assert shown[0].index("baseline") == shown[1].index(tuned.table().rows[0][1])
    assert json.loads(json.dumps(tuned.to_dict()))["shipped"] == "tuned"
    with pytest.raises(AttributeError):
        tuned.folder = Path()


def test_a_result_explains_itself(tuned: qdqtune.Result) -> None:
    whole, one = tuned.explain(), qdqtune.explain(tuned.folder, "second")
    assert [row.nodes for row in one.rows] == [("second",)]
    assert repr(one).startswith("<Explained: ")
    assert "no kernel for this operator" in whole._repr_markdown_()
    assert whole.to_dict()["units"]
    assert isinstance(one.rows[0], qdqtune.Explanation)


class Listening(qdqtune.Observer):
    """Whether each trial came from the state file."""

    def __init__(self) -> None:
        self.replayed: list[bool] = []

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        self.replayed.append(state.replayed)


class Old:
    """An observer that lacks what it does not care for."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.stage = self.stages.append


def test_the_same_call_goes_on_where_it_was_and_prints_nothing(tuned, caplog, capfd):
    given = {"calibration_data": feeds(mixed(), 3), "output_dir": tuned.folder, **SHORT}
    listening, old = Listening(), Old()
    for observer in (listening, old):
        with in_process(), caplog.at_level(logging.INFO, "qdqtune"):
            again = qdqtune.tune(onnx.load(tuned.baseline), observer=observer, **given)
        assert again.placement == tuned.placement
    assert capfd.readouterr() == ("", "")
    assert "searching" in caplog.messages
    assert any("from the state file" in line for line in caplog.messages)
    assert listening.replayed == [True] * 3
    assert "searching" in old.stages


def test_the_other_functions_take_models_in_memory_too(tuned: qdqtune.Result, tmp_path: Path) -> None:
    proto, on_fake = onnx.load(tuned.baseline), {"engine": "fake"}
    with in_process():
        done = qdqtune.quantize(
            proto, output=tmp_path / "q.onnx", calibration_data=feeds(mixed(), 5), nodes_to_exclude="head"
        )
        pair = qdqtune.compare(proto, done.output, timing_runs=12, **on_fake)
        ran = qdqtune.layers(done.output, **on_fake)
        checked = qdqtune.check(tuned.file, **on_fake)
        applied = qdqtune.apply(
            proto, placement=tuned.placement_file, output=tmp_path / "a.onnx", calibration_data=feeds(mixed(), 3)
        )
        seen = qdqtune.inspect(proto)
        built = qdqtune.build(tuned.baseline, output=tmp_path / "built.onnx", threads=1)
    assert built.files == (tmp_path / "built.onnx",)
    assert done.output == tmp_path / "q.onnx"
    assert not any(edge.node == "head" for edge in done.placed.placement)
    assert pair.ratio is not None
    assert pair.first == "model 1"
    assert "model 1" in repr(pair)
    assert "inputs are random" in pair.notes[0]
    assert ran.time_ms is not None
    assert checked.passes
    assert checked.measured
    assert applied.placement == tuned.placement
    assert seen.to_dict()["nodes"] == 8
    for result in (done, pair, ran, checked, applied, seen, built):
        assert repr(result).startswith(f"<{type(result).__name__}: ")
        assert "| --- |" in result._repr_markdown_() or not result.table().rows
        json.dumps(result.to_dict())


def test_no_message_names_a_temporary_file(tuned: qdqtune.Result, tmp_path: Path) -> None:
    assert tuned.summary["model"] == "the model"
    proto, other = onnx.load(tuned.baseline), onnx.load(write(joined(), tmp_path, "joined"))
    pairs, to = onnx.load(tuned.file), tmp_path / "q.onnx"
    with in_process():
        assert repr(qdqtune.check(pairs, engine="fake")).startswith("<Checked: the model on fake")
        with pytest.raises(BadModel, match=r"^the model already has Q/DQ pairs"):
            qdqtune.quantize(pairs, output=to)
        with pytest.raises(BadOption, match=r"^model 2 takes other inputs .* than model 1 "):
            qdqtune.compare(proto, other, engine="fake")
        for samples, name in (({"no": np.ones(3)}, "^"), ([*feeds(mixed(), 1), {"no": np.ones(3)}], "^sample 2 of ")):
            with pytest.raises(BadData, match=f"{name}`calibration_data` has no array 'x'"):
                qdqtune.quantize(proto, output=to, calibration_data=samples)


def test_settings_go_on_to_work(model: Path, workers: object) -> None:
    done = qdqtune.tune(settings(model, mode="cut", builds=4))
    assert isinstance(done, qdqtune.Result)
    assert done.folder == model.parent / "out"
    with pytest.raises(BadOption, match="Settings hold everything: builds"):
        qdqtune.tune(settings(model), builds=3)


ONLY_TYPED = {"junit", "markdown", "dry_run", "layers", "files", *options_of(Terminal)}
"""Parameters of the command line alone."""


@pytest.mark.parametrize("name", ["tune", "quantize", "compare", "apply", "check", "build", "inspect", "verify"])
def test_the_command_line_has_the_options_that_python_has(name: str) -> None:
    kind, function = getattr(api, f"{name.title()}Call"), getattr(api, name)
    typed = {str(param.name) for param in cast(main.Later, main.app.commands[name]).command.params}
    assert typed - ONLY_TYPED == set(options_of(kind))
    assert function.__doc__
    assert all(f"    {option}: " in function.__doc__ for option in options_of(kind)) or name == "compare"


def test_an_unknown_keyword_is_refused_with_the_nearest(model: Path) -> None:
    with pytest.raises(BadOption, match="no option 'calibration_sample'; did you mean 'calibration_samples'"):
        qdqtune.tune(model, calibration_sample=3)
    with pytest.raises(BadOption, match="compare has no option 'thread'; did you mean 'threads'"):
        qdqtune.compare(model, model, thread=3)
    with pytest.raises(BadOption, match="tune has no option 'out'; did you mean 'output_dir'"):
        qdqtune.tune(model, out="run")


def test_a_metric_of_the_callers_decides(tuned: qdqtune.Result) -> None:
    asked = []

    def metric(predict: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> float:
        asked.append(predict(feeds(mixed(), 1)[0]))
        return 1.0

    given = {"calibration_data": feeds(mixed(), 3), "output_dir": tuned.folder, **SHORT}
    with in_process():
        done = qdqtune.tune(onnx.load(tuned.baseline), evaluate=metric, **given)
    assert done.summary["metric_before"] == done.summary["metric_after"] == 1.0
    assert asked


def test_progress_is_printed_where_it_is_asked_for(tuned, capfd):
    with in_process():
        qdqtune.quantize(tuned.baseline, output=tuned.folder.parent / "p.onnx", progress=True)
    assert "comparing with the float model" in capfd.readouterr().err


def test_another_thread_ends_a_call_and_what_was_measured_is_kept(model: Path) -> None:
    cancel = threading.Event()

    class Impatient(qdqtune.Observer):
        def trial(self, trial: Trial, outcome: str, state: State) -> None:
            cancel.set()

    given: dict[str, Any] = {"calibration_data": feeds(mixed(), 3), "output_dir": model.parent / "out", **SHORT}
    with pytest.raises(qdqtune.Cancelled, match="the same call goes on from what was measured"):
        qdqtune.tune(model, observer=Impatient(), cancel=cancel, **given)
    with pytest.raises(qdqtune.Cancelled):
        qdqtune.tune(model, cancel=cancel, **given)
    observer = Listening()
    with in_process():
        assert qdqtune.tune(model, observer=observer, **given).improved
    assert observer.replayed == [True] * 3  # they raced together, and were measured when the first was told


def test_a_wait_for_the_engine_ends_when_it_is_cancelled(model: Path) -> None:
    cancel = threading.Event()
    threading.Timer(0.5, cancel.set).start()
    hanging = qdqtune.EngineSpec("fake", {"build_seconds": 600.0})  # whose builds take longer than anybody waits
    with pytest.raises(qdqtune.Cancelled):
        qdqtune.layers(model, engine=hanging, cancel=cancel)
