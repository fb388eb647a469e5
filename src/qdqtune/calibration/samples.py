"""Calibration data: where samples come from, and whether they fit the model.

A source is iterated as often as needed; no more than one file of it is in memory. One sample is one set of inputs.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import struct
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from tokenize import TokenError
from types import ModuleType
from typing import Any
from zipfile import BadZipFile

import numpy as np
import onnx

from qdqtune.errors import BadData, BadModel, BadOption, first_of, one_line
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.operators import COPIES
from qdqtune.types import Array, Sample

HELD_OUT = 5
"""Every so many samples one is kept from calibration."""


PICTURE, SEQUENCE = 224, 64
"""Sizes that a user is told who has to give some: of a side, and of what is long as it comes."""

UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    RuntimeError,
    BadZipFile,
    zlib.error,
    SyntaxError,
    TokenError,
    TypeError,
    LookupError,
    ArithmeticError,
    MemoryError,
    struct.error,
)
"""What numpy, its reader of headers and the archive raise on damaged files, and on shapes that nobody has room for."""


@dataclass(frozen=True)
class InputSpec:
    """What the model wants for one input; an unknown dimension is None."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{','.join('?' if d is None else str(d) for d in self.shape)}]"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape can be fed."""
        return len(shape) == len(self.shape) and all(w in (None, d) for w, d in zip(self.shape, shape, strict=True))


@dataclass(frozen=True)
class Samples:
    """A re-iterable source of samples. `digest` names its content; `origin` is for people."""

    origin: str
    digest: str
    is_random: bool
    produce: Callable[[], Iterator[Sample]]

    def __iter__(self) -> Iterator[Sample]:
        return self.produce()

    def apart(self, least: int, most: int | None = None) -> tuple[Samples, Samples] | None:
        """Every fifth sample kept from the others until `most` are: the others, and these. None if under `least` are.

        Raises:
            BadData: there is no sample at all.
        """
        if len(self.first(HELD_OUT * least)) < HELD_OUT * least:
            return None

        def part(is_held_out: bool) -> Iterator[Sample]:
            end = None if most is None else HELD_OUT * most
            numbered = enumerate(islice(iter(self), end) if is_held_out else self, 1)
            return (s for i, s in numbered if (i % HELD_OUT == 0 and (end is None or i <= end)) == is_held_out)

        return replace(self, produce=lambda: part(False)), replace(self, produce=lambda: part(True))

    def spread(self, count: int) -> list[Sample]:
        """At most `count` samples, evenly from the first on; takes two passes.

        Raises:
            BadData: there is none.
        """
        total = sum(1 for _ in self)
        if total <= count:
            return self.first(count)
        wanted = {total * i // count for i in range(count)}
        return [sample for number, sample in enumerate(self) if number in wanted]

    def first(self, count: int) -> list[Sample]:
        """The first `count` samples, or all of them if there are fewer.

        Raises:
            BadData: there is none.
        """
        found = list(islice(iter(self), count))
        if not found:
            raise BadData(f"{self.origin} holds no sample")
        return found


def input_specs(model: Model) -> tuple[InputSpec, ...]:
    """Name, dtype and shape of every input that must be fed.

    Raises:
        BadModel: an input is not a tensor, or has no shape or type.
    """
    specs = []
    for name in model.inputs:
        info = model.tensors.get(name)
        if info is None or info.shape is None:
            raise BadModel(f"input '{name}' is not a tensor of known rank; such inputs are not supported")
        if info.dtype == onnx.TensorProto.UNDEFINED:
            raise BadModel(f"input '{name}' has no element type")
        specs.append(InputSpec(name, onnx.helper.tensor_dtype_to_np_dtype(info.dtype), info.shape))
    return tuple(specs)


def fixed_inputs(file: Path, fixed: Mapping[str, float | int | str]) -> Sample:
    """The inputs that --fix-input has made constant, for files that still ask for them, as this one does.

    Raises:
        BadModel: it cannot be read; it is not where nothing is fixed.
    """
    specs = {spec.name: spec for spec in input_specs(load(file))} if fixed else {}
    shapes = {name: tuple(d or 1 for d in specs[name].shape) for name in fixed}
    return {name: np.full(shapes[name], value).astype(specs[name].dtype) for name, value in fixed.items()}


def open_samples(
    source: str | None, model: Model, *, seed: int = 0, limit: int | None = None, fixed: Collection[str] = ()
) -> Samples:
    """Calibration samples from `source`: an .npz, a folder of .npy/.npz, or `module:callable`; None means random.

    Arrays are named as the model's inputs. An array of the input's rank holds one sample per batch (`a[i:i+1]` for
    batch 1), one of a rank more holds one per entry (`a[i]`); one that holds a single sample serves for all. A callable
    returns an iterable of dictionaries that fit as they are, or of arrays if the model has one input; it is called for
    each pass. Arrays of `fixed` inputs, which were made constants, are passed over.

    Raises:
        BadData: the source is missing, unreadable or does not fit the model (some of it tells only when iterated).
        BadOption: `module:callable` cannot be imported, or random inputs need shapes that the model leaves open.
    """
    specs = input_specs(model)
    if source is None:
        return _random(model, specs, seed, limit or 8)
    path = Path(source)
    if path.suffix == ".npz" or path.is_file():
        produce, digest = _from_files([path], specs, fixed), _digest([path])
    elif path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix in (".npy", ".npz") and not f.name.startswith("."))
        if not files:
            raise BadData(f"{path} holds no .npy or .npz file")
        produce, digest = _from_files(files, specs, fixed), _digest(files)
    elif ":" in source and os.sep + ":" not in source:
        produce, digest = _from_callable(source, specs, fixed)
    else:
        raise BadData(f"calibration data {source} not found: give an .npz, a folder of .npy/.npz, or module:callable")
    return Samples(source, digest, False, lambda: islice(produce(), limit))


def read_sample(path: Path, model: Model, fixed: Collection[str] = ()) -> Sample:
    """The arrays of a file as one sample, in the shapes that they have there.

    Raises:
        BadData: the file is missing or unreadable, or does not fit the model.
    """
    specs = input_specs(model)
    return _sample(read_arrays(path, specs), specs, fixed, str(path))


def files_named(source: str | None) -> list[Path]:
    """The files that calibration data or a metric lie in: an .npz, those of a folder, or the module of a callable.

    Nothing is imported: of a module these are the files that its name may stand for.
    """
    if source is None:
        return []
    path, place = Path(source), source.rpartition(":")[0]
    if path.is_dir():
        return [path, *sorted(path.iterdir())]
    if path.exists() or not place:
        return [path]
    if place.endswith(".py"):
        return [Path(place)]
    parts = Path(*place.split("."))
    folders = [Path(folder) for folder in ("", *sys.path)]
    return [folder / name for folder in folders for name in (parts.with_suffix(".py"), parts / "__init__.py")]


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        if not path.is_file():
            raise BadData(f"calibration data {path} not found")
        with path.open("rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()[:16]


def _from_files(
    files: list[Path], specs: tuple[InputSpec, ...], fixed: Collection[str]
) -> Callable[[], Iterator[Sample]]:
    return lambda: (sample for path in files for sample in _split(read_arrays(path, specs), specs, fixed, str(path)))


def read_arrays(path: Path, specs: tuple[InputSpec, ...] = ()) -> dict[str, Array]:
    """All arrays of one file, by input name; a bare .npy belongs to the only input.

    Raises:
        BadData: the file is missing or unreadable.
    """
    try:
        with path.open("rb") as file:
            if not file.read(6).startswith((b"PK", b"\x93NUMPY")):
                raise BadData(f"{path} is no .npz or .npy file: write it with numpy.savez or numpy.save")
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            if len(specs) != 1:
                raise BadData(f"{path}: a .npy file fits models of one input; this one has {_names(specs)}: use .npz")
            return {specs[0].name: loaded}
        with loaded:
            return {name: np.asarray(loaded[name]) for name in loaded.files}
    except FileNotFoundError as error:
        raise BadData(f"{path} not found") from error
    except UNREADABLE as error:
        why = "it holds objects, not numbers" if "allow_pickle" in str(error) else one_line(error)
        raise BadData(f"cannot read {path} as numpy arrays: {why}") from error


def _split(
    arrays: Mapping[str, Array], specs: tuple[InputSpec, ...], fixed: Collection[str], origin: str
) -> Iterator[Sample]:
    """The samples that one set of arrays holds."""
    _check_names(arrays, specs, fixed, origin)
    stacks = {spec.name: _stacked(arrays[spec.name], spec, origin) for spec in specs}
    counts = {name: len(stack) for name, stack in stacks.items()}
    if len(set(counts.values()) - {1}) > 1:
        raise BadData(f"{origin}: arrays hold different numbers of samples: {counts}")
    total = next((n for n in counts.values() if n != 1), 1)
    for i in range(total):
        yield {name: np.asarray(stack[i if len(stack) > 1 else 0]) for name, stack in stacks.items()}


def _stacked(array: Array, spec: InputSpec, origin: str) -> Array:
    """The array with its samples along a new first axis."""
    _check_values(array, spec, origin)
    if spec.fits(array.shape[1:]) and array.ndim:
        return array
    if not spec.shape and not array.ndim:
        return array[None]
    batch = (spec.shape[0] or 1) if spec.shape else 1
    if array.ndim and array.shape[0] % batch == 0 and spec.fits((batch, *array.shape[1:])):
        return array.reshape(array.shape[0] // batch, batch, *array.shape[1:])
    raise BadData(f"{origin}: array '{spec.name}' has shape {array.shape}, the model wants {spec}")


def imported(source: str, what: str) -> Callable[..., Any]:
    """The callable that `module:callable` or `path/to/file.py:callable` names; `what` it is for goes into errors.

    Modules are found in the current folder as well.

    Raises:
        BadOption: it cannot be imported, or is not callable.
    """
    place, _, attribute = source.rpartition(":")
    if not place:
        raise BadOption(f"cannot import {what} '{source}': give module:callable or path/to/file.py:callable")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with redirect_stdout(sys.stderr):  # standard output is for results
            module = _module_of(Path(place)) if place.endswith(".py") else import_module(place)
        function = getattr(module, attribute)
    except FileNotFoundError as error:
        raise BadOption(f"cannot import {what} '{source}': there is no file {error.filename}") from error
    except (Exception, SystemExit) as error:  # the module is the user's, and may do anything
        raise BadOption(f"cannot import {what} '{source}': {one_line(error)}") from error
    if not callable(function):
        raise BadOption(f"'{source}' is not callable")
    named: Callable[..., Any] = function
    return named


def _module_of(path: Path) -> ModuleType:
    """A Python file as a module, under a name that hides no other."""
    name = f"{path.stem} ({path.absolute()})"
    spec = spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _from_callable(
    source: str, specs: tuple[InputSpec, ...], fixed: Collection[str]
) -> tuple[Callable[[], Iterator[Sample]], str]:
    function = imported(source, "calibration data")
    try:
        code = inspect.getsource(function)
    except (OSError, TypeError):
        code = ""

    def produce() -> Iterator[Sample]:
        try:
            for item in _quietly(function):
                yield _sample(item, specs, fixed, source)
        except BadData:
            raise
        except (Exception, SystemExit) as error:  # so is the function
            raise BadData(f"{source} failed: {type(error).__name__}: {one_line(error)}") from error

    return produce, hashlib.sha256((source + code).encode()).hexdigest()[:16]


def _quietly(function: Callable[..., Any]) -> Iterator[Any]:
    """What the iterable of a callable gives; what its code prints goes to standard error."""
    with redirect_stdout(sys.stderr):
        items = iter(function())
    while True:
        with redirect_stdout(sys.stderr):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def _sample(item: Any, specs: tuple[InputSpec, ...], fixed: Collection[str], origin: str) -> Sample:
    """One sample of a callable: a dictionary, or the array of the only input."""
    given = item if isinstance(item, Mapping) else {specs[0].name: item}
    _check_names(given, specs, fixed, origin)
    sample = {spec.name: np.asarray(given[spec.name]) for spec in specs}
    for spec in specs:
        array = sample[spec.name]
        _check_values(array, spec, origin)
        if not spec.fits(array.shape):
            raise BadData(f"{origin}: array '{spec.name}' has shape {array.shape}, the model wants {spec}")
    return sample


def _check_names(arrays: Mapping[str, Any], specs: tuple[InputSpec, ...], fixed: Collection[str], origin: str) -> None:
    missing = [s.name for s in specs if s.name not in arrays]
    unknown = [name for name in arrays if name not in {s.name for s in specs} and name not in fixed]
    if missing or unknown:
        what = f"has no array '{missing[0]}'" if missing else f"has an array '{unknown[0]}' that is no input"
        held = f"holds {', '.join(map(repr, arrays))}" if arrays else "is empty"
        told = f"; it {held}" if missing else ""
        raise BadData(f"{origin} {what}: the model's inputs are {_names(specs)}{told}")


def _check_values(array: Array, spec: InputSpec, origin: str) -> None:
    if array.dtype != spec.dtype:
        raise BadData(f"{origin}: array '{spec.name}' is {array.dtype}, the model wants {spec.dtype}: convert it first")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise BadData(f"{origin}: array '{spec.name}' holds NaN or infinite values")


def _names(specs: tuple[InputSpec, ...]) -> str:
    return ", ".join(str(s) for s in specs)


def _random(model: Model, specs: tuple[InputSpec, ...], seed: int, count: int) -> Samples:
    """Normal floats, integers that every lookup table of the model can answer, booleans."""
    if dynamic := [spec for spec in specs if None in spec.shape[1:]]:
        flags = [f"--input-shape {s.name}:{'x'.join(map(str, _typical(s)))}" for s in dynamic]
        more = len(dynamic) - 1
        others = f" and {more} more input{'s' * (more > 1)} have" if more else " has"
        wanted = first_of(flags, " ")
        what = f"input {dynamic[0]}{others} dynamic dimensions"
        fitting = ", which have to fit together" if more else ""
        raise BadOption(
            f"{what}: give --calibration-data, which have sizes, or those you run with{fitting}, like {wanted}"
        )
    tops = {s.name: _index_end(model, s.name) for s in specs}

    def draw(rng: np.random.Generator, spec: InputSpec) -> Array:
        shape = tuple(1 if d is None else d for d in spec.shape)
        if spec.dtype.kind in "iu":
            return np.asarray(rng.integers(0, tops[spec.name], shape), spec.dtype)
        if spec.dtype.kind == "b":
            return np.asarray(rng.integers(0, 2, shape), np.bool_)
        return np.asarray(rng.standard_normal(shape, np.float32)).astype(spec.dtype)

    def produce() -> Iterator[Sample]:
        for i in range(count):
            rng = np.random.default_rng((seed, i))
            try:
                yield {s.name: draw(rng, s) for s in specs}
            except (MemoryError, ValueError) as error:  # numpy: no room, or a size beyond its own limits
                raise BadModel(f"inputs are too large to make up: {_names(specs)}") from error

    return Samples("random inputs", f"random-{seed}-{count}", True, produce)


def _typical(spec: InputSpec) -> tuple[int, ...]:
    """Sizes that an input may well have: a picture where there are one, three or four channels, else a sequence."""
    has_channels = len(spec.shape) == 4 and not {1, 3, 4}.isdisjoint((spec.shape[1], spec.shape[3]))
    is_picture = has_channels and spec.shape.count(None) > 1 + (spec.shape[0] is None)  # a cache has one open length
    open_size = PICTURE if is_picture else SEQUENCE
    return tuple((1 if at == 0 else open_size) if size is None else size for at, size in enumerate(spec.shape))


def _index_end(model: Model, name: str) -> int:
    """One more than the largest integer that is safe to feed: the shortest table that `name` looks up, else 2."""
    tables, seen, waiting = [], {name}, [name]
    while waiting:
        for use in model.uses(waiting.pop()):
            node = model.nodes[use.node] if use.node >= 0 else None
            if node is None:
                continue
            if node.op == "Gather" and use.slot == 1 and node.inputs[0] in model.constants:
                shape = model.constants[node.inputs[0]].shape
                tables.append(shape[node.attributes.get("axis", 0)])
            elif node.op in COPIES | {"Slice"}:
                waiting.extend(o for o in node.outputs if o not in seen)
                seen.update(node.outputs)
    return max(min(tables, default=2), 1)
