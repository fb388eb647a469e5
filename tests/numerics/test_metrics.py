"""Metrics over labels, against values by brute force; the user's own metric; how far a metric may have fallen."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import build, feeds, normal
from qdqtune.calibration.samples import Samples
from qdqtune.calibration.user_code import TooSlow
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import BadData, BadOption, EngineRefused
from qdqtune.graph.saving import save
from qdqtune.numerics.metrics import (
    Labelled,
    Name,
    answer,
    check_classes,
    chosen,
    evaluate,
    load_evaluation,
    measure,
    paired,
    read_labels,
    row_scores,
)
from qdqtune.numerics.scores import LEAST_CHANGED, Z2, Score, can_tell, loss_high, samples_to_tell
from qdqtune.types import Sample
from refusals import refusal
from workers import Workers

RANDOM = np.random.default_rng(0)
SCORES = RANDOM.normal(size=(60, 4)).astype(np.float32)
LABELS = np.where(RANDOM.random(60) < 0.6, SCORES.argmax(1), RANDOM.integers(0, 4, 60))


def scored(metric: Name, outputs: np.ndarray, right: np.ndarray) -> Score:
    """The metric over samples of one row each."""
    by_row = list[float]()
    for one, label in zip(outputs, right, strict=True):
        wanted = label[None] if isinstance(label, np.ndarray) else np.array([label])
        rows = row_scores(metric, answer(metric, one[None]), wanted)
        by_row += rows
    return Score.of_rows(metric, by_row)


def test_the_best_class_and_the_best_five() -> None:
    score = scored("top1", SCORES, LABELS)
    assert score.value == pytest.approx((SCORES.argmax(1) == LABELS).mean())
    assert score.by_sample == tuple((SCORES.argmax(1) == LABELS).astype(float))
    wide = RANDOM.normal(size=(40, 20)).astype(np.float32)
    labels = RANDOM.integers(0, 20, 40)
    ranks = (wide > wide[np.arange(40), labels][:, None]).sum(1)
    assert scored("top5", wide, labels).value == pytest.approx((ranks < 5).mean())
    assert scored("top1", SCORES[:, :, None, None], LABELS).value == score.value  # as pooled pictures
    assert scored("top1", SCORES.argmax(1), LABELS).value == score.value


def test_cosine_of_vectors() -> None:
    a, b = RANDOM.normal(size=(2, 9, 16)).astype(np.float32)
    expected = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    score = scored("cosine", a, b)
    assert score.by_sample == pytest.approx(expected, rel=1e-5)
    assert scored("cosine", a, a).value == pytest.approx(1.0)
    assert scored("cosine", np.zeros((1, 4), "f"), np.zeros((1, 4), "f")).value == 1.0


def test_a_sample_of_another_shape_than_in_float_scores_0() -> None:
    lengths = {"float.onnx": (3, 3), "final.onnx": (3, 2)}

    class Lengths:
        def outputs(self, handle: Handle, samples: list[Sample]) -> list[Sample]:
            return [{"y": np.ones((1, lengths[handle.path.name][int(sample["i"])], 4), "f")} for sample in samples]

    original, final = (Handle(Path(name), 0, 0.0) for name in lengths)
    samples = Samples("data", "", False, lambda: iter([{"i": np.array(i)} for i in range(2)]))
    metric = Labelled("cosine against the float model", "", "cosine", "y", samples, None)
    runner: Any = Lengths()
    assert measure(metric, runner, final, lambda: original).by_sample == pytest.approx((1.0, 0.0))


@pytest.mark.parametrize(
    ("shape", "label", "expected"),
    [
        ((1, 10), np.zeros(1, np.int64), "top1"),
        ((1, 10, 1, 1), np.zeros(1, np.int64), "top1"),
        ((1, 64), np.zeros((1, 64)), "cosine"),
    ],
)
def test_auto_takes_what_fits(shape: tuple[int, ...], label: np.ndarray, expected: str) -> None:
    outputs = {"boxes": np.zeros((3, 2, 2, 2, 2), np.float32), "out": np.zeros(shape, np.float32)}
    assert chosen("auto", outputs, label) == (expected, "out")
    outputs["other"] = outputs["out"]
    assert chosen("auto", outputs, label, "other") == (expected, "other")  # as METRIC:other names it


def test_what_does_not_fit_is_told_with_the_shapes() -> None:
    outputs = {"out": np.zeros((1, 10), np.float32)}
    with pytest.raises(BadOption, match=r"no metric fits: the model gives out float32\[1, 10\], and `labels` has"):
        chosen("auto", outputs, np.zeros((1, 5), np.int64))
    with pytest.raises(BadOption, match=r"`evaluate` calls a function of yours"):
        chosen("auto", {"out": np.zeros((1, 3, 8, 8), np.float32)}, np.zeros((1, 8, 8), np.int64))
    with pytest.raises(BadOption, match=r"`metric` cosine fits no output: the model gives out"):
        chosen("cosine", outputs, np.zeros((1, 9)))
    with pytest.raises(BadOption, match="label 10 is no class of output out, which has 10: count classes from 0"):
        check_classes("top1", "out", outputs["out"], np.array([10]))


def hits(*, lost: int, won: int, count: int, name: str = "top1") -> tuple[Score, Score]:
    """Float and quantized model with so many answers that only one of them has right; both are right elsewhere."""
    before = [1.0] * lost + [0.0] * won + [1.0] * (count - lost - won)
    after = [0.0] * lost + [1.0] * won + [1.0] * (count - lost - won)
    return tuple(Score(float(np.mean(s)), tuple(s), name) for s in (before, after))


@pytest.mark.parametrize(("lost", "won", "count"), [(3, 1, 50), (9, 2, 50), (1, 0, 30), (0, 2, 40), (12, 12, 400)])
def test_the_score_interval_ends_where_the_score_is_z(lost: int, won: int, count: int) -> None:
    """The nuisance share is found by maximizing the likelihood, not by the closed formula."""
    from scipy.optimize import minimize_scalar  # slow to import

    high = loss_high(*hits(lost=lost, won=won, count=count))

    def unlikely(share_won: float) -> float:
        cells = (lost, share_won + high), (won, share_won), (count - lost - won, 1 - 2 * share_won - high)
        return -sum(n * log(max(share, 1e-300)) for n, share in cells if n)

    bounds = max(0.0, -high), (1 - high) / 2
    q = minimize_scalar(unlikely, bounds=bounds, method="bounded", options={"xatol": 1e-10}).x
    z = (lost - won - count * high) / sqrt(count * (2 * q + high * (1 - high)))
    assert z == pytest.approx(-sqrt(Z2), rel=1e-3)


def test_the_samples_that_it_takes() -> None:
    few, _ = hits(lost=0, won=0, count=100)
    assert samples_to_tell(few, 0.01) == 268
    assert not can_tell(few, 0.01)
    for count, enough in ((267, False), (268, True)):
        before, after = hits(lost=0, won=0, count=count)
        assert can_tell(before, 0.01) is enough
        assert ((loss_high(before, after) or 0) <= 0.01) is enough
    assert not can_tell(few, 0.0)
    assert samples_to_tell(few, 0.0) == inf
    assert not can_tell(Score(0.9), 0.01)


def test_other_scores_take_students_t_of_the_differences() -> None:
    random = np.random.default_rng(1)
    before = random.normal(0.9, 0.2, 40)
    after = before - random.normal(0.01, 0.005, 40)
    high = loss_high(*(Score(float(s.mean()), tuple(s), "cosine") for s in (before, after)))
    lost = before - after
    assert high == pytest.approx(lost.mean() + 1.684875 * lost.std(ddof=1) / sqrt(40), rel=1e-5)


def test_too_few_changes_tell_nothing_of_other_scores() -> None:
    before = Score(0.5, (0.5,) * 30, "cosine")
    changed = [0.4] * (LEAST_CHANGED - 1) + [0.5] * (31 - LEAST_CHANGED)
    assert loss_high(before, Score(0.48, tuple(changed), "cosine")) is None
    assert loss_high(before, before) is None
    assert loss_high(Score(0.5), Score(0.4)) is None
    assert samples_to_tell(before, 0.01) == LEAST_CHANGED


SAMPLE = {"x": np.zeros((1, 3), np.float32)}
PAIR = {"x": np.zeros((2, 3), np.float32)}


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    ("name", "text"), [("l.txt", "3\n1\n4\n"), ("l.csv", "file,Label\na.png,3\nb.png,1\n\nc.png,4\n")]
)
def test_class_numbers_in_text(tmp_path: Path, name: str, text: str) -> None:
    found = read_labels(written(tmp_path, name, text))
    assert (found.tolist(), found.dtype) == ([3, 1, 4], np.int64)


@pytest.mark.parametrize("values", [np.array([3, 1, 4], np.uint8), np.array([[3.0], [1.0], [4.0]], np.float32)])
def test_class_numbers_in_arrays(tmp_path: Path, values: np.ndarray) -> None:
    np.save(tmp_path / "l.npy", values)
    np.savez(tmp_path / "one.npz", anything=values)
    np.savez(tmp_path / "both.npz", x=np.zeros((3, 3)), labels=values)
    for name in ("l.npy", "one.npz", "both.npz"):
        assert read_labels(tmp_path / name).tolist() == [3, 1, 4]
    np.save(tmp_path / "vectors.npy", np.full((2, 4), 0.5, np.float32))
    assert read_labels(tmp_path / "vectors.npy").shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.txt", "cat\ndog\n", "labels are numbers from 0 or vectors, not names: could not convert .*'cat'"),
        ("l.txt", "0.5\nnan\n", "l.txt: a label holds NaN or infinite values"),
        ("l.txt", "", "holds no label"),
        ("l.json", "[1, 2]", "give .npz, .npy, .csv or .txt"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(BadData, match=message) as error:
        read_labels(path)
    assert "\n" not in str(error.value)


def test_arrays_without_labels_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "l.npz", x=np.zeros(3), y=np.zeros(3))
    with pytest.raises(BadData, match="has no array 'labels'; it holds 'x', 'y'"):
        read_labels(tmp_path / "l.npz")
    for array, message in (np.array(3), "holds no label"), (np.array([1j]), "not names"):
        np.save(tmp_path / "l.npy", array)
        with pytest.raises(BadData, match=message):
            read_labels(tmp_path / "l.npy")
    with pytest.raises(BadData, match="not found"):
        read_labels(tmp_path / "nowhere.npy")


def test_labels_are_paired_with_samples_and_their_rows() -> None:
    labels = np.arange(4)

    def samples(count: int, sample: Sample) -> Samples:
        return Samples("data", "", False, lambda: iter([sample] * count))

    assert paired(labels, samples(4, SAMPLE), "l.csv").tolist() == [[0], [1], [2], [3]]
    assert paired(labels, samples(2, PAIR), "l.csv").tolist() == [[0, 1], [2, 3]]
    rows = np.stack([labels, labels], 1)
    assert paired(rows, samples(4, PAIR), "l.csv").tolist() == rows.tolist()
    with pytest.raises(BadData, match=r"l\.csv has 4 labels, data 3 samples: give one for each sample, in order"):
        paired(labels, samples(3, SAMPLE), "l.csv")
    with pytest.raises(BadData, match=r"has 4 labels, data \d+ samples: .* or for each of its 2 rows"):
        paired(labels, samples(5, PAIR), "l.csv")


NET = build("net (float[2,4] x) => (float[2,3] y) { y = MatMul(x, w) }", {"w": normal(4, 3)})
Metric = Callable[[str], str]


@pytest.fixture
def metric(tmp_path: Path) -> Metric:
    """Writes a file with a function `score(predict)` of the given body, and names it for --evaluate."""

    def write(body: str) -> str:
        path = tmp_path / "metric.py"
        path.write_text(f"import numpy as np\ndef score(predict):\n    {body}\n")
        return f"{path}:score"

    return write


@pytest.fixture
def loaded(tmp_path: Path, workers: Workers) -> tuple[Runner, Handle]:
    save(NET, tmp_path / "net.onnx")
    runner = Runner(EngineSpec("fake"), execution=Execution(60), log_dir=tmp_path)
    handle = runner.load(tmp_path / "net.onnx")
    return runner, handle


def test_predict_runs_the_model_and_what_is_printed_keeps_out_of_the_results(metric, loaded, capsys):
    sample = feeds(NET, 1)[0]["x"]
    source = metric(f"print('epoch'); return predict({{'x': np.array({sample.tolist()}, np.float32)}})['y'].sum()")
    expected = float((sample @ normal(4, 3)).sum())
    assert evaluate(load_evaluation(source, EXECUTION), *loaded) == pytest.approx(expected, rel=1e-5)
    assert capsys.readouterr() == ("", "epoch\n")


def test_another_text_is_another_metric(metric: Metric) -> None:
    first = load_evaluation(metric("return 1"), EXECUTION).digest
    assert load_evaluation(metric("return 1"), EXECUTION).digest == first
    assert load_evaluation(metric("return 2"), EXECUTION).digest != first


@pytest.mark.parametrize(
    ("body", "message"),
    [("raise KeyError('label\\n7')", "failed: KeyError: 'label"), ("return 'good'", "returned str, not a number"),
     ("raise SystemExit(0)", "failed: SystemExit"),
     ("predict({'z': 1})", "calls predict without x: the model has the inputs x"),
     ("return np.ones(2)", "returned ndarray"), ("return None", "returned NoneType")],
)  # fmt: skip
def test_errors_of_the_function_are_one_line(metric, loaded, body, message):
    with pytest.raises(BadOption, match=message) as error:
        evaluate(load_evaluation(metric(body), EXECUTION), *loaded)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "body", ["return float('inf')", "predict({'x': np.ones(7, np.float32)}); return 1",
             "try: predict({'x': np.ones(7, np.float32)})\n    except Exception: return 1"],
)  # fmt: skip
def test_what_is_not_finite_or_refused_by_the_engine_fails_the_model_and_not_the_function(metric, loaded, body):
    with pytest.raises(EngineRefused):
        evaluate(load_evaluation(metric(body), EXECUTION), *loaded)


HANGS = "import threading; threading.Event().wait()"


def test_a_metric_that_imports_for_ever_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "metric.py").write_text(HANGS)
    with pytest.raises(TooSlow, match=r"the import of .*metric.py:score took longer than 0.05 s"):
        load_evaluation(f"{tmp_path / 'metric.py'}:score", Execution(0.05))


def test_a_metric_that_outlasts_the_time_budget_has_no_value(metric: Metric, loaded: tuple[Runner, Handle]) -> None:
    evaluation = load_evaluation(metric(HANGS), Execution(60.0, time.monotonic()))
    found = refusal(lambda: evaluate(evaluation, *loaded))
    assert found.is_transient  # with more time it is asked again
    assert "`time_budget` has ended during `evaluate`" in found.reason


def test_what_the_engine_takes_is_not_time_of_the_metric(metric: Metric, loaded: tuple[Runner, Handle]) -> None:
    runner, handle = loaded
    outputs, ends = runner.outputs, threading.Event()

    def slowly(*arguments: Any) -> Any:
        ends.wait(0.2)
        return outputs(*arguments)

    runner.__dict__["outputs"] = slowly
    body = "return sum(predict({'x': np.ones((2, 4), np.float32)})['y'].size for _ in range(4))"
    assert evaluate(load_evaluation(metric(body), Execution(0.6)), runner, handle) == 24


def test_a_metric_that_hangs_is_given_up_and_its_predict_ends(metric: Metric, loaded: tuple[Runner, Handle]) -> None:
    """Or else threads of the function would be waited for when Python ends."""
    lines = (
        "import threading",
        "threading.gate, threading.ended = threading.Event(), threading.Event()",
        "predict({'x': np.zeros((2, 4), np.float32)})",
        "threading.gate.wait()",
        "try: predict({'x': np.ones((2, 4), np.float32)})",
        "finally: threading.ended.set()",
    )
    with pytest.raises(TooSlow, match=r"`evaluate` .*metric.py:score took longer than 0.05 s: `time_limit` gives it"):
        evaluate(replace(load_evaluation(metric("\n    ".join(lines)), EXECUTION), execution=Execution(0.05)), *loaded)
    threading.__dict__["gate"].set()
    assert threading.__dict__["ended"].wait(60)


def test_threads_that_call_predict_take_turns(metric, loaded):
    runner, handle = loaded
    outputs, asked = runner.outputs, threading.Lock()

    def alone(*arguments: Any) -> Any:
        assert asked.acquire(blocking=False)
        time.sleep(0.001)
        asked.release()
        return outputs(*arguments)

    runner.__dict__["outputs"] = alone
    lines = (
        "from concurrent.futures import ThreadPoolExecutor",
        "ask = lambda i: float(predict({'x': np.full((2, 4), i, np.float32)})['y'].sum())",
        "with ThreadPoolExecutor(8) as pool: found = list(pool.map(ask, range(40)))",
        "assert np.allclose(found, np.arange(40) * found[1], rtol=1e-4), found",
        "return len(found)",
    )
    assert evaluate(load_evaluation(metric("\n    ".join(lines)), EXECUTION), runner, handle) == 40
