"""Results that show themselves: a short `repr`, a small table in notebooks, and plain values for machines.

Each is a frozen value with the fields of what the package computes, and where its files lie.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from qdqtune.commands import apply, build, explain, quantize
from qdqtune.commands.check import Finding
from qdqtune.commands.compare import Row
from qdqtune.commands.explanation import IN_WORDS
from qdqtune.commands.reasons import is_low
from qdqtune.measurement.timing import Ratio
from qdqtune.report.words import decibels
from qdqtune.tuning import result
from qdqtune.tuning.folder import BASELINE, FINAL, PLACEMENT, REPORT
from qdqtune.types import Layer

MOST_ROWS = 30
"""Rows that a notebook shows."""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Titles of columns, and rows."""


class Shown:
    """What every result can: see the module."""

    @abstractmethod
    def in_words(self) -> str:
        """The result in a sentence."""

    @abstractmethod
    def table(self) -> Table:
        """The result as a table."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The result for machines: what JSON can hold."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.in_words()}>"

    def _repr_html_(self) -> str:
        """What notebooks show; names come from models, so everything is escaped."""
        titles, rows = self.table()
        head = "".join(f"<th>{escape(title)}</th>" for title in titles)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[:MOST_ROWS]
        )
        rest = f"<p>and {len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
        return f"<div><p>{escape(self.in_words())}</p>{table}{rest}</div>"


@dataclass(frozen=True, repr=False)
class Result(Shown, result.Result):
    """What a search has found. `folder` holds its files."""

    folder: Path = field(default_factory=Path)

    @property
    def file(self) -> Path:
        """The model that ships: the tuned one if `improved`, else a copy of the baseline, or of what was given."""
        return self.folder / FINAL

    @property
    def baseline(self) -> Path:
        """The float model, as it was compared."""
        return self.folder / BASELINE

    @property
    def placement_file(self) -> Path:
        """Where the pairs stand, for `apply`."""
        return self.folder / PLACEMENT

    @property
    def report(self) -> Path:
        """The report for a browser, unless `report=False` was asked for."""
        return self.folder / REPORT

    def explain(self, pattern: str | None = None) -> Explained:
        """Why each node runs as it does, or those whose names match a wildcard: see `qdqtune.explain`."""
        return explained(self.folder, pattern)

    def in_words(self) -> str:
        """How many times as fast the tuned model is, or that nothing faster was found."""
        if self.ratio is None:
            held = " that holds the limits on accuracy" if self.unmet else ""
            return f"no improvement: nothing faster{held} among {len(self.history)} candidates"
        exact = self.summary["output_sqnr_db"]
        return f"{self.ratio.speedup}, {'exact outputs' if exact is None else decibels(exact)}, {self.file}"

    def table(self) -> Table:
        """Float and tuned model side by side."""
        told = self.summary
        rows = [("latency", f"{told['baseline_ms']:.3f} ms", f"{told['final_ms']:.3f} ms")]
        if self.ratio is not None:
            rows.append(("speedup", "1x", self.ratio.speedup))
        rows.append(("tensors with a pair", "0", str(told["pairs"])))
        if self.improved:
            rows.append(("output SQNR", "", decibels(told["output_sqnr_db"])))
        if told.get("metric_before") is not None and told.get("metric_after") is not None:
            rows.append(("metric", f"{told['metric_before']:g}", f"{told['metric_after']:g}"))
        rows.append(("candidates, builds, time", "", f"{told['trials']}, {told['builds']}, {told['seconds']:.0f} s"))
        return ("", "float", "tuned"), rows

    def to_dict(self) -> dict[str, Any]:
        """What summary.json holds, the notes, and the folder."""
        return {**self.summary, "notes": list(self.notes), "folder": str(self.folder)}


@dataclass(frozen=True, repr=False)
class Quantized(Shown, quantize.Quantized):
    """A Q/DQ model by placement rules, and what it cost."""

    def in_words(self) -> str:
        """Where it lies, and how near its outputs are."""
        near = decibels(self.sqnr_db) if self.is_finite else "not finite"
        return f"{self.output}, {len(self.placed.placement)} edges with a pair, outputs {near}"

    def table(self) -> Table:
        """What each rule did."""
        return ("rule", "edges"), [(name, str(count)) for name, count in self.placed.counts]

    def to_dict(self) -> dict[str, Any]:
        """The facts, and the report where it was asked for."""
        return {**self.as_json(), "notes": list(self.notes)}


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Files against the first, in the order in which they were given. `notes` say what to know about it."""

    first: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> Ratio | None:
        """Time of the second file to that of the first; None where it failed."""
        return self.rows[0].ratio

    def in_words(self) -> str:
        """Each file with its verdict."""
        told = [
            f"{row.name} {'failed' if row.ratio is None else f'{row.words}, {row.ratio.speedup}'}" for row in self.rows
        ]
        return f"{'; '.join(told)} (against {self.first})"

    def table(self) -> Table:
        """A row for each file."""
        rows = [
            (r.name, _ms(r.first_ms), _ms(r.ms), r.ratio.speedup if r.ratio else r.reason, r.words) for r in self.rows
        ]
        return ("file", "first, ms", "ms", "speedup", "verdict"), rows

    def to_dict(self) -> dict[str, Any]:
        """As `qdqtune compare --json`."""
        return {"first": self.first, "others": [row.as_json() for row in self.rows], "notes": list(self.notes)}


