"""A metric for `--evaluate`: on what share of 32 new pictures a model gives the same answer as `model.onnx`.

For a network of your own, count right answers on labelled data instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import onnxruntime
from make_model import pictures

Predict = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


def agreement(predict: Predict) -> float:
    """`predict` runs the model that is judged: inputs by name to outputs by name. Higher is better."""
    hits = [predict(inputs)["logits"].argmax() == answer for inputs, answer in answered()]
    return float(np.mean(hits))


@cache
def answered() -> list[tuple[dict[str, np.ndarray], int]]:
    """New pictures, and what `model.onnx` answers: computed once, for all models that are judged."""
    original = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    questions = [{"image": picture[None]} for picture in pictures(32, seed=1)]
    return [(inputs, original.run(["logits"], inputs)[0].argmax()) for inputs in questions]
