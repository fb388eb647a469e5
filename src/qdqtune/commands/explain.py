"""`qdqtune explain`: why each group of nodes of a finished run is in 8 bits or in float, read from the run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from qdqtune.commands.shown import Shown, Table, milliseconds
from qdqtune.errors import BadOption
from qdqtune.explanation.formatting import shortened, tail
from qdqtune.explanation.result_rows import verdict
from qdqtune.explanation.units import Explanation, disturbance, explanations, shipped_origin, tally, total
from qdqtune.options import FILE, REQUIRED, TEXT, File, Options, meant
from qdqtune.tuning.finished import read_run


class ExplainOptions(Options):
    folder: File = FILE("Output folder of a finished run.", default=REQUIRED, metavar="DIR")
    pattern: str | None = TEXT("Only this node, or those that match.", metavar="[NODE|PATTERN]")


@dataclass(frozen=True, repr=False)
class Explained(Shown):
    """A finished run, explained: what shipped in a sentence, why the search `ended`, and a row for every unit (nodes
    that are quantized together). `is_part`: only the rows of nodes that were asked for. `floats` names the float model
    that `float_ms` is about; `caution` says if times cannot be trusted."""

    folder: Path
    headline: str
    rows: tuple[Explanation, ...]
    is_part: bool = False
    floats: str = "float"
    ended: str = ""
    caution: str = ""

    def __str__(self) -> str:
        return "\n".join(map(str, self.parts()))

    def in_words(self) -> str:
        return self.headline

    def table(self) -> Table:
        """The units, by state and reason; one by one if only some were asked for."""
        if self.is_part:
            rows = []
            for row in self.rows:
                runs_in = ", ".join(filter(None, (row.state, row.precision)))
                rows.append((", ".join(row.nodes), ", ".join(row.operators), runs_in, row.why, *_times(row)))
            columns = ("nodes", "operators", "runs in", "why", "ms", f"{self.floats}, ms")
            return Table(columns, shortened(rows), self.caution)
        sums: list[tuple[str, ...]] = [
            (str(len(each.nodes)), each.state, *_times(each), each.reason, tail(each.nodes[0]))
            for each in tally(self.rows)
        ]
        both = (milliseconds(total(row.ms for row in self.rows)), milliseconds(total(r.float_ms for r in self.rows)))
        sums.append((str(sum(len(row.nodes) for row in self.rows)), "total", *both, "", ""))
        is_timed = any(row.ms is not None or row.float_ms is not None for row in self.rows)
        caption = self.caution if is_timed else "no times: this run measured no layers"
        titles = ("nodes", "runs in", "ms", f"{self.floats}, ms", "why not in 8 bits", "such as")
        return Table(titles, sums, caption)

    def parts(self) -> Iterator[str | Table]:
        if not self.is_part:
            yield f"{self.folder}: {self.headline}"
            if self.ended:
                yield self.ended
        yield self.table()

    def to_dict(self) -> dict[str, Any]:
        told = {"headline": self.headline, "ended": self.ended, "caution": self.caution}
        return {"folder": str(self.folder), **told, "units": [asdict(row) for row in self.rows]}


def explain_run(folder: Path, pattern: str | None = None) -> Explained:
    """Explain a finished run; with a `pattern`, only the units with the node of that name, or with nodes that match it.

    Raises:
        BadOption: the folder holds no finished run, or no such node.
        BadState: its state file is damaged or missing.
    """
    run = read_run(folder)
    headline = verdict(run.summary).headline
    if run.placement or run.summary["shipped"] == "tuned":
        headline += f"; what ships is {shipped_origin(run)}"
    left = run.summary.get("fallback")
    if left is not None:
        headline += f"; {left.in_words()}"
    rows = explanations(run)
    if pattern is not None:
        rows = _matching(rows, pattern)
    return Explained(folder, headline, rows, pattern is not None, run.floats, run.log.ended, disturbance(run))


def _matching(rows: tuple[Explanation, ...], pattern: str) -> tuple[Explanation, ...]:
    names = [name for row in rows for name in row.nodes]
    matches = {pattern} & set(names) or {name for name in names if fnmatchcase(name, pattern)}
    if not matches:
        near = meant(pattern, names)
        hint = f"did you mean {', '.join(near)}?" if near else "'*' shows all, '/layer1/*' those of a module"
        raise BadOption(f"no node of the model is named {pattern!r}: {hint}")
    return tuple(row for row in rows if not matches.isdisjoint(row.nodes))


def _times(row: Explanation) -> tuple[str, str]:
    return milliseconds(row.ms), f"with {row.float_with}" if row.float_with else milliseconds(row.float_ms)
