"""What the TensorRT family is told, read and checked in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from qdqtune.engines import Engine
from qdqtune.engines.shapes import Span
from qdqtune.errors import BadModel, BadOption
from qdqtune.graph.loading import read
from qdqtune.system.checks import Output

Shapes = Mapping[str, Sequence[int]]
"""Input name to its sizes; for an input that is itself a shape, to its values."""

E = TypeVar("E", bound=Engine)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What all of the family take.

    plugin_libraries: shared libraries with plug-ins.
    min_shapes, opt_shapes, max_shapes: smallest sizes of each dynamic input, those to tune for, and largest.
    workspace_mb: most scratch memory that a kernel may take.
    builder_level: 0 (fast builds) to 5 (fast engines); the version's own default is 3.
    """

    plugin_libraries: Sequence[str] = ()
    min_shapes: Shapes | None = None
    opt_shapes: Shapes | None = None
    max_shapes: Shapes | None = None
    workspace_mb: int | None = None
    builder_level: int | None = None

    def __post_init__(self) -> None:
        if self.workspace_mb is not None and self.workspace_mb < 1:
            raise BadOption(f"the workspace limit is at least 1 MB, not {self.workspace_mb}")
        if self.builder_level is not None and not 0 <= self.builder_level <= 5:
            raise BadOption(f"the builder level is 0 to 5, not {self.builder_level}")

    @property
    def target(self) -> str | None:
        """A GPU that need not be here (`sm89`); None is the one at hand."""
        return None

    def shapes(self, name: str) -> Span | None:
        """The sizes of an input, if any are given."""
        return Span.of(*((shapes or {}).get(name) for shapes in (self.min_shapes, self.opt_shapes, self.max_shapes)))

    def described(self) -> dict[str, str]:
        """What of it shapes latency, as text."""
        shapes = {
            name: f"{dict(values)}"
            for name in ("min_shapes", "opt_shapes", "max_shapes")
            if (values := getattr(self, name))
        }
        others = {"workspace_mb": self.workspace_mb, "builder_level": self.builder_level, "target": self.target}
        return shapes | {name: str(value) for name, value in others.items() if value not in (None, "")}


@dataclass(frozen=True, kw_only=True)
class CachedOptions(Options):
    """Options of an engine that measures kernels while it builds.

    timing_cache: file of kernel times that builds share, made if it is missing.
    """

    timing_cache: str | None = None


OTHERS = (b"PK", b"\x93NUMPY", b"\x1f\x8b", b"\x89HDF")
"""How files begin that are certainly no timing cache: archives and arrays."""


PLANS = (b"ftrt", b"ptrt")
"""How serialized engines of TensorRT begin."""


def is_plan(path: Path) -> bool:
    """Whether a file is a serialized engine. It has no room for a mark of who made it."""
    with path.open("rb") as file:
        return file.read(4) in PLANS


def timing_cache(path: Path, option: str) -> Output:
    """A timing cache to read and write. TensorRT and trtexec change one that is there, whoever made it: it does not say
    what it is, so texts, arrays, models and plans are known not to be one."""
    return Output(path, option, _may_be_timing_cache, is_appended=True, makes_folder=True)


def _may_be_timing_cache(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith(OTHERS) or is_plan(path):
        return False
    try:
        read(path)
    except BadModel:
        return not start or not start.decode("utf-8", errors="replace").replace("\n", " ").isprintable()
    return False


def taking(options: type[Options]) -> Callable[[Callable[..., E]], Callable[..., E]]:
    """A `create` that is called with the fields of `options`, of one that takes them as a value (and perhaps more)."""
    parameters = inspect.signature(options).parameters

    def decorated(make: Callable[..., E]) -> Callable[..., E]:
        def create(*given: Any, **named: Any) -> E:
            own = {name: value for name, value in named.items() if name in parameters}
            return make(options(*given, **own), **{n: value for n, value in named.items() if n not in parameters})

        create.__doc__ = make.__doc__
        create.__annotations__ = get_type_hints(options)
        told = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in parameters.values()]
        create.__signature__ = inspect.Signature(told)  # type: ignore[attr-defined]
        return create

    return decorated
