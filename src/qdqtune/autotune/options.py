"""The options that only ModelOpt's autotuner has, beside those of `tune`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from qdqtune.commands.inspect import REGIONS
from qdqtune.commands.tune import TuneOptions, search_plan
from qdqtune.options import FILE, SWITCH, Flag, MaybeFile, MaybeInt, OfRun, Option, PathLike, choice, option
from qdqtune.search.region import Config
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.options import MODEL, Division, FloatType, Wildcards
from qdqtune.tuning.settings import EFFORTS, Settings, builds_for
from qdqtune.tuning.subject import tuned_patterns

OF_SETTINGS = (
    "cut_seed", "incremental_validation", "graph_json", "regions", "default_dq_dtype", "qdq_baseline", "pattern_cache",
    "state_file",
)  # fmt: skip


@dataclass(kw_only=True)
class AutotuneOptions(TuneOptions):
    """The options of `python -m qdqtune.autotune`."""

    cut_seed: Flag = option(
        SWITCH, True, "region: begin with what the cut finds in the first dozen builds; or with rules alone.", "Search"
    )
    incremental_validation: Flag = option(
        SWITCH,
        True,
        "subgraph: look on the whole model for groups that do not pay, in batches that are halved where they are "
        "rejected; or take all groups that gain alone, or none.",
        "Search",
    )
    graph_json: MaybeFile = option(
        FILE,
        None,
        "subgraph: take the fusion groups from this file of trtexec --exportLayerInfo (with "
        "--profilingVerbosity=detailed), not from the engine at hand.",
        "Engine",
        metavar="FILE",
    )
    regions: Option[Division, Division] = REGIONS
    default_dq_dtype: Option[FloatType | None, FloatType | None] = option(
        choice("float16", "float32", "bfloat16"),
        None,
        "Type of tensors whose type cannot be inferred (behind custom operators).",
        "Model",
    )
    qdq_baseline: MaybeFile = option(MODEL, None, "A quantized version of the model to start from.", "Model")
    pattern_cache: MaybeFile = option(
        FILE, None, "region: try the schemes in the pattern cache of an earlier run.", "Search"
    )
    state_file: MaybeFile = option(
        OfRun(), None, "State file of the run.", "Search", default_in_words="OUTPUT_DIR/autotuner_state.yaml"
    )
    node_filter: Option[PathLike | Sequence[str], tuple[str, ...]] = option(
        Wildcards(),
        (),
        "File of node-name wildcards, one a line: other regions stay in float.",
        "Search",
        flags="--node-filter-list",
        metavar="PATH",
    )
    schemes_per_region: MaybeInt = option(
        click.IntRange(0), None, "region: candidates per pattern; without `builds`, as many builds as they take.",
        "Search",
    )  # fmt: skip
    timing_runs: MaybeInt = option(
        click.IntRange(12), None, "Most rounds of one comparison.", "Search", default_in_words="20 | 48 | 96"
    )
    warmup_runs: Option[int, int] = option(
        click.IntRange(0),
        2,
        "Inferences of each model before its rounds. trtexec warms up in each process for 200 ms instead; "
        "`engine_options` warmup_ms=N changes that.",
        "Search",
    )

    def plan(self, *, has_few: bool) -> Plan:
        """See `TuneOptions`."""
        plan = search_plan(EFFORTS[self.effort].looks, self.timing_runs, has_few=has_few)
        return replace(plan, warmup=self.warmup_runs)

    def settings(self, command: tuple[str, ...] = (), **more: Any) -> Settings:
        """See `TuneOptions`."""
        own: dict[str, Any] = {name: getattr(self, name) for name in OF_SETTINGS}
        if (schemes := self.schemes_per_region) is not None:
            own["config"] = Config(schemes_per_region=schemes)
        if schemes is not None and self.builds is None and self.mode == "region":
            path = Path(str(self.model))
            tuned = tuned_patterns(path, self.regions, self.fix_inputs, self.rewrites, self.engine_name)
            own["builds"] = max(EFFORTS[self.effort].builds["region"], builds_for(schemes, len(tuned)))
        return super().settings(command, **own | more)
