"""Times fusion groups alone: each distinct group becomes a model of its own, and its schemes are compared with float.

Every result is written to the state file at once, so that a resumed run measures nothing twice.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
from onnx import helper

from qdqtune.calibration.observe import values_on
from qdqtune.engines.runner import Handle
from qdqtune.engines.tensorrt.options import with_spans
from qdqtune.errors import BadOption, EngineRefused, Failure, InputError, writing
from qdqtune.graph.model import Model
from qdqtune.graph.saving import CONSTANTS, ConstantFile
from qdqtune.placement.insertion import Inserter
from qdqtune.search.costs.profiles import Profile, SchemeResult, profile_of, schemes, signature
from qdqtune.search.costs.units import Partition, Unit
from qdqtune.system.writing import atomic_write
from qdqtune.timing.race import compare_builds
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.folder import GROUP_MODELS, LOGS
from qdqtune.tuning.run import Run
from qdqtune.tuning.subgraphs.groups import Resolved, borders, extract, is_shape
from qdqtune.types import Array, Edge, Layer, Placement

GROUP_ROUNDS = Plan(looks=(5, 9), turn_seconds=0.001, warmup=1)
"""Rounds of a group with pairs against the same group in float: few, as what ships is decided on the whole model."""

DECISIVE = 0.1
"""A comparison of a group ends at a look where the median ratio is further than this from 1. Chosen, not measured."""

PROFILED_RUNS = 6
"""Inferences behind a layer report of a group. Chosen, not measured."""

HOPELESS_SHARE = 0.98
"""If a scheme's layers take more than this share of the float layers' time, it is not timed. Chosen, not measured."""

AT_ONCE = 2**28
"""Bytes of inputs of groups that are held at a time. Chosen, not measured."""

NO_TIME = "no time was left"
"""Why a group has no time, or not those of all its schemes."""


Layers = tuple[Layer, ...]


@dataclass(frozen=True)
class GroupKind:
    """Groups of equal structure. `number` is the rank of the kind by time, from 1; `ms` is the float time of all its
    groups together."""

    number: int
    units: tuple[Unit, ...]
    ms: float

    @property
    def first(self) -> Unit:
        """The group that is measured for all of the kind."""
        return self.units[0]

    @property
    def each_ms(self) -> float:
        """The float time of one group, in ms."""
        return self.ms / len(self.units)


@dataclass(frozen=True)
class _Part:
    """The first group of a kind as a model of its own, which is written to `path`, and the schemes to try on it. Keys
    of its records in the state file begin with `key`."""

    kind: GroupKind
    model: Model
    path: Path
    key: str
    schemes: Mapping[str, Placement]


class Profiler:
    """Builds groups as models of their own and times their schemes, in an engine process of its own on the run's first
    device.

    A context manager. The models stay in the folder `subgraphs`, with one file for all weights.
    """

    def __init__(self, run: Run, parts: Partition, resolved: Resolved, *, timed: bool) -> None:
        self._execution, self._observer = run.execution, run.observer
        self._subject, self._parts, self._resolved, self._store = run.subject, parts, resolved, run.store
        self._timed, self._seed, self._budget = timed, run.settings.seed, run.runner.memory
        self._output, self._folder = run.output, run.output.clear(GROUP_MODELS)
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
        self._constants = ConstantFile(run.output.claim(self._folder / CONSTANTS))
        spec = with_spans(run.settings.engine, resolved.spans)
        self._runner = run.runner.on_same_device(spec, run.output.path / LOGS / GROUP_MODELS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._constants.__exit__()
        self._runner.close()

    def all(
        self, kinds: Sequence[GroupKind], done: Callable[[GroupKind, Profile], None], deadline: float | None
    ) -> dict[int, Profile]:
        """The profile of each kind by number. A profile has no options if the kind fails to build or if no time is
        left.

        `done` is called with each profile as soon as it is known. Nothing begins after `deadline` (by
        `time.monotonic`).
        """
        profiles: dict[int, Profile] = {}
        waiting: list[_Part] = []
        baked = self._baked(kinds)

        def known(kind: GroupKind, profile: Profile) -> None:
            profiles[kind.number] = profile
            done(kind, profile)

        def is_late() -> bool:
            return deadline is not None and time.monotonic() > deadline

        for kind in kinds:
            part = self._extracted(kind, baked)
            if isinstance(part, str):
                known(kind, Profile(kind.each_ms, (), {"": part}))
            elif self._is_known(part):
                known(kind, self._recorded(part))
            else:
                waiting.append(part)
        for batch in self._in_batches(waiting):
            values = self._values(batch)
            for part in batch:
                kind = part.kind
                if is_late():
                    known(kind, Profile(kind.each_ms, (), {"": NO_TIME}))
                    continue
                self._observer.stage(f"timing group {kind.number} of {len(kinds)} alone: {self._name(kind)}")
                self._runner.feed({name: values[name] for name in part.model.inputs})
                self._measure(part, is_late)
                known(kind, self._recorded(part))
        return profiles

    def _name(self, kind: GroupKind) -> str:
        nodes = [self._parts.model.nodes[n] for n in kind.first.nodes]
        more = f", {len(kind.units)} times" if len(kind.units) > 1 else ""
        return f"{'+'.join(n.op for n in nodes[:4])}{'...' if len(nodes) > 4 else ''} ({nodes[0].name}{more})"

    def _baked(self, kinds: Sequence[GroupKind]) -> dict[str, Array]:
        """The values of shape tensors that the model computes and groups read: constants of the groups' models."""
        model = self._subject.shaped
        reads = dict.fromkeys(t for kind in kinds for t in borders(model, kind.first.nodes)[0])
        computed = [t for t in reads if is_shape(model, t, self._resolved.sizes)]
        return values_on(model, computed, self._subject.feed, self._budget, self._execution) if computed else {}

    def _extracted(self, kind: GroupKind, baked: Mapping[str, Array]) -> _Part | str:
        """The first group of a kind as a model, and its schemes; or the reason why it cannot be a model."""
        parts, unit = self._parts, kind.first
        try:
            model = extract(self._subject.shaped, unit.nodes, self._resolved, baked)
        except BadOption as error:
            return str(error)
        own = {e for e in parts.possible if e.node in model.index_of}
        own |= {Edge(t, "", k) for k, t in enumerate(unit.outputs) if parts.edges.get(t)}
        text = signature(parts, unit, self._resolved.sizes) + "\n" + "\n".join(model.index_of)
        if not self._timed:  # another run may know times of layers, where the report of this one was lost
            text += "\nuntimed layers"
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        return _Part(
            kind,
            model,
            self._output.claim(self._folder / f"group_{kind.number:03}.onnx"),
            key,
            schemes(
                model, frozenset(own), {e: ways for e, ways in parts.format_shares.items() if e.node in model.index_of}
            ),
        )

    def _is_known(self, part: _Part) -> bool:
        try:
            base = self._store.get(f"part:{part.key}", Layers)
        except EngineRefused:
            return True
        return base is not None and all(map(self._store.has, self._keys(part).values()))

    def _keys(self, part: _Part) -> dict[str, str]:
        return {name: f"scheme:{part.key}:{placement.digest}" for name, placement in part.schemes.items()}

    def _recorded(self, part: _Part) -> Profile:
        """The profile of a part, made of what the state file has. The part's model is written here, too: it may be
        missing if the part was timed in an earlier session."""
        with atomic_write(part.path) as fresh:
            self._constants.save(part.model, fresh)
        try:
            base = self._store.get(f"part:{part.key}", Layers)
        except EngineRefused as refused:
            return Profile(part.kind.each_ms, (), {"": str(refused)})
        assert base is not None  # the part was measured
        answers = []
        for name, key in self._keys(part).items():
            try:
                answer = self._store.get(key, SchemeResult)
            except EngineRefused as refused:
                answer = SchemeResult(name, part.schemes[name], refused.failure, ())
            if answer is not None:
                answers.append(answer)
        profile = profile_of(part.model, base, answers)
        if len(answers) == len(part.schemes):
            return profile
        return replace(profile, failures={**profile.failures, "": NO_TIME})

    # ---- the engine

    def _in_batches(self, waiting: Sequence[_Part]) -> Iterator[list[_Part]]:
        """Parts in batches whose inputs fit in memory together; a larger part is a batch of its own."""
        batch: list[_Part] = []
        used = 0
        for part in waiting:
            needed = sum(self._bytes(tensor) for tensor in part.model.inputs)
            if batch and used + needed > AT_ONCE:
                yield batch
                batch, used = [], 0
            batch.append(part)
            used += needed
        if batch:
            yield batch

    def _bytes(self, tensor: str) -> int:
        dtype = helper.tensor_dtype_to_np_dtype(self._parts.model.tensors[tensor].dtype)
        return dtype.itemsize * int(np.prod(self._resolved.sizes.get(tensor, ())))

    def _values(self, batch: Sequence[_Part]) -> dict[str, Array]:
        """The inputs of the parts: the values of these tensors when the whole model runs on `Subject.feed`."""
        wanted = list(dict.fromkeys(t for part in batch for t in part.model.inputs))
        fed = {t: np.asarray(self._subject.feed[t]) for t in wanted if t in self._subject.feed}
        made = [t for t in wanted if t not in fed]
        feed, budget = self._subject.feed, self._budget
        return fed | (values_on(self._subject.shaped, made, feed, budget, self._execution) if made else {})

    def _measure(self, part: _Part, is_late: Callable[[], bool]) -> None:
        """Measure the float form of a part and its schemes until it `is_late`, except what the state file already
        has."""
        self._constants.save(part.model, part.path)
        key = f"part:{part.key}"
        try:
            handle = self._loaded(part.path)
        except EngineRefused as refused:
            if not self._store.has(key):
                self._store.refuse(key, refused.failure)
            return
        try:
            floats = self._store.memo(key, Layers, lambda: self._layers(handle))
        except EngineRefused:
            self._runner.unload(handle)
            return
        for name, of_scheme in self._keys(part).items():
            if is_late():
                break
            with suppress(EngineRefused):
                self._store.memo(of_scheme, SchemeResult, partial(self._scheme, part, name, handle, floats))
        self._runner.unload(handle)

    def _scheme(self, part: _Part, scheme: str, float_form: Handle, floats: Sequence[Layer]) -> SchemeResult:
        """Measure one scheme: its layers, and rounds unless the layers show that it is slower."""
        path = self._output.claim(part.path.with_suffix(f".{re.sub(r'[^a-z0-9]+', '_', scheme)}.onnx"))
        inserter = Inserter(part.model, self._subject.ranges, self._subject.numbers)
        self._constants.save(inserter.insert(part.schemes[scheme]), path)
        handle = None
        try:
            handle = self._loaded(path)
            layers = self._layers(handle)
            untimed = SchemeResult(scheme, part.schemes[scheme], None, layers)
            known = profile_of(part.model, floats, [untimed])
            if self._timed and all(option.ms >= HOPELESS_SHARE * known.float_ms for option in known.options):
                return untimed
            rounds = compare_builds(
                self._runner, float_form, handle, GROUP_ROUNDS, self._seed, lambda r: abs(r.median - 1) > DECISIVE
            )
            return replace(untimed, result=rounds)
        finally:
            if handle is not None:
                self._runner.unload(handle)
            path.unlink()

    def _layers(self, handle: Handle) -> tuple[Layer, ...]:
        return self._runner.layers(handle, PROFILED_RUNS) if self._timed else ()

    def _loaded(self, path: Path) -> Handle:
        try:
            return self._runner.load(path, path.name.removesuffix(".onnx"))
        except InputError as error:  # an option of the engine that fits the whole model, but not this part
            raise EngineRefused(Failure("build", str(error))) from error
