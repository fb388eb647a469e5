"""A metric for `--evaluate`: on what share of 32 new pictures a model gives the same answer as `model.onnx`.

For a network of your own, count right answers on labelled data instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnxruntime
from make_model import pictures

Predict = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


def agreement(predict: Predict) -> float:
    """`predict` runs the model that is judged: inputs by name to outputs by name. Higher is better."""
    original = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    hits = 0
    for picture in pictures(32, seed=1):
        inputs = {"image": picture[None]}
        answer = original.run(["logits"], inputs)[0].argmax()
        hits += int(predict(inputs)["logits"].argmax() == answer)
    return hits / 32
