"""The rewrites of a float model by name: each leaves every output as it is up to rounding, and may open fusions on an
engine. Which of them pay, measuring tells.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from qdqtune.errors import BadOption
from qdqtune.graph.computing import constants_computed
from qdqtune.graph.loading import with_opset
from qdqtune.graph.merging import gelu, hard_swish, layer_norm, merged, rms_norm
from qdqtune.graph.model import Model
from qdqtune.graph.products import as_gemm
from qdqtune.graph.rewriting import folded

FOLD = "fold"
"""The rewrite that every run makes unless it is told not to: without it pairs stand where they need not be."""


@dataclass(frozen=True)
class Rewrite:
    """What it does, in words, and the function that does it: it returns the very model where there is nothing to do.

    `makes` is the operator that it leaves behind, if it leaves one.
    """

    does: str
    apply: Callable[[Model], Model]
    makes: str = ""


REWRITES: Mapping[str, Rewrite] = MappingProxyType({
    "constants": Rewrite("compute what only constants and shapes decide", constants_computed),
    "hardswish": Rewrite(
        "x clip(x + 3, 0, 6) / 6 as one HardSwish", partial(merged, matcher=hard_swish, opset=14), "HardSwish"
    ),
    "gelu": Rewrite("x (1 + erf(x / sqrt 2)) / 2 as one Gelu", partial(merged, matcher=gelu, opset=20), "Gelu"),
    "layernorm": Rewrite(
        "means, squares and a root as one LayerNormalization",
        partial(merged, matcher=layer_norm, opset=17),
        "LayerNormalization",
    ),
    "rmsnorm": Rewrite(
        "squares, their mean and a root as one RMSNormalization",
        partial(merged, matcher=rms_norm, opset=23),
        "RMSNormalization",
    ),
    "gemm": Rewrite("MatMul and Add with constants as one Gemm", as_gemm, "Gemm"),
    "opset21": Rewrite("the operators of opset 21", partial(with_opset, opset=21)),
})  # fmt: skip
"""By name, in the order in which they are made."""

NAMES = (FOLD, *REWRITES)


@dataclass(frozen=True)
class Rewrites:
    """Which rewrites a float model has seen before its pairs were placed. Each is repeated on another model's weights.

    `folded`: layers have taken in what scales and shifts their channels (see `rewriting.folded`); then those in
    `names`, one after the other.
    """

    folded: bool = False
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.folded, bool) or not set(self.names) <= REWRITES.keys():
            unknown = ", ".join(sorted(map(str, set(self.names) - REWRITES.keys())))
            raise ValueError(f"there is no rewrite {unknown}; there are {', '.join(NAMES)}")

    def of(self, model: Model) -> Model:
        """`model` after them.

        Raises:
            BadModel: its opset cannot be raised.
        """
        model = folded(model) if self.folded else model
        for name in self.names:
            model = REWRITES[name].apply(model)
        return model


def between(before: Collection[str], after: Collection[str]) -> tuple[str, ...]:
    """The names of the rewrites that make operators which are in `after` and not in `before`."""
    return ordered([name for name, r in REWRITES.items() if r.makes in after and r.makes not in before])


def allowed(said: str) -> Rewrites:
    """What a user asks for with `auto` (before anything is measured), `off`, or names and commas.

    Raises:
        BadOption: there is no rewrite of such a name.
    """
    if said in ("auto", "off"):
        return Rewrites(said == "auto")
    names = {name.strip() for name in said.split(",")}
    try:
        return Rewrites(FOLD in names, ordered(names - {FOLD}))
    except ValueError as error:
        raise BadOption(f"--rewrites {said}: {error}, or say auto or off") from error


def ordered(names: Collection[str]) -> tuple[str, ...]:
    """Names in the order of the table, and those that it lacks behind."""
    known = [name for name in REWRITES if name in names]
    return (*known, *sorted(set(names) - set(known)))