@dataclass(frozen=True, repr=False)
class Applied(Shown, apply.Applied):
    """A recorded placement on another model."""

    output: Path = field(default_factory=Path)

    def in_words(self) -> str:
        """Where it lies, how many edges carry a pair, and how near its outputs are."""
        known = "" if self.accuracy is None else f", outputs {self.accuracy}"
        return f"{self.output}, {len(self.placement)} edges with a pair, {len(self.lost)} lost{known}"

    def table(self) -> Table:
        """The edges that the model does not have."""
        return ("edge that is not in this model",), [(str(edge),) for edge in self.lost]

    def to_dict(self) -> dict[str, Any]:
        """As `qdqtune apply --json`."""
        return self.as_json(self.output)


@dataclass(frozen=True, repr=False)
class Layers(Shown):
    """What an engine made of a model, in the order in which it runs."""

    engine: str
    layers: tuple[Layer, ...]

    @property
    def time_ms(self) -> float | None:
        """The sum of the layers' times; None if the engine tells none."""
        times = [layer.time_ms for layer in self.layers if layer.time_ms is not None]
        return sum(times) if times else None

    def in_words(self) -> str:
        """How many layers, how many of them in 8 bits, and their time."""
        low = sum(is_low(layer.precision) for layer in self.layers)
        return f"{len(self.layers)} layers on {self.engine}, {low} in 8 bits, {_ms(self.time_ms) or '?'} ms"

    def table(self) -> Table:
        """The layers, the longest first."""
        ordered = sorted(self.layers, key=lambda layer: -(layer.time_ms or 0.0))
        rows = [(x.name, x.kind, x.precision, _ms(x.time_ms), ", ".join(x.nodes)) for x in ordered]
        return ("layer", "kind", "precision", "ms", "nodes"), rows

    def to_dict(self) -> dict[str, Any]:
        """As `qdqtune layers --json`."""
        return {"engine": self.engine, "layers": [asdict(layer) for layer in self.layers]}


