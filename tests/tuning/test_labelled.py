"""Runs whose metric comes from labels: what is taken, what is told, and what cannot be."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

import qdqtune
from conftest import Call
from models import INT8, build, feeds, normal, ranges
from observers import Log
from qdqtune.commands.tune import result_table
from qdqtune.errors import BadData, BadOption
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import Settings
from qdqtune.types import Placement
from runs import settings
from workers import Workers

COUNT = 300


def classifier() -> Model:
    weights = {"w0": normal(64, 128, scale=0.1), "w1": normal(128, 128, scale=0.1), "w2": normal(128, 8)}
    text = """net (float[1,8,64] x) => (float[1,8] y) {
        [first] a = MatMul(x, w0)
        [relu] b = Relu(a)
        [second] c = MatMul(b, w1)
        [skip] d = Add(c, b)
        [third] f = MatMul(d, w2)
        [pool] y = ReduceMax <keepdims=0> (f, axes)
    }"""
    return build(text, weights | {"axes": np.array([1])})


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    """Samples, and the classes that the float model sees in them, of which every tenth is wrong."""
    net = classifier()
    samples = np.stack([sample["x"][0] for sample in feeds(net, COUNT)])
    evaluator = ReferenceEvaluator(net.to_proto())
    labels = np.array([int(evaluator.run(None, {"x": x[None]})[0].argmax()) for x in samples])
    labels[::10] = (labels[::10] + 1) % 8
    return samples, labels


@pytest.fixture
def model(tmp_path: Path, workers: Workers, data: tuple[np.ndarray, np.ndarray]) -> Path:
    path = tmp_path / "model.onnx"
    save(classifier(), path)
    np.savez(path.with_suffix(".npz"), x=data[0])
    np.save(tmp_path / "labels.npy", data[1])
    return path


def labelled(model: Path, /, **changes) -> Settings:
    return settings(model, labels=model.parent / "labels.npy", builds=10, **changes)


class TestTheLimit:
    def test_the_upper_end_of_the_interval_decides(self, model: Path) -> None:
        free = tune(labelled(model, max_drop=None))
        assert free.improved
        found = free.summary
        assert (found["metric"], found["metric_samples"], found["metric_before"]) == ("top1", COUNT, 0.9)
        lost, high = found["metric_before"] - found["metric_after"], found["metric_loss_high"]
        assert high > max(lost, 0.009)
        assert ("  loss at most (95 %)", "", f"{high:.2g}") in result_table(free).rows
        within = (lost + high) / 2  # the loss on the samples is smaller, and what it may be is larger
        limited = tune(labelled(model, max_drop=within, output_dir=model.parent / "limited"))
        assert limited.placement != free.placement
        assert any(t.holds is False and t.placement == free.placement for t in limited.history)
        if limited.improved:
            assert limited.summary["metric_loss_high"] <= within

    def test_too_few_samples_are_told_and_the_loss_on_them_decides(self, model: Path, data) -> None:
        np.savez(model.parent / "few.npz", x=data[0][:40], labels=data[1][:40])
        log = Log()
        done = tune(settings(model, labels=model.parent / "few.npz", builds=10, max_drop=0.05), log)
        told = [note for note in log.notes if "cannot show" in note]
        assert len(told) == 1
        assert "40 samples cannot show that a loss is within `max_drop` 0.05, which takes at least 52" in told[0]
        assert done.improved
        assert done.summary["min_sqnr_db"] == 20  # a limit on the outputs, as without a metric
        assert done.summary["metric_before"] - done.summary["metric_after"] <= 0.05 < done.summary["metric_loss_high"]


def test_labels_in_another_order_are_doubted(model: Path, data, call: Call) -> None:
    wrong = (data[1] + 1) % 8
    np.save(model.parent / "wrong.npy", wrong)
    asked = ("--calibration-data", model.with_suffix(".npz"), "--labels", model.parent / "wrong.npy")
    code, _, err = call("quantize", model, *asked, "-o", model.parent / "q.onnx")
    assert code == 0
    assert "note: the float model has top1 0" in err
    log = Log()
    tune(settings(model, labels=model.parent / "wrong.npy", builds=10), log)
    assert any("see whether `labels` has the order of the samples" in note for note in log.notes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"labels": "labels.npy", "calibration_data": None}, BadOption, "give `calibration_data`, or as `labels`"),
        ({"labels": "few.npy"}, BadData, r"few.npy has 298 labels, .*model.npz \d+ samples: give one for each"),
        ({"labels": "nowhere.npy"}, BadData, r"labels .*nowhere.npy not found"),
        ({"labels": "labels.npy", "evaluate": "m:f"}, BadOption, "`evaluate` is a metric of its own"),
        ({"metric": "cosine", "calibration_data": None}, BadOption, "a metric needs samples"),
        ({"labels": "labels.npy", "metric": "top1:z"}, BadOption, "`metric` top1:z names no output: the model has y"),
        ({"labels": "labels.npy", "metric": "top1:"}, BadOption, "`metric` top1: names no output: the model has y"),
        ({"labels": "labels.npy", "metric": "cosine"}, BadOption, "`metric` cosine fits no output"),
        ({"labels": "from_one.npy"}, BadOption, "label 8 is no class of output y, which has 8: count classes from"),
    ],
)
def test_one_line_says_what_to_do_before_anything_is_measured(model: Path, data, changes, error, message) -> None:
    for name, labels in (("few", data[1][2:]), ("from_one", data[1] + 1)):
        np.save(model.parent / f"{name}.npy", labels)
    if "labels" in changes:
        changes = changes | {"labels": model.parent / changes["labels"]}
    log = Log()
    with pytest.raises(error, match=message) as told:
        tune(settings(model, builds=10, **changes), log)
    assert "\n" not in str(told.value)
    assert set(log.stages) <= {f"reading {model.name}"}


class TestTheCommands:
    def test_quantize_tells_it_too_of_one_file_of_samples_and_labels(self, model: Path, data, call: Call) -> None:
        both = model.parent / "both.npz"
        np.savez(both, x=data[0], labels=data[1])
        asked = ("quantize", model, "--calibration-data", both, "--labels", both, "-o", model.parent / "q.onnx")
        code, out, err = call(*asked)
        assert code == 0
        assert "labels" not in err
        assert f"top1 on {COUNT} samples: 0.9 before, " in out
        assert "; loss at most 0." in out
        code, out, _ = call(*asked, "--metric", "top5", "--json")
        row = json.loads(out)["metric"]
        assert (code, row["name"], row["samples"]) == (0, "top5", COUNT)

    def test_labels_may_be_arrays_of_python(self, model: Path, data) -> None:
        done = qdqtune.quantize(model, output=model.parent / "q.onnx", calibration_data={"x": data[0]}, labels=data[1])
        assert done.metric is not None
        assert done.metric[0] == 0.9
        with pytest.raises(BadData, match="labels are an array or a list"):
            qdqtune.quantize(model, output=model.parent / "q.onnx", calibration_data={"x": data[0]}, labels=7)


class TestCompare:
    """The metric of `compare`, and the limit on it."""

    @pytest.fixture
    def files(self, model: Path) -> list[Path]:
        net, target = classifier(), model.with_name("q.onnx")
        known = ranges(net)
        save(insert(net, Placement.of(possible_edges(net, known)), known, INT8), target)
        return [model, target]

    def test_a_limit_on_the_loss_holds_or_not_beyond_doubt(self, files: list[Path], call: Call, tmp_path: Path) -> None:
        asked = ("compare", *files, "--engine", "fake", "--calibration-data", files[0].with_suffix(".npz"),
                 "--labels", tmp_path / "labels.npy", "--timing-runs", 12)  # fmt: skip
        (row,) = json.loads(call(*asked, "--json")[1])["others"]
        metric = row["metric"]
        lost, high = metric["before"] - metric["after"], metric["loss_high"]
        assert (metric["name"], metric["samples"], metric["before"]) == ("top1", COUNT, 0.9)
        assert high > max(lost, 0.009)
        within = (max(lost, 0.009) + high) / 2  # the loss on the samples is smaller, and what it may be is larger
        for most, code, told in ((high, 0, "holds"), (within, 4, "give more labels, or a higher --max-drop"),
                                 (lost / 2, 4 if lost else 0, "a higher" if lost else "can show more")):  # fmt: skip
            done, out, _ = call(
                *asked, "--max-drop", most, "--junit", tmp_path / "gate.xml", "--markdown", tmp_path / "gate.md"
            )
            assert done == code
            assert f"{metric['after']:.4g}, first 0.9" in out
            for text in (out, (tmp_path / "gate.xml").read_text(), (tmp_path / "gate.md").read_text()):
                assert re.search(r"top1 on 300 samples: 0.9 before, \S+ after; \d+ lost, \d+ won; loss at most ", text)
                assert told in text or text.startswith("<?xml")
            assert ("<failure" in (tmp_path / "gate.xml").read_text()) == (code == 4)

    def test_too_few_samples_to_tell_pass_as_undecided(self, files: list[Path], data) -> None:
        few = {"calibration_data": {"x": data[0][:40]}, "labels": data[1][:40]}
        done = qdqtune.compare(files[0], files[0], engine="fake", max_drop=0.05, **few)
        (one,) = done.gated
        assert (one.outcome, done.exit_code) == ("undecided", 0)
        assert one.told.endswith("; at least 52 samples can show more")

    def test_a_function_of_the_user_gives_one_number(self, files: list[Path]) -> None:
        def spread(predict) -> float:
            return float(predict({"x": np.ones((1, 8, 64), np.float32)})["y"].std())

        done = qdqtune.compare(*files, engine="fake", evaluate=spread, max_drop=100.0)
        assert [one.outcome for one in done.gated] == ["holds"]
        values = done.to_dict()["others"][0]["metric"]
        assert values.keys() == {"before", "after"}
        assert values["before"] != values["after"]

    def test_a_metric_that_cannot_be_computed_fails_the_file(self, files: list[Path]) -> None:
        calls = iter((1.0, float("nan")))
        done = qdqtune.compare(*files, engine="fake", evaluate=lambda predict: next(calls), max_drop=1)
        assert [one.outcome for one in done.gated] == ["failed"]

    @pytest.mark.parametrize(
        ("asked", "told"),
        [({"max_drop": 0.1}, "`max_drop` is about a metric"), ({"labels": np.arange(COUNT)}, "is no class of output y"),
         ({"metric": "top1:z"}, "names no output"), ({"evaluate": "nowhere:f"}, "cannot import `evaluate`")],
    )  # fmt: skip
    def test_labels_and_options_are_checked_before_anything_is_built(self, files, data, monkeypatch, asked, told):
        monkeypatch.setattr(
            "qdqtune.commands.compare.compare_files", lambda *_, **__: pytest.fail("something was built")
        )
        with pytest.raises(BadOption, match=told):
            qdqtune.compare(*files, engine="fake", calibration_data={"x": data[0]}, **asked)
