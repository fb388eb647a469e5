"""The user's own metric: a function that asks a model for outputs and says how good they are.

`evaluate` module:callable or `path/to/file.py:callable` is called as `callable(predict) -> float`; higher is better.
`predict` takes one set of inputs, {input name: array}, and returns {output name: array}, computed on the target
engine; threads that call it wait for each other. The time limit holds for each call of `predict`, and for what the
function takes beside them. The function is called for the float model and for each candidate that is about to be
accepted, and should return the same number for the same model:

    def accuracy(predict):
        hits = [predict({"image": x[None]})["logits"].argmax() == label for x, label in test_set()]
        return sum(hits) / len(hits)
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from qdqtune.calibration.user_code import BudgetEnded, call_in_thread, import_callable, user_errors
from qdqtune.engines.execution import CHECK_SECONDS, Execution
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import BadOption, EngineFailure
from qdqtune.types import Array, Failure

Predict = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Outputs by name for one set of inputs by name."""


@dataclass(frozen=True)
class Evaluation:
    """A metric: its name as the user gave it, 16 hex digits of a hash of its source text, the function, and the limits
    of its time."""

    source: str
    digest: str
    function: Callable[[Predict], float]
    execution: Execution


def load_evaluation(source: str, execution: Execution) -> Evaluation:
    """The metric of `module:callable` or `path/to/file.py:callable`.

    Raises:
        BadOption: it cannot be imported, or is not callable.
        TooSlow: the import takes too long.
    """
    function = import_callable(source, "`evaluate`", execution)
    try:
        code = inspect.getsource(sys.modules.get(function.__module__, function))
    except (OSError, TypeError, AttributeError):
        code = ""
    return Evaluation(
        source, hashlib.sha256((source + code).encode(errors="replace")).hexdigest()[:16], function, execution
    )


def evaluate(evaluation: Evaluation, runner: Runner, handle: Handle) -> float | Failure:
    """The metric of a model that the runner holds; a failure if the engine cannot run it, the metric is not finite, or
    the time budget has ended.

    The output of the function goes to standard error.

    Raises:
        BadOption: the function itself fails, or does not return a number.
        TooSlow: it takes too long.
    """
    failures: list[Failure] = []
    tasks, is_over, process = SimpleQueue[Any](), threading.Event(), os.getpid()

    def predict(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        if os.getpid() != process:
            raise EngineFailure("predict works in the process of the metric only: use threads, or none")
        answers, sample = SimpleQueue[Any](), {name: np.asarray(array) for name, array in inputs.items()}
        tasks.put(lambda: answers.put(runner.outputs(handle, [sample])))
        while not is_over.is_set():
            with suppress(Empty):
                result = answers.get(timeout=CHECK_SECONDS)
                if isinstance(result, Failure):
                    failures.append(result)
                    raise EngineFailure(result.reason)
                outputs: Mapping[str, Array] = result[0]
                return outputs
        raise EngineFailure("nobody waits for the metric any more")

    def score() -> float:
        with user_errors(f"`evaluate` {evaluation.source} failed", BadOption):
            return evaluation.function(predict)

    try:
        with redirect_stdout(sys.stderr):
            value = call_in_thread(score, f"`evaluate` {evaluation.source}", evaluation.execution, tasks)
    except BudgetEnded as ended:
        return Failure("timeout", str(ended))
    except (BadOption, EngineFailure) as error:
        if failures:
            return failures[0]
        if isinstance(error.__cause__, TypeError):
            raise BadOption(f"{error} (it is called with `predict`, which takes {{input name: array}})") from error
        if isinstance(error, EngineFailure):
            raise BadOption(f"`evaluate` {evaluation.source} failed: {error}") from error
        raise
    finally:
        is_over.set()
    if failures:  # it caught the error and went on, so its number means nothing
        return failures[0]
    return _number(evaluation.source, value)


def _number(source: str, value: object) -> float | Failure:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise BadOption(f"`evaluate` {source} returned {type(value).__name__}, not a number")
    number = float(array.reshape(()))
    return number if np.isfinite(number) else Failure("output", f"the metric of {source} is {number}")
