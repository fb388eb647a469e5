"""Calibration data: every form that is promised, random values, and one clear line for everything that does not fit."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import build, embedding, normal
from qdqtune.calibration.inputs import input_specs
from qdqtune.calibration.samples import Samples, open_samples
from qdqtune.errors import BadData, BadModel, BadOption
from qdqtune.graph.model import Model
from sample_files import Array, lists, model, refused, saved


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a module in the current folder and gives its name, a new one for each test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"calibration_{tmp_path.name}"

    def write(text: str) -> str:
        (tmp_path / f"{name}.py").write_text("import numpy as np\n" + text)
        return name

    yield write
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("inputs", "shape", "expected"),
    [
        ("float[1,3] x", (4, 3), [(1, 3)] * 4),
        ("float[1,3] x", (4, 1, 3), [(1, 3)] * 4),
        ("float[N,3] x", (4, 3), [(1, 3)] * 4),
        ("float[N,3] x", (2, 5, 3), [(5, 3)] * 2),
        ("float[2,3] x", (6, 3), [(2, 3)] * 3),
        ("float[N,M] x", (2, 7), [(1, 7)] * 2),
        ("float x", (), [()]),
        ("float x", (3,), [()] * 3),
        ("float[1,0] x", (1, 0), [(1, 0)]),
        ("float[N,M] x", (3, 0), [(1, 0)] * 3),
    ],
)
def test_arrays_are_cut_into_samples(tmp_path: Path, inputs: str, shape: Any, expected: list[Any]) -> None:
    array = normal(*shape)
    found = list(open_samples(saved(tmp_path, x=array), model(inputs)))
    assert [s["x"].shape for s in found] == expected
    assert all(isinstance(s["x"], np.ndarray) and s["x"].dtype == np.float32 for s in found)
    np.testing.assert_array_equal(np.concatenate([s["x"].reshape(-1) for s in found]), array.reshape(-1))


def test_arrays_of_one_sample_are_repeated(tmp_path: Path) -> None:
    net = model("float[2,1,K] state, int64 rate, float[N,4] x")
    source = saved(tmp_path, x=normal(3, 4), state=normal(2, 1, 5), rate=np.array(16000))
    found = list(open_samples(source, net))
    assert [{n: a.shape for n, a in s.items()} for s in found] == [{"state": (2, 1, 5), "rate": (), "x": (1, 4)}] * 3
    assert all(s["rate"] == 16000 and np.array_equal(s["state"], normal(2, 1, 5)) for s in found)
    np.testing.assert_array_equal(np.concatenate([s["x"] for s in found]), normal(3, 4))


def test_a_folder_is_read_file_by_file_in_order(tmp_path: Path) -> None:
    for name, start in (("b", 10), ("a", 0), ("c", 20)):
        np.save(tmp_path / f"{name}.npy", np.arange(start, start + 6, dtype=np.float32).reshape(2, 3))
    np.savez(tmp_path / "d.npz", x=np.full((1, 3), 30, np.float32))
    (tmp_path / "notes.txt").write_text("not data")
    (tmp_path / "._a.npy").write_bytes(b"what macOS knows of a.npy")
    samples = open_samples(str(tmp_path), model())
    assert [s["x"][0, 0] for s in samples] == [0, 3, 10, 13, 20, 23, 30]
    before = samples.digest
    np.save(tmp_path / "c.npy", np.zeros((1, 3), np.float32))
    assert open_samples(str(tmp_path), model()).digest != before


def test_a_folder_is_not_read_further_than_asked(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", normal(2, 3))
    (tmp_path / "b.npy").write_bytes(b"rubbish")
    samples = open_samples(str(tmp_path), model())
    assert len(samples.first(2)) == 2
    with pytest.raises(BadData, match=r"b\.npy"):
        list(samples)


def test_of_sorted_samples_a_limit_takes_some_of_all_and_knows_the_others(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32)[:, None].repeat(3, 1)
    samples = open_samples(saved(tmp_path, x=rows), model(), limit=3)
    assert [s["x"][0, 0] for s in samples] == [0, 4, 8]
    assert [s["x"][0, 0] for s in samples.others(3)] == [1, 5, 9]
    assert [s["x"][0, 0] for s in samples.others(99)] == [1, 2, 3, 5, 6, 7, 9, 10, 11]


def test_of_many_files_a_limit_reads_those_that_it_takes(tmp_path: Path) -> None:
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", np.full((2, 3), number, np.float32))
    (tmp_path / "1.npy").write_bytes(b"rubbish")
    samples = open_samples(str(tmp_path), model(), limit=2)
    assert [s["x"][0, 0] for s in samples] == [0, 2]
    with pytest.raises(BadData, match=r"1\.npy"):
        list(samples.others(2))


BAD_ARRAYS: list[tuple[str, str, dict[str, Array], str]] = [
    ("other name", "float[1,3] x", {"y": normal(2, 3)}, "no array 'x'"),
    ("many names", "float[1,3] x", {f"y{n}": normal(2, 3) for n in range(9)}, r"it holds 'y0', .*, 'y5', \.\.\.$"),
    ("one too many", "float[1,3] x", {"x": normal(2, 3), "y": normal(2, 3)}, "'y' that is no input"),
    ("wrong size", "float[1,3] x", {"x": normal(2, 4)}, r"shape \(2, 4\), the model wants x: float32\[1,3\]"),
    ("last axis", "float[N,6,1] x", {"x": normal(4, 6)}, r"one axis is missing: array\[\.\.\., None\]$"),
    ("batch", "float[4,3] x", {"x": normal(6, 3)}, "shape"),
    ("scalar", "float[1,3] x", {"x": np.float32(1)}, "shape"),
    ("float64", "float[1,3] x", {"x": np.zeros((2, 3))}, r"convert it with array\.astype\('float32'\)$"),
    ("channels last", "float[1,3,4,5] x", {"x": normal(2, 4, 5, 3)}, r": numpy\.moveaxis\(array, -1, -3\) puts"),
    ("channels first", "float[N,4,5,3] x", {"x": normal(3, 4, 5)}, r": numpy\.moveaxis\(array, -3, -1\) puts"),
    ("pictures", "float[1,3] x", {"x": np.ones((2, 3), np.uint8)}, "float32: convert it as your application does"),
    ("integers", "int64[1,3] x", {"x": np.ones((2, 3), np.int32)}, "int32, the model wants int64"),
    ("NaN", "float[1,3] x", {"x": np.float32([[1, np.nan, 2]])}, r"NaN .*, the first at \[0, 1\]: leave out"),
    ("counts", "float[1,3] x, float[1,3] z", {"x": normal(2, 3), "z": normal(3, 3)}, "different numbers of samples"),
    ("objects", "float[1,3] x", {"x": np.array([{}], object)}, "Object arrays cannot be loaded"),
]


@pytest.mark.parametrize(("inputs", "arrays", "message"), [b[1:] for b in BAD_ARRAYS], ids=[b[0] for b in BAD_ARRAYS])
def test_arrays_that_do_not_fit(tmp_path: Path, inputs: str, arrays: dict[str, Array], message: str) -> None:
    refused(f"data\\.npz.*{message}", saved(tmp_path, **arrays), model(inputs))


@pytest.mark.parametrize("shape", [(0, 3), (0, 1, 3)])
def test_no_sample_at_all(tmp_path: Path, shape: tuple[int, ...]) -> None:
    source = saved(tmp_path, x=normal(*shape))
    assert list(open_samples(source, model())) == []
    refused("no sample", source, model())


def cut(path: Path) -> None:
    np.savez(path, x=normal(50, 3))
    path.write_bytes(path.read_bytes()[:200])


@pytest.mark.parametrize("write", [cut, Path.touch, Path.mkdir, lambda p: p.write_bytes(b"rubbish\n" * 9)])
def test_files_that_are_no_arrays(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    path = tmp_path / "data.npz"
    write(path)
    refused(r"data\.npz", path, model())


@pytest.mark.parametrize("source", ["missing.npz", "missing", "/no/such/folder", "missing.npy", "", "."])
def test_sources_that_hold_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (tmp_path / "notes.md").touch()
    monkeypatch.chdir(tmp_path)
    refused("no calibration data in .*: give an .npz|cannot read .*: No such", source, model())


def test_a_bare_array_for_a_model_of_two_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", normal(2, 3))
    refused("one input", tmp_path, model("float[1,3] x, float[1,3] z"))


@pytest.mark.parametrize(
    ("text", "source", "message"),
    [
        ("", "no_such_module:f", "no_such_module"),
        ("", "{}:missing", "missing"),
        ("f = 3", "{}:f", "not callable"),
        ("raise SystemError('not\\ntoday')", "{}:f", "not today"),
        ("def f(:", "{}:f", "syntax"),
        ("", ":f", "cannot import"),
        ("", "nowhere/data.py:f", "there is no file nowhere/data.py"),
    ],
)
def test_callables_that_do_not_exist(module: Callable[[str], str], text: str, source: str, message: str) -> None:
    refused(message, source.format(module(text)), model(), BadOption)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "TypeError"),
        ("return [np.ones((1, 3), np.float32), np.zeros((1, 3), np.float32).tolist()]", "float64, the model wants"),
        ("return [None]", "the model wants float32"),
        ("return [[[1], [1, 2]]]", "failed"),
    ],
)
def test_callables_that_give_invalid_samples(module: Callable[[str], str], body: str, message: str) -> None:
    name = module(f"def f():\n    {body}\n")
    refused(message, f"{name}:f", model())


def test_errors_of_the_caller_are_not_reported_as_the_callables(module: Callable[[str], str]) -> None:
    name = module("def f():\n    yield np.ones((1, 3), np.float32)\n")
    with pytest.raises(ZeroDivisionError):
        [1 // 0 for _ in open_samples(f"{name}:f", model())]


def numbered(count: int) -> Samples:
    return Samples("numbers", "", False, lambda: ({"x": np.array(i)} for i in range(count)))


def test_every_fifth_sample_is_held_out_where_there_are_enough() -> None:
    assert numbered(19).apart(4, 4) is None
    assert numbered(20).apart(4, 9) is not None
    split = numbered(23).apart(4, 4)
    others, apart = split
    assert [int(s["x"]) for s in apart] == [4, 9, 14, 19]
    for _ in range(2):
        assert [int(s["x"]) for s in others] == [i for i in range(23) if i not in (4, 9, 14, 19)]


@pytest.mark.parametrize(("total", "wanted"), [(3, [0, 1, 2]), (4, [0, 1, 2, 3]), (9, [0, 2, 4, 6]), (6, [0, 1, 3, 4])])
def test_samples_are_taken_from_all_of_the_data(total: int, wanted: list[int]) -> None:
    assert [int(sample["x"]) for sample in numbered(total).spread(4)] == wanted
    with pytest.raises(BadData, match="holds no sample"):
        numbered(0).spread(4)


def test_random_inputs_are_the_same_in_every_pass_and_differ_by_number_and_input() -> None:
    net = model("float[N,3] x, float[N,3] z, bool[2] flag, float16[1] h")
    samples = open_samples(None, net, seed=7)
    assert samples.is_random
    found = lists(samples)
    assert found == lists(samples) == lists(open_samples(None, net, seed=7))
    assert len(found) == 8
    assert found != lists(open_samples(None, net, seed=8))
    assert found[0]["x"] != found[1]["x"]
    assert found[0]["x"] != found[0]["z"]
    assert {n: (a.dtype, a.shape) for n, a in samples.first(1)[0].items()} == {
        "x": (np.float32, (1, 3)), "z": (np.float32, (1, 3)), "flag": (np.bool_, (2,)), "h": (np.float16, (1,)),
    }  # fmt: skip
    assert len(open_samples(None, net, limit=3).first(9)) == 3


TWO_TABLES = """net (int64[1,4] ids) => (float[1,4,2] a, float[2,1,4] b) {
    a = Gather(long, ids) n = Cast<to=6>(ids) b = Gather<axis=1>(wide, n)
}"""
TURNED = "net (int64[1,4] ids) => (float[4,1,2] a) { t = Transpose(ids) a = Gather(table, t) }"


@pytest.mark.parametrize(
    ("net", "end"),
    [
        (embedding(rows=7), 7),
        (build(TWO_TABLES, {"long": normal(9, 2), "wide": normal(2, 5)}), 5),
        (build(TURNED, {"table": normal(6, 2)}), 6),
        (model("int64[1,30] ids"), 2),
    ],
)
def test_random_integers_stay_inside_every_table_they_look_up(net: Model, end: int) -> None:
    ids = np.concatenate([s["ids"] for s in open_samples(None, net, limit=60)])
    assert set(np.unique(ids)) == set(range(end))


def test_dynamic_sizes_are_refused_with_the_option_that_sets_them() -> None:
    with pytest.raises(BadOption, match=r"^input .* with, like `input_shapes` x:1x3x224x224$"):
        open_samples(None, model("float[N,3,H,W] x"))
    with pytest.raises(BadOption, match=r"run with, like `input_shapes` m:1x64 `input_shapes` past:1x4x64x8$"):
        open_samples(None, model("int64[N,T] m, float[N,4,P,8] past"))
    assert open_samples(None, model("float[N,3] x")).first(1)[0]["x"].shape == (1, 3)
    with pytest.raises(BadModel, match=r"too large to make up: x: float32\[9999999999,9999999999\]; give smaller"):
        open_samples(None, model("float[9999999999,9999999999] x")).first(1)


def test_inputs_of_unknown_rank_and_of_strings_are_refused() -> None:
    for field in ("shape", "elem_type"):
        net = model()
        net.proto.graph.input[0].type.tensor_type.ClearField(field)
        with pytest.raises(BadModel, match="'x' is not a tensor of known type and rank"):
            input_specs(Model(net.proto))
    with pytest.raises(BadModel, match="input 'x' holds strings: export what is behind"):
        input_specs(model("string[N,2] x"))
