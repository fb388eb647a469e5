"""A module of PyTorch is a model: what is exported, at which sizes it is measured, and what is refused."""

from pathlib import Path
from typing import Any

import onnx
import pytest

import qdqtune
from qdqtune.commands.torch_export import example_shapes, export
from qdqtune.errors import BadModel, BadOption
from runs import mixed, write
from workers import in_process

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed: make torch")
pytest.importorskip("onnxscript", reason="onnxscript is not installed: make torch")


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.norm = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16)
        self.dropout, self.head = torch.nn.Dropout(), torch.nn.Linear(16, 4)

    def forward(self, pictures: Any) -> Any:
        hidden = torch.relu(self.norm(self.convolution(pictures)))
        return self.head(self.dropout(hidden.mean((2, 3))))


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 2)

    def forward(self, input_ids: Any, attention_mask: Any = None, scale: float = 1.0) -> Any:
        hidden = self.table(input_ids)
        return {"logits": self.head(hidden if attention_mask is None else hidden * attention_mask[..., None]) * scale}


class FixedBatch(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        if x.shape[0] != 1:
            raise ValueError("one at a time")
        return x * 2


def inputs_of(path: Path) -> dict[str, list[object]]:
    graph = onnx.load(path).graph
    return {
        i.name: ["batch" if d.dim_param else d.dim_value for d in i.type.tensor_type.shape.dim] for i in graph.input
    }


def test_the_batch_is_dynamic_and_the_module_stays_as_it_is(tmp_path: Path) -> None:
    module, path = Classifier(), tmp_path / "model.onnx"
    module.norm.eval()
    export(module, torch.zeros(1, 3, 8, 8), path)
    assert inputs_of(path) == {"pictures": ["batch", 3, 8, 8]}
    assert [node.op_type for node in onnx.load(path).graph.node].count("Dropout") == 0
    assert (module.training, module.norm.training, module.dropout.training) == (True, False, True)


def test_arguments_by_position_or_by_name(tmp_path: Path) -> None:
    ids, path = torch.zeros(2, 5, dtype=torch.int64), tmp_path / "model.onnx"
    export(Encoder(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, path)
    assert inputs_of(path) == {"input_ids": ["batch", 5], "attention_mask": ["batch", 5]}
    export(Encoder(), (ids, None, 0.5), path)
    assert inputs_of(path) == {"input_ids": ["batch", 5]}
    assert example_shapes(path, Encoder(), (ids, None, 0.5)) == {"input_ids": (2, 5)}


def test_a_module_that_takes_one_batch_only_keeps_it(tmp_path: Path) -> None:
    export(FixedBatch(), torch.zeros(1, 3), tmp_path / "model.onnx")
    assert inputs_of(tmp_path / "model.onnx") == {"x": [1, 3]}


def test_what_cannot_be_exported_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="give `example_inputs`, what its forward takes"):
        qdqtune.inspect(Classifier())
    with pytest.raises(BadModel, match="are not what forward of Classifier takes: too many positional arguments"):
        qdqtune.inspect(Classifier(), example_inputs=(1, 2))
    with pytest.raises(BadModel, match=r"PyTorch cannot export Classifier: .*Error: ") as error:
        qdqtune.inspect(Classifier(), example_inputs=torch.zeros(1, 7))
    assert "\n" not in str(error.value)


def test_a_module_is_tuned_at_the_sizes_of_its_examples(tmp_path: Path) -> None:
    given: Any = {"engine": "fake", "builds": 4, "report": False, "calibration_method": "minmax"}
    with in_process():
        done = qdqtune.tune(Classifier(), example_inputs=torch.zeros(4, 3, 8, 8), output_dir=tmp_path, **given)
    assert done.file.is_file()
    assert inputs_of(done.file) == {"pictures": ["batch", 3, 8, 8]}
    assert '"pictures": [' in (tmp_path / "run.json").read_text()


def test_examples_are_for_modules_only(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"`example_inputs` is for a torch\.nn\.Module"):
        qdqtune.inspect(write(mixed(), tmp_path), example_inputs=torch.zeros(1))
