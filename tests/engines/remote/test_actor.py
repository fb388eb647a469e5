import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from qdqtune.engines import EngineSpec
from qdqtune.engines.remote.actor import WorkerActor
from qdqtune.engines.remote.files import Receiver, Sender
from qdqtune.errors import EngineUnavailable, OutputError
from qdqtune.graph.loading import load
from qdqtune.graph.saving import ConstantFile
from runs import mixed, room_for, write


class TestFileTransfer:
    @pytest.fixture
    def sent(self, tmp_path: Path) -> tuple[Path, Sender, list[Any]]:
        """A model with constants in a file beside it, and what was put into the store."""
        path = tmp_path / "candidate.onnx"
        with ConstantFile(tmp_path / "constants.bin") as constants:
            constants.save(load(write(mixed(), tmp_path)), path)
        store: list[Any] = []

        def put(_: str, values: Any) -> int:
            store.append(values)
            return len(store) - 1

        return path, Sender(put), store

    def test_a_sent_model_is_unchanged_and_its_constants_are_sent_once(self, sent, tmp_path):
        path, sender, store = sent
        first, again = sender.model(path), sender.model(path)
        assert again.constants == first.constants
        assert len(store) == len(first.constants) > 0
        asked_for: list[int] = []

        def get(reference: int) -> Any:
            asked_for.append(reference)
            return store[reference]

        folder = tmp_path / "host"
        folder.mkdir()
        for number in range(2):
            arrived = Receiver(folder, get).model(first, number)
            want = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
            have = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(arrived).graph.initializer}
            assert have.keys() == want.keys()
            assert all(np.array_equal(have[name], want[name]) for name in want)
        assert sorted(asked_for) == list(range(len(store)))

    def test_arrays_of_equal_content_are_sent_once(self, sent: tuple[Path, Sender, list[Any]]) -> None:
        _, sender, store = sent
        large, small = np.arange(100_000.0), np.arange(3)
        first, second = sender.arrays({"x": large, "n": small}), sender.arrays({"y": large.copy(), "z": large[None]})
        assert len(store) == 2  # of another shape is another
        back = Receiver(Path(), lambda reference: store[reference])
        assert np.array_equal(back.arrays(first)["x"], back.arrays(second)["y"])
        assert np.array_equal(back.arrays(first)["n"], small)

    def test_inputs_that_were_not_used_for_longest_are_forgotten(self) -> None:
        store: dict[str, Any] = {}
        sender = Sender(store.__setitem__, most_kept=2 * 800_000, forget=store.__delitem__)
        arrays = [np.full(100_000, float(number)) for number in range(4)]
        for array in (*arrays[:3], arrays[0]):
            sender.arrays({"x": array})
        assert [values[0] for values in store.values()] == [1.0, 2.0, 0.0]  # the first had gone, and came again
        sender.store(np.zeros(10**6))  # a constant, of which none is forgotten
        for array in arrays:
            sender.arrays({"x": array})
        assert len(store) == len(sender.inputs) + 1 == 4

    def test_a_worker_whose_disk_is_full_is_lost_with_a_reason(self, sent, tmp_path):
        path, sender, store = sent
        (tmp_path / "files").mkdir()
        with room_for(1000), pytest.raises(OutputError, match="cannot write"):
            Receiver(tmp_path / "files", lambda reference: store[reference]).model(sender.model(path), 1)
        host = WorkerActor(EngineSpec("fake"), 1, lambda reference: store[reference], os.curdir)
        host._worker = SimpleNamespace(kill=lambda: None)  # type: ignore[assignment]
        with room_for(1000):
            reply = host.request("build", (1, sender.model(path), None), 60)
        host.close()
        assert isinstance(reply.result, EngineUnavailable)
        assert "cannot write" in str(reply.result)