@dataclass(frozen=True, repr=False)
class Checked(Shown):
    """What an engine does not fuse in a Q/DQ model. `measured`: a search has proven these pairs on this engine."""

    engine: str
    layers: tuple[Layer, ...]
    findings: tuple[Finding, ...]
    measured: bool = False

    @property
    def passes(self) -> bool:
        """Whether nothing fails."""
        return self.measured or not any(finding.fails for finding in self.findings)

    def in_words(self) -> str:
        """How many findings."""
        failing = sum(finding.fails for finding in self.findings)
        return (
            f"{'passes' if self.passes else 'fails'} on {self.engine}: {failing} findings of {len(self.layers)} layers"
        )

    def table(self) -> Table:
        """The findings, those that fail first."""
        ordered = sorted(self.findings, key=lambda f: (not f.fails, -(f.time_ms or 0.0)))
        rows = [(f.kind, ", ".join(f.nodes) or f.layer, _ms(f.time_ms), f.reason) for f in ordered]
        return ("finding", "nodes", "ms", "reason"), rows

    def to_dict(self) -> dict[str, Any]:
        """The findings with what they are about."""
        findings = [asdict(finding) for finding in self.findings]
        return {"engine": self.engine, "passes": self.passes, "measured": self.measured, "findings": findings}


@dataclass(frozen=True, repr=False)
class Artifact(Shown, build.Artifact):
    """A model in an engine's own format."""

    engine: str = ""

    def in_words(self) -> str:
        """The files, their size, and how long the build took."""
        written = ", ".join(map(str, self.files))
        return f"{written}: {self.engine}, {self.nbytes / 1e6:.1f} MB, built in {self.seconds:.1f} s"

    def table(self) -> Table:
        """The files."""
        return ("file",), [(str(file),) for file in self.files]

    def to_dict(self) -> dict[str, Any]:
        """As `qdqtune build --json`."""
        files = [str(file) for file in self.files]
        return {"engine": self.engine, "files": files, "bytes": self.nbytes, "seconds": self.seconds}


@dataclass(frozen=True, repr=False)
class Inspection(Shown):
    """Regions and patterns of a model: `told` is what `qdqtune inspect --json` prints, `text` what it prints."""

    told: Mapping[str, Any]
    text: str

    def in_words(self) -> str:
        """How many regions and patterns."""
        summary = self.told["summary"]
        return f"{self.told['nodes']} nodes in {summary['regions']} regions of {len(self.told['patterns'])} patterns"

    def table(self) -> Table:
        """The patterns, the most frequent first."""
        ordered = sorted(self.told["patterns"], key=lambda p: -p["instances"])
        rows = [(p["digest"], p["kind"], str(p["instances"]), str(p["points"]), ", ".join(p["ops"])) for p in ordered]
        return ("pattern", "kind", "instances", "points", "operators"), rows

    def to_dict(self) -> dict[str, Any]:
        """As `qdqtune inspect --json`."""
        return dict(self.told)


@dataclass(frozen=True, repr=False)
class Explained(Shown, explain.Explained):
    """Why each node of a finished run runs as it does: `rows` by node, `tallies` by reason."""

    by_node: bool = False

    def in_words(self) -> str:
        """What shipped; or of a single node why it runs as it does."""
        if self.by_node and len(self.rows) == 1:
            row = self.rows[0]
            return f"{row.node} ({row.op}) runs in {row.precision}: {row.reason}"
        return self.headline

    def table(self) -> Table:
        """The nodes by reason, or one by one where some were asked for."""
        if self.by_node:
            titles = ("node", "operator", "runs in", "reason", "ms", "otherwise, ms")
            return titles, [(r.node, r.op, r.precision, r.reason, _ms(r.ms), _ms(r.other_ms)) for r in self.rows]
        rows = [(str(t.nodes), t.runs_in, IN_WORDS[t.why], _ms(t.ms), _ms(t.other_ms), t.example) for t in self.tallies]
        return ("nodes", "runs in", "why", "ms", "otherwise, ms", "such as"), rows

    def to_dict(self) -> dict[str, Any]:
        """As `qdqtune explain --json`."""
        return explain.Explained.to_dict(self)


def explained(folder: str | Path, pattern: str | None, state: str | Path | None = None) -> Explained:
    """See `qdqtune.explain`."""
    whole = explain.explain_run(Path(folder), None if state is None else Path(state))
    rows = whole.rows if pattern is None else whole.matching(pattern)
    return Explained(whole.folder, whole.headline, rows, whole.tallies, pattern is not None)


def _ms(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.4g}"
