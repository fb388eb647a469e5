"""HTML reports on the results of commands other than `tune`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from qdqtune.commands.check import Checked
from qdqtune.commands.compare import Comparison, Row
from qdqtune.commands.qualification.qualify import Qualification
from qdqtune.commands.quantize import Quantized
from qdqtune.commands.quantize_options import QuantizeOptions
from qdqtune.commands.shown import Table
from qdqtune.explanation.formatting import title
from qdqtune.explanation.model_map import Ran, draw, everywhere
from qdqtune.explanation.reasons_by_graph import is_low
from qdqtune.explanation.report import bars, left_to_others, speed, strip
from qdqtune.explanation.report_values import Fact, Headline, Map, Report, ReportTable, Strip
from qdqtune.graph.model import Model
from qdqtune.placement.reading import count_pairs
from qdqtune.search.costs.attribution import node_times
from qdqtune.timing.ratios import Plan, ratio
from qdqtune.tuning.subgraphs.groups import by_rules, from_layers
from qdqtune.types import Layer, Placement
from qdqtune.version import __version__

PROFILED = "Times of profiled inferences: they say where the time goes, and add up to more than the latency."


def of_layers(name: str, model: Model | None, engine: str, layers: Sequence[Layer], typed: Sequence[str]) -> Report:
    """The report of `layers`; without the model there is no map."""
    running = [layer for layer in layers if layer.kind != "folded"]
    total = sum(layer.time_ms or 0.0 for layer in running)
    low = sum(is_low(layer.precision) for layer in running)
    drawn = None if model is None else _drawn_map(model, layers)
    meaning = f"{low} of them in 8 bits." if low else "None of them is in 8 bits."
    return Report(
        title=name,
        kind="layers",
        verdict=Headline(f"{engine} runs {name} as {len(running)} layers", meaning, bool(low)),
        facts=(Fact("layers", str(len(running))), *([Fact("in all", f"{total:.4g} ms", "")] if total else [])),
        bars=bars(drawn) if drawn else (),
        bars_lead=PROFILED,
        map=drawn,
        listings=(_layer_table(layers),),
        circumstances=(Fact("engine", engine), Fact("qdqtune", __version__)),
        commands=_command_facts(typed),
    )


def of_check(name: str, done: Checked, typed: Sequence[str]) -> Report:
    """The report of `check`."""
    engine, layers, findings, measured = done.engine, done.layers, done.findings, done.measured
    failing = [] if measured else [finding for finding in findings if finding.fails]
    low = sum(is_low(layer.precision) for layer in done.running)
    whys: dict[str, str] = {}
    for finding in findings:
        whys |= dict.fromkeys(finding.nodes, finding.reason)
    drawn = _drawn_map(done.graph, layers, whys) if layers else None
    if failing:
        verdict = Headline(
            f"{engine} does not fuse all of {name}", f"{len(failing)} findings, each with its reason.", False
        )
    else:
        meaning = "What it does not fuse was measured, and is faster so." if measured and findings else ""
        verdict = Headline(f"{engine} fuses {name} as it should", meaning or "No finding fails.", True)
    return Report(
        title=name,
        kind="check",
        verdict=verdict,
        facts=(
            Fact("layers in 8 bits", f"{low} of {len(done.running)}"),
            Fact("findings", str(len(failing))),
            Fact("notes", str(len(findings) - len(failing)), "worth knowing, nothing to mend"),
            *(() if done.fallback is None else (left_to_others(done.fallback),)),
        ),
        listings=(_listing("What is not fused", "", done.table(), 2),) if findings else (),
        bars=bars(drawn) if drawn else (),
        bars_lead=PROFILED,
        map=drawn,
        circumstances=(Fact("engine", engine), Fact("qdqtune", __version__)),
        commands=_command_facts(typed),
    )


def of_compare(done: Comparison, plan: Plan, typed: Sequence[str]) -> Report:
    """The report of `compare`, with every round."""
    known = [row for row in done.rows if row.ratio is not None]
    best = min(known, key=lambda row: row.ratio.median if row.ratio else 1.0, default=None)
    name = title(Path(done.first))
    if len(done.refusals) < len(done.rows) and not known:
        verdict = Headline(f"Outputs were compared with those of {name}", "Nothing was timed.", False)
    elif best is None or best.ratio is None:
        verdict = Headline(f"Nothing could be compared with {name}", "The engine refused every other file.", False)
    else:
        other, found = title(Path(best.file)), speed(best.ratio)
        words = {
            "faster": f"{other} runs {found.median:.2f} times as fast as {name}",
            "slower": f"{other} is slower than {name}: {found.median:.2f} times as fast",
            "undecided": f"{other} and {name} cannot be told apart",
        }
        of_all = f"The fastest of {len(done.rows)} files. " if len(done.rows) > 1 else ""
        meaning = f"{of_all}One inference takes {best.ms:.4g} ms instead of {best.first_ms:.4g} ms."
        verdict = Headline(words[best.ratio.verdict], meaning, best.ratio.verdict == "faster", found, name)
    return Report(
        title=name,
        kind="compare",
        verdict=verdict,
        notes=(*done.notes, *done.refusals),
        listings=(_listing("All files", f"Against {done.first}.", done.table(), 1, 2, 5),),
        proof=tuple(_round_strips(known, plan)),
        circumstances=(Fact("qdqtune", __version__),),
        commands=_command_facts(typed),
    )


def of_quantize(options: QuantizeOptions, done: Quantized, model: Model, typed: Sequence[str]) -> Report:
    """The report of `quantize`. `model` is the written model without its pairs."""
    placement, name = done.placed.placement, title(Path(str(options.model)))
    grouped = by_rules(model, everywhere(model))
    drawn = draw(model, grouped.groups, (), Ran(Placement()), Ran(placement), {}, {}, "quantized")
    eight = sum(node.quantized for node in drawn.nodes)
    exact = "not compared" if not done.judged else "equal" if done.sqnr_db is None else f"{done.sqnr_db:.1f} dB"
    if not done.is_finite:
        exact = "not finite"
    hint = "signal over error at the outputs; 20 dB is an error of a tenth, 30 of a thirtieth"
    listings = [_listing("What each rule did", "The reference has their reasons.", done.table(), 1)]
    if done.damages:
        lead = "Rounding this tensor alone would leave so much."
        listings.append(_listing("What hurts most", lead, done.damage_table(), 2, 3))
    meaning = f"{eight} of {len(drawn.nodes)} nodes read 8-bit values, by the rules for {options.engine}. "
    meaning += "Nothing was timed: qdqtune tune measures which pairs pay."
    return Report(
        title=name,
        kind="quantize",
        verdict=Headline(f"{name} is quantized", meaning, True),
        facts=(
            Fact("output accuracy", exact, hint),
            Fact("tensors with a Q/DQ pair", str(count_pairs(placement))),
            Fact("judged on", f"{done.judged} samples", "held out of calibration" if done.is_held_out else ""),
        ),
        notes=done.notes,
        map=drawn,
        listings=tuple(listings),
        circumstances=tuple(
            map(Fact, ("engine", "numbers", "qdqtune"), (options.engine, options.quant_type, __version__))
        ),
        commands=_command_facts(typed),
    )


def of_qualification(done: Qualification, typed: Sequence[str]) -> Report:
    """The report of `doctor` with `qualify`."""
    seen = tuple((r.name, s.subject, s.state, s.told) for r in done.results for s in r.seen)
    name = f"{done.engine['engine']} {done.engine['version']}"
    verdict = "does what qdqtune claims" if done.holds else "does not do all that qdqtune claims"
    return Report(
        title=name,
        kind="doctor",
        verdict=Headline(f"{name} {verdict}", done.in_words(), done.holds),
        listings=(
            _listing("Claims", "", done.table(), 4),
            ReportTable("All that was checked", "", ("check", "subject", "result", "what was seen"), seen),
        ),
        circumstances=tuple(Fact(*item) for item in {**done.engine, **done.machine, "qdqtune": __version__}.items()),
        commands=_command_facts(typed),
    )


def _drawn_map(model: Model, layers: Sequence[Layer], whys: Mapping[str, str] | None = None) -> Map:
    grouped = from_layers(model, layers, "")
    total = sum(layer.time_ms or 0.0 for layer in layers)
    ran = Ran(Placement(), layers, node_times(model, Placement(), layers, total))
    return draw(model, grouped.groups, frozenset(grouped.folded), ran, None, {}, whys or {}, "")


def _listing(title: str, lead: str, table: Table, *numbers: int) -> ReportTable:
    """A table of a result in a report; `numbers` are the columns that hold numbers."""
    return ReportTable(title, lead, tuple(table.columns), tuple(map(tuple, table.rows)), numbers)


def _layer_table(layers: Sequence[Layer]) -> ReportTable:
    rows = tuple(
        (str(number), ", ".join(layer.nodes[:8]), layer.kind, layer.precision, _ms(layer.time_ms), layer.name)
        for number, layer in enumerate(layers, 1)
    )
    lead = "In the order in which the engine runs them."
    return ReportTable("All layers", lead, ("#", "nodes", "kind", "precision", "ms", "layer"), rows, (0, 4), late=True)


def _round_strips(rows: Sequence[Row], plan: Plan) -> Iterator[Strip]:
    for row in rows:
        for number, measured in enumerate(row.rounds, 1):
            yield strip(f"{title(Path(row.file))}, builds {number}", measured, ratio(measured, plan))


def _command_facts(typed: Sequence[str]) -> tuple[Fact, ...]:
    return (Fact("what was run", shlex.join(typed)),) if typed else ()


def _ms(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.4f}"
