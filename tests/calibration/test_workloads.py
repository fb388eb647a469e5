"""Workloads: what fits a model and each other is read, and gives its shapes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoders import CALLS, WEIGHTS, decoder, settings, written
from models import normal
from qdqtune.calibration.prepare import Data, prepare
from qdqtune.calibration.workloads import WorkloadFile, open_workloads
from qdqtune.engines.execution import EXECUTION
from qdqtune.errors import BadData, BadOption
from qdqtune.graph.loading import load
from qdqtune.tuning.loop import tune


def refusal(model: Path, **changes: Any) -> str:
    with pytest.raises((BadData, BadOption)) as refused:
        tune(settings(model, WEIGHTS, **changes))
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


@pytest.mark.usefixtures("workers")
def test_workloads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = written(tmp_path, decoder(), CALLS)
    assert "leave `input_shapes` out" in refusal(model, input_shapes={"ids": (1, 1)})
    twice = (WorkloadFile(model.with_name("decode.npz")), WorkloadFile(model.parent / "other" / "decode.npz"))
    assert "`workloads` has 'decode' more than once" in refusal(model, workloads=twice)
    for arrays, told in (
        ({"ids": CALLS["decode"]["ids"]}, "float32[?,2,?,32]; it holds 'ids'"),
        (CALLS["decode"] | {"more": normal(1)}, "has an array 'more' that is no input"),
        (CALLS["decode"] | {"past": normal(1, 3, 15, 32)}, "'past' has shape (1, 3, 15, 32), the model wants past"),
        (CALLS["decode"] | {"ids": np.zeros((1, 1), np.int32)}, "is int32, the model wants int64"),
    ):
        np.savez(model.with_name("decode.npz"), **arrays)  # type: ignore[arg-type]
        assert told in refusal(model)
    model.with_name("decode.npz").unlink()
    assert "decode.npz" in refusal(model)


def test_a_model_is_shaped_where_all_workloads_agree(tmp_path: Path) -> None:
    model = written(tmp_path, decoder(), CALLS)
    files = [WorkloadFile(model.with_name(f"{name}.npz")) for name in CALLS]
    prepared = prepare(load(model), Data(workloads=files))
    assert prepared.sizes == {"ids": (1, None), "past": (1, 2, None, 32)}
    assert prepared.shaped.tensors["y"].shape == (1, None, 256)
    assert [s["ids"].shape for s in prepared.samples] == [(1, 1), (1, 64)]
    alone = prepare(load(model), Data(workloads=files[:1]))
    assert alone.shaped.tensors["present"].shape == (1, 2, 16, 32)
    empty = prepare(load(model), Data(input_shapes={"ids": (1, 5), "past": (1, 2, 0, 32)}))
    assert empty.shaped.tensors["present"].shape == (1, 2, 5, 32)
    assert empty.samples.first(1)[0]["past"].shape == (1, 2, 0, 32)
    with pytest.raises(
        BadOption,
        match=r"dynamic dimensions: .* ids:1x64 `input_shapes` past:1x2x64x32$",
    ):
        prepare(load(model), Data())
    assert [w.share for w in open_workloads(files, load(model), (), EXECUTION)] == [0.5, 0.5]
