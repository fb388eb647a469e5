"""The limits of `compare` and `verify` for continuous integration: what each file holds, as JUnit XML and Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from qdqtune.commands.shown import Table
from qdqtune.errors import escaped
from qdqtune.numerics.accuracy import decibels, integers_differ
from qdqtune.numerics.scores import equal_share
from qdqtune.options import MaybeNumber, Options, in_range, option
from qdqtune.timing.limits import Limits
from qdqtune.timing.ratios import Ratio
from qdqtune.types import Accuracy

Outcome = Literal["holds", "undecided", "missed", "failed"]
"""Of a limit, the best first: "undecided" where the measurement cannot tell, "failed" where there is none."""

RUNS = "runs"
"""The limit that a file misses which the engine does not run."""


@dataclass(kw_only=True)
class GateOptions(Options):
    """Limits on a file that is compared with another; what is None sets none."""

    fail_below: MaybeNumber = option(
        in_range(0, is_open=True),
        None,
        "Exit code 4 if a file is less than X times as fast: if the whole interval of its speedup lies below X, so "
        "that noise fails nothing. Where X lies in the interval, it is told as undecided, and passes.",
        "Accuracy",
        short="exit code 4 if it is surely less fast than so",
        metavar="X",
    )
    min_sqnr: MaybeNumber = option(
        in_range(),
        None,
        "Exit code 4 if the output SQNR is lower, in dB; needs samples.",
        "Accuracy",
        short="exit code 4 if the output SQNR is lower",
        metavar="DB",
    )
    min_agreement: MaybeNumber = option(
        in_range(0, 1),
        None,
        "Exit code 4 if integers in outputs, or best classes, agree in a smaller share; needs samples.",
        "Accuracy",
        metavar="SHARE",
    )

    @property
    def needs_samples(self) -> bool:
        """Whether a limit is about outputs."""
        return self.min_sqnr is not None or self.min_agreement is not None

    def of_speed(self, file: str, ratio: Ratio | None) -> Iterator[Gated]:
        """What the speedup of a file holds; nothing without that limit."""
        if (least := self.fail_below) is None:
            return
        limit, told = f"at least {least:g}x as fast", "not timed" if ratio is None else ratio.speedup
        if ratio is not None and ratio.low is not None and 1 / ratio.low < least:
            yield Gated(file, limit, "missed", f"{told}, and all of the interval lies below")
        elif ratio is not None and ratio.high is not None and 1 / ratio.high >= least:
            yield Gated(file, limit, "holds", told)
        else:
            yield Gated(file, limit, "undecided", told)

    def of_outputs(self, file: str, accuracy: Accuracy | None, unlike: str) -> Iterator[Gated]:
        """What the outputs of a file hold; `unlike` says why they cannot be compared."""
        for limits, limit in (
            (Limits(min_sqnr=self.min_sqnr), f"output SQNR of at least {self.min_sqnr or 0:g} dB"),
            (Limits(min_agreement=self.min_agreement), f"agreement of at least {self.min_agreement or 0:.4g}"),
        ):
            if not limits.are_set:
                continue
            if accuracy is None:
                yield Gated(file, limit, "failed", f"outputs were not compared{': ' if unlike else ''}{unlike}")
            elif limits.min_sqnr is not None and integers_differ(accuracy.sqnr_db, accuracy.agreement):
                yield Gated(file, limit, "undecided", "the outputs hold integers: `min_agreement` is about these")
            elif limits.min_agreement is not None and equal_share(accuracy) is None:
                yield Gated(file, limit, "undecided", "no output holds integers or scores of classes (`scores`)")
            else:
                missed, sqnr, share = limits.missed(accuracy), accuracy.sqnr_db, equal_share(accuracy)
                held = f"{share:.1%}" if limits.min_agreement is not None and share is not None else decibels(sqnr)
                yield Gated(file, limit, "missed" if missed else "holds", missed or held)


@dataclass(frozen=True)
class Gated:
    """What became of one limit on one file, and why."""

    file: str
    limit: str
    outcome: Outcome
    told: str

    @property
    def passes(self) -> bool:
        """Whether the limit is not missed, and was measured."""
        return self.outcome in ("holds", "undecided")

    @property
    def in_words(self) -> str:
        """The outcome, and what it is about."""
        return f"{self.outcome}: {self.file}, {self.limit}: {self.told}"


TAGS: Mapping[Outcome, str] = {"undecided": "skipped", "missed": "failure", "failed": "error"}
"""What JUnit calls an outcome."""


BEGINNING = "<!-- made by qdqtune -->"
"""First line of Markdown, by which the action finds its comment on a pull request."""


def junit(gated: Sequence[Gated]) -> str:
    """The outcomes as JUnit XML: a test case for each limit of each file; an undecided one counts as skipped."""
    found = Counter(one.outcome for one in gated)
    told = {"tests": len(gated), "skipped": found["undecided"], "failures": found["missed"], "errors": found["failed"]}
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "qdqtune", **{n: str(k) for n, k in told.items()}})
    for one in gated:
        case = ElementTree.SubElement(suite, "testcase", classname=escaped(one.file), name=one.limit)
        if one.outcome in TAGS:
            ElementTree.SubElement(case, TAGS[one.outcome], message=escaped(one.told))
        else:
            ElementTree.SubElement(case, "system-out").text = escaped(one.told)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, "unicode", xml_declaration=True) + "\n"


def markdown(told: str, table: Table | None, gated: Sequence[Gated], notes: Sequence[str] = ()) -> str:
    """A result as Markdown: a sentence, its table, the outcome of each limit, notes."""
    lines = [BEGINNING, f"**qdqtune:** {_plain(told)}", ""]
    if table is not None:
        rows = [table.columns, ["---"] * len(table.columns), *table.rows]
        lines += [f"| {' | '.join(map(_plain, row))} |" for row in rows]
        lines += ["", *(line for text in table.caption.splitlines() for line in (_plain(text), ""))]
    lines += [f"- {_plain(text)}" for text in (*(one.in_words for one in gated), *(f"note: {n}" for n in notes))]
    return "\n".join(lines).rstrip() + "\n"


def _plain(text: str) -> str:
    """Text in which Markdown and HTML see no marks, as names come from models: one line, escaped where needed."""
    return "".join(f"\\{c}" if c in r"\`*_|<>[]" else c for c in escaped(text)).replace("@", "@\u200b")
