"""Calibration data: sources of samples, checked against the model. A sample is one set of inputs.

A source can be iterated several times, with one file at a time in memory.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from qdqtune.calibration.inputs import InputSpec, input_specs, listed, random_samples
from qdqtune.calibration.raw_data import TEXT_ENDING, raw_files, raw_samples, settings_files, spread
from qdqtune.calibration.user_code import checked_count, import_callable, read_in_thread, user_errors
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.errors import BadData, check_file, first_of, reading
from qdqtune.graph.model import Model
from qdqtune.system.writing import named
from qdqtune.types import Array, Sample

HELD_OUT = 5
"""One in this many samples is held out of calibration. Chosen, not measured."""

LABELS = "labels"
"""The array with this name next to the inputs in an .npz has the labels (see `numerics.metrics`)."""


@dataclass(frozen=True)
class Samples:
    """A source of samples that can be iterated several times. `digest` identifies its content, or the code of a
    callable; `origin` names it in messages. `others(n)` yields up to n samples that the limit left out; `others` is
    None without a limit, for a callable, and for random inputs."""

    origin: str
    digest: str
    is_random: bool
    produce: Callable[[], Iterator[Sample]]
    others: Callable[[int], Iterator[Sample]] | None = None

    def __iter__(self) -> Iterator[Sample]:
        return self.produce()

    def apart(self, least: int, most: int) -> tuple[Samples, Samples] | None:
        """Two sources: the samples without every fifth one, and every fifth one, `most` at most. None if the second
        would have fewer than `least`."""
        if len(self.first(HELD_OUT * least)) < HELD_OUT * least:
            return None
        end = HELD_OUT * most

        def kept() -> Iterator[Sample]:
            return (sample for i, sample in enumerate(self, 1) if i % HELD_OUT or i > end)

        def held_out() -> Iterator[Sample]:
            return islice(self, HELD_OUT - 1, end, HELD_OUT)

        return replace(self, produce=kept), replace(self, produce=held_out)

    def spread(self, count: int) -> list[Sample]:
        """At most `count` samples at even distances; reads the source twice."""
        return list(spread(self, sum(1 for _ in self), count)) or self.first(count)

    def first(self, count: int) -> list[Sample]:
        """At most `count` samples, from the beginning. Raises BadData if there is none."""
        found = list(islice(iter(self), count))
        if not found:
            raise BadData(f"{self.origin} holds no sample: give a hundred typical ones")
        return found


def open_samples(
    source: str | None,
    model: Model,
    execution: Execution = EXECUTION,
    *,
    seed: int = 0,
    limit: int | None = None,
    fixed: Collection[str] = (),
    folders: Sequence[Path] = (),
) -> Samples:
    """Calibration samples from `source`: an .npz, a folder of .npy/.npz, raw data (see `raw_data`), or
    `module:callable`; None for random inputs. `folders` are those of the model.

    Arrays have the names of inputs. An array of the input's rank is cut into batches (`a[i:i+1]` for batch 1), one of a
    higher rank has a sample per entry (`a[i]`); an array with one sample is repeated for all. A callable returns an
    iterable of dictionaries, or of arrays if the model has one input; it is called for each pass. With a `limit`,
    samples are taken at even distances, from a callable the first ones. Arrays of `fixed` inputs are ignored."""
    specs = input_specs(model)
    if source is None:
        count = limit or 8
        return Samples("random inputs", f"random-{seed}-{count}", True, random_samples(model, specs, seed, count))
    digest = digest_of(source, execution, folders)
    if files := _files_of(source):

        def of_files(paths: Iterable[Path], most: int | None = None) -> Iterator[Sample]:
            stacks = (_split(read_arrays(path, specs), specs, fixed, str(path)) for path in paths)
            return (sample for stack in stacks for sample in islice(stack, most))

        total = cache(lambda: sum(1 for _ in of_files(files)))

        def produce(others: int | None = None) -> Iterator[Sample]:
            if limit is not None and 1 < len(files) >= limit:  # then not all of them are read
                return of_files(spread(files, len(files), limit, others), 1)
            return spread(of_files(files), 0 if limit is None else total(), limit, others)

    elif files := raw_files(Path(source)):
        raw = raw_samples(Path(source), files, specs, folders, limit)

        def produce(others: int | None = None) -> Iterator[Sample]:
            return (_sample(item, specs, fixed, source) for item in raw(others))

    elif ":" in source and os.sep + ":" not in source:
        function, digest = import_callable(source, "calibration data", execution)

        def given() -> Iterator[Sample]:
            items = None
            while True:
                with user_errors(f"{source} failed", BadData), redirect_stdout(sys.stderr):  # not around the yield
                    items = iter(function()) if items is None else items
                    sample = next((_sample(item, specs, fixed, source) for item in items), None)
                if sample is None:
                    return
                yield sample

        def first() -> Iterator[Sample]:
            return checked_count(given(), source) if limit is None else islice(given(), limit)

        return Samples(source, digest, False, lambda: read_in_thread(first, source, execution))

    else:
        kinds = "an .npz, a folder of .npy/.npz or pictures, a .txt, or module:callable"
        raise BadData(f"no calibration data in {source}: give {kinds}")

    def read(others: int | None = None) -> Iterator[Sample]:
        return read_in_thread(lambda: produce(others), source, execution)

    return Samples(named(source), digest or "", False, read, None if limit is None else read)


def _files_of(source: str) -> list[Path]:
    """The .npy and .npz files of a source in order; empty if it is neither such a file nor a folder of some."""
    path = Path(source)
    if path.suffix == ".npz" or (path.is_file() and path.suffix != TEXT_ENDING):
        return [path]
    if not path.is_dir():
        return []
    return sorted(f for f in path.iterdir() if f.suffix in (".npy", ".npz") and not f.name.startswith("."))


def digest_of(source: str, execution: Execution, folders: Sequence[Path]) -> str | None:
    """A hash of the files that a source names; None if it names none: a callable would have to be imported."""
    files = _files_of(source)
    if not files and (raw := raw_files(Path(source))):
        files = [*raw, *settings_files(Path(source), folders)]
    if not files:
        return None

    def digests() -> Iterator[bytes]:
        for path in files:
            with reading(f"calibration data {path}", BadData):
                check_file(path)
                with path.open("rb") as file:
                    yield hashlib.file_digest(file, "sha256").digest()

    return hashlib.sha256(b"".join(read_in_thread(digests, source, execution))).hexdigest()[:16]


def read_sample(path: Path, model: Model, fixed: Collection[str], execution: Execution) -> Sample:
    specs = input_specs(model)
    (arrays,) = read_in_thread(lambda: iter([read_arrays(path, specs)]), str(path), execution)
    return _sample(arrays, specs, fixed, str(path))


def files_named(source: str | None) -> list[Path]:
    """The files that a source of calibration data or a metric may read: an .npz, the files of a folder, or for a
    callable the files that its module may be, which is not imported."""
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


def read_arrays(path: Path, specs: tuple[InputSpec, ...] = ()) -> dict[str, Array]:
    """All arrays of a file by input name; a .npy is for the only input."""
    if not path.is_file():  # also a pipe, which might never end
        raise BadData(f"{path} not found")
    with user_errors(f"cannot read {path} as numpy arrays", BadData):  # numpy raises nothing narrower on damaged files
        with path.open("rb") as file:
            if not file.read(6).startswith((b"PK", b"\x93NUMPY")):
                raise BadData(f"{path} is no .npz or .npy file: write it with numpy.savez or numpy.save")
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            if len(specs) != 1:
                raise BadData(f"{path}: a .npy file fits models of one input; this one has {listed(specs)}: use .npz")
            return {specs[0].name: loaded}
        with loaded:
            return {name: np.asarray(loaded[name]) for name in loaded.files}


def _split(
    arrays: Mapping[str, Array], specs: tuple[InputSpec, ...], fixed: Collection[str], origin: str
) -> Iterator[Sample]:
    """The samples in one set of arrays, each of which stacks the values of all samples, or has one value for all."""
    checked = _checked(arrays, specs, fixed, origin)
    stacks = {spec.name: _stacked(checked[spec.name], spec, origin) for spec in specs}
    counts = {name: len(stack) for name, stack in stacks.items()}
    if len(set(counts.values()) - {1}) > 1:
        told = ", ".join(f"{count} of '{name}'" for name, count in counts.items())
        raise BadData(f"{origin}: arrays hold different numbers of samples: {told}")
    for i in range(next((n for n in counts.values() if n != 1), 1)):
        yield {name: np.asarray(stack[i if len(stack) > 1 else 0]) for name, stack in stacks.items()}


def _stacked(array: Array, spec: InputSpec, origin: str) -> Array:
    """The array with samples along a new first axis."""
    if spec.fits(array.shape[1:]) and array.ndim:
        return array
    if not spec.shape and not array.ndim:
        return array[None]
    batch = (spec.shape[0] or 1) if spec.shape else 1
    if array.ndim and array.shape[0] % batch == 0 and spec.fits((batch, *array.shape[1:])):
        return array.reshape(array.shape[0] // batch, batch, *array.shape[1:])
    raise _misshapen(array.shape, spec, origin)


def _misshapen(shape: tuple[int, ...], spec: InputSpec, origin: str) -> BadData:
    hint = ": array[None] adds the axis of the batch" if spec.fits((1, *shape)) else ""
    if not hint and (spec.fits((*shape, 1)) or spec.fits((*spec.shape[:1], *shape[1:], 1))):
        hint = ": one axis is missing: array[..., None]"
    if len(shape) >= 3 and len(spec.shape) == 4 and not hint:
        a, b, c = shape[-3:]
        for moved, axes in (((c, a, b), "-1, -3"), ((b, c, a), "-3, -1")):
            if spec.fits((spec.shape[0], *moved)):
                hint = f": numpy.moveaxis(array, {axes}) puts the channels where it wants them"
    return BadData(f"{origin}: array '{spec.name}' has shape {shape}, the model wants {spec}{hint}")


def _sample(item: Any, specs: tuple[InputSpec, ...], fixed: Collection[str], origin: str) -> Sample:
    sample = _checked(item if isinstance(item, Mapping) else {specs[0].name: item}, specs, fixed, origin)
    for spec in specs:
        shape = sample[spec.name].shape
        if not spec.fits(shape):
            raise _misshapen(shape, spec, origin)
    return sample


def _checked(
    arrays: Mapping[str, Any], specs: tuple[InputSpec, ...], fixed: Collection[str], origin: str
) -> dict[str, Array]:
    """The arrays of the inputs. Refuses missing and unknown names, other types, and values that are not finite."""
    missing = [s.name for s in specs if s.name not in arrays]
    unknown = [name for name in arrays if name not in {s.name for s in specs} and name not in (*fixed, LABELS)]
    if missing or unknown:
        what = f"has no array '{missing[0]}'" if missing else f"has an array '{unknown[0]}' that is no input"
        held = f"it holds {first_of([*map(repr, arrays)])}" if arrays else "it is empty"
        hint = held if missing else "`fix_inputs` names what was made constant"
        raise BadData(f"{origin} {what}: the model's inputs are {listed(specs)}; {hint}")
    checked = {spec.name: np.asarray(arrays[spec.name]) for spec in specs}
    for spec in specs:
        array = checked[spec.name]
        what = f"{origin}: array '{spec.name}'"
        if array.dtype != spec.dtype:
            is_plain = array.dtype.kind == spec.dtype.kind or {array.dtype.kind, spec.dtype.kind} == {"i", "u"}
            how = f"with array.astype('{spec.dtype}')" if is_plain else "as your application does"
            raise BadData(f"{what} is {array.dtype}, the model wants {spec.dtype}: convert it {how}")
        if array.dtype.kind == "f" and not (finite := np.isfinite(array)).all():
            place = ", ".join(map(str, np.unravel_index(finite.argmin(), array.shape)))
            raise BadData(f"{what} holds NaN or infinite values, the first at [{place}]: leave out such samples")
    return checked
