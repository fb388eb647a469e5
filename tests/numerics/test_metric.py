"""The user's own metric: where it comes from, what it is given, and what its errors become."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models import build, feeds, normal
from qdqtune.calibration.user_code import TooSlow
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import BadOption, EngineRefused
from qdqtune.graph.saving import save
from qdqtune.numerics.metrics import evaluate, load_evaluation
from refusals import refusal
from workers import Workers

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
    assert isinstance(handle, Handle)
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
     ("return open(predict)", r"failed: TypeError: .* \(it is called with `predict`, which takes"),
     ("return np.ones(2)", "returned ndarray"), ("return None", "returned NoneType")],
)  # fmt: skip
def test_errors_of_the_function_are_one_line(metric, loaded, body, message):
    with pytest.raises(BadOption, match=message) as error:
        evaluate(load_evaluation(metric(body), EXECUTION), *loaded)
    assert "\n" not in str(error.value)


def test_a_metric_that_is_not_finite_fails_the_model(metric: Metric, loaded: tuple[Runner, Handle]) -> None:
    with pytest.raises(EngineRefused, match="inf"):
        evaluate(load_evaluation(metric("return float('inf')"), EXECUTION), *loaded)


@pytest.mark.parametrize(
    "body", ["predict({'x': np.ones(7, np.float32)}); return 1",
             "try: predict({'x': np.ones(7, np.float32)})\n    except Exception: return 1"],
)  # fmt: skip
def test_what_the_engine_refuses_fails_the_model_and_not_the_function(metric, loaded, body):
    with pytest.raises(EngineRefused):
        evaluate(load_evaluation(metric(body), EXECUTION), *loaded)


HANGS = "import threading; threading.Event().wait()"


def test_a_metric_that_hangs_is_given_up(metric: Metric, loaded: tuple[Runner, Handle]) -> None:
    asks = "predict({'x': np.zeros((2, 4), np.float32)})"
    with pytest.raises(TooSlow, match=r"`evaluate` .*metric.py:score took longer than 0.05 s: `time_limit` gives it"):
        evaluate(load_evaluation(metric(f"{asks}\n    {HANGS}"), Execution(0.05)), *loaded)


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


def test_predict_of_a_metric_that_was_given_up_ends(metric: Metric, loaded: tuple[Runner, Handle]) -> None:
    """Or else threads of the function would be waited for when Python ends."""
    lines = (
        "import threading",
        "threading.gate, threading.ended = threading.Event(), threading.Event()",
        "threading.gate.wait()",
        "try: predict({'x': np.ones((2, 4), np.float32)})",
        "finally: threading.ended.set()",
    )
    with pytest.raises(TooSlow):
        evaluate(load_evaluation(metric("\n    ".join(lines)), Execution(0.05)), *loaded)
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
