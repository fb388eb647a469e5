"""Commands whose help fits on a page: options in named groups, those that few need by name only.

`--help` gives a line to each usual option, `--help-all` explains every one.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from qdqtune.cli.output import say_notes

GROUPS = {
    "Output": (
        "output_dir", "output", "report", "html", "as_machine", "quiet", "verbose", "dry_run", "help_all",
        "help",
    ),
    "Search": ("mode", "effort", "builds", "time_budget", "front", "pick", "is_seed", "jobs"),
    "Model": (
        "placement", "quant_type", "weight_only", "precision", "fix_inputs", "input_shapes", "from_qdq", "nodes",
        "op_types",
        "excluded_nodes", "excluded_op_types", "allowed",
    ),
    "Data": ("calibration_data", "workloads"),
    "Accuracy": ("min_sqnr", "evaluate", "calibration_method"),
    "Engine": ("engine", "threads", "workers", "runs"),
}  # fmt: skip
"""The options that `--help` explains, by parameter, in the order in which it shows them. The rest it only names."""

RARE = {
    "Search": (
        "restart", "timing_runs", "warmup_runs", "cut_seed", "schemes_per_region", "incremental_validation",
        "pattern_cache", "price_cache",
        "regions", "node_filter", "tune_args", "state_file", "seed",
    ),
    "Model": (
        "formats", "weight_rounding", "qdq_baseline", "per_channel", "placement_like", "rewrites",
        "equalize", "fold",
    ),
    "Data": ("calibration_samples", "calibration_cache"),
    "Accuracy": ("max_drop", "min_agreement", "bias_correction", "percentile"),
    "Engine": (
        "deploy_threads", "cores_per_worker", "ray", "provider", "target", "time_limit", "min_shapes",
        "opt_shapes", "max_shapes", "timing_cache", "plugin_libraries", "workspace_mb", "builder_level", "trtexec",
        "trtexec_args",
        "engine_options", "graph_json", "profile_json", "default_dq_dtype",
    ),
}  # fmt: skip

SHORT = {
    "output_dir": "folder of results and for resuming",
    "report": "write report.html, for a browser",
    "quantize report": "tensors whose rounding does most harm",
    "html": "a page to look at, offline",
    "as_machine": "print JSON",
    "quiet": "no progress",
    "verbose": "progress line by line",
    "dry_run": "say what would be done, and how long",
    "help_all": "explain every option",
    "help": "this page",
    "mode": "how to search; cut is quickest to win",
    "effort": "how many builds and rounds",
    "builds": "engine builds for the search",
    "time_budget": "for the whole run: 90s, 10m, 1h",
    "front": "points from fastest to most exact",
    "pick": "ship another point of the front",
    "is_seed": "go on with a search from this placement",
    "quant_type": "numbers of the pairs",
    "weight_only": "activations stay in float: w4, w8, w4b32",
    "precision": "of what stays in float; fp16 for GPUs",
    "fix_inputs": "make an input constant, fold its If",
    "input_shapes": "sizes of dynamic inputs for measuring",
    "workloads": "inputs of one call, its share: decode.npz:0.8",
    "from_qdq": "MODEL has pairs: start from them",
    "nodes": "only these nodes",
    "op_types": "only these operators",
    "excluded_nodes": "nodes that stay in float",
    "excluded_op_types": "operators that stay in float",
    "allowed": "nodes that are meant to be so",
    "calibration_data": ".npz, folder, or module:callable",
    "calibration_samples": "use at most so many of them",
    "calibration_cache": "scales from a file in place of data",
    "min_sqnr": "least signal to error at the outputs",
    "evaluate": "your own metric, higher is better",
    "calibration_method": "how ranges are found",
    "engine": "what to build and time on",
    "threads": "of a CPU; one is the steadiest",
    "tune threads": "of a CPU; holds at a thread a core too",
    "workers": "devices that measure side by side",
    "runs": "inferences to time",
}
"""What `--help` says of them in a few words, by parameter, or by command and parameter; of the others the first
sentence of what `--help-all` says."""

OTHER = "Other"
NAMES = 32
"""Columns of an option's name."""

EVERYTHING, QUIET, VERBOSE = "qdqtune.help_all", "qdqtune.quiet", "qdqtune.verbose"
"""What a command was asked for, in the `meta` of its context."""


def is_quiet() -> bool:
    """Whether the command at hand shall tell no progress."""
    return _asked(QUIET)


def is_verbose() -> bool:
    """Whether the command at hand shall tell all there is, line by line."""
    return _asked(VERBOSE)


def _asked(what: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(what))


def _remember(what: str) -> Callable[[click.Context, click.Parameter, bool], bool]:
    def remember(context: click.Context, _: click.Parameter, value: bool) -> bool:
        context.meta[what] = value
        return value

    return remember


def _explain_all(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.meta[EVERYTHING] = True
        click.echo(context.get_help())
        context.exit()


HELP_ALL = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_explain_all, help="Explain every option."
)
SILENCE = click.Option(
    ["-q", "--quiet"], is_flag=True, expose_value=False, callback=_remember(QUIET), help="No progress."
)
CHATTER = click.Option(
    ["-v", "--verbose"],
    is_flag=True,
    expose_value=False,
    callback=_remember(VERBOSE),
    help="Progress line by line, also on a terminal.",
)


class Grouped(click.Command):
    """A command with options in groups, which all have -q, -v and --help-all."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """See click."""
        own = super().get_params(ctx)
        names = {param.name for param in own}
        common = [option for option in (SILENCE, CHATTER) if option.human_readable_name not in names]
        return [*own[:-1], *common, HELP_ALL, own[-1]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click, where the last of several values counts; that is said."""
        if not ctx.resilient_parsing:
            given = Counter(p for p in self.make_parser(ctx).parse_args([*args])[2] if isinstance(p, click.Option))
            twice = [p for p, times in given.items() if times > 1 and not (p.multiple or p.is_flag or p.count)]
            say_notes(f"{max(p.opts, key=len)} is given more than once: the last one counts" for p in twice)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        options = {
            "help" if "--help" in p.opts else p.human_readable_name: p
            for p in self.get_params(ctx)
            if isinstance(p, click.Option)
        }
        everything = bool(ctx.meta.get(EVERYTHING))
        for group in (*GROUPS, OTHER):
            usual, rare = _of(group, options)
            if everything and (shown := [r for o in (*usual, *rare) if (r := o.get_help_record(ctx))]):
                with formatter.section(group):
                    formatter.write_dl(shown)
            elif usual or rare:
                formatter.write(f"\n{group}:\n" + "".join(_lines(usual, rare, ctx, formatter.width)))


def _of(group: str, options: dict[str, click.Option]) -> tuple[list[click.Option], list[click.Option]]:
    """Of the options by parameter those of a group: the usual ones, and the rare ones."""
    if group == OTHER:
        known = {name for table in (GROUPS, RARE) for names in table.values() for name in names}
        return [option for name, option in options.items() if name not in known], []
    usual = [options[name] for name in GROUPS[group] if name in options]
    return usual, [options[name] for name in RARE.get(group, ()) if name in options]


def _lines(
    usual: Sequence[click.Option], rare: Sequence[click.Option], context: click.Context, width: int
) -> Iterator[str]:
    """A line for each usual option, and the names of the others."""
    for option in usual:
        short = textwrap.shorten(_words(option, context), max(20, width - NAMES - 2), placeholder="...")
        yield f"  {_names(option):<{NAMES - 2}}  {short}\n"
    if rare:
        named = ", ".join(name for option in rare for name in option.opts)
        yield textwrap.fill(f"  also {named}", width, subsequent_indent="    ", break_on_hyphens=False) + "\n"


def _names(option: click.Option) -> str:
    names = ", ".join(sorted(option.opts, key=len))
    if option.is_flag:
        return names
    value = option.metavar or _kind(option)
    is_long = len(f"{names} {value}") > NAMES - 2
    return f"{names} {option.opts[-1].rpartition('-')[2].upper()}" if is_long else f"{names} {value}"


def _kind(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return "|".join(map(str, option.type.choices))
    return {"integer range": "N", "integer": "N", "number": "X", "path": "FILE"}.get(option.type.name, "TEXT")


def _words(option: click.Option, context: click.Context) -> str:
    """What an option does for a command, in a few words, and its default."""
    first = (option.help or "").partition(". ")[0].split("  [")[0].rstrip(".")
    name = option.human_readable_name
    words = SHORT.get(f"{context.info_name} {name}") or SHORT.get(name, first)
    is_plain = not option.is_flag and option.show_default and option.default not in (None, "", ())
    return f"{words} [{option.default}]" if is_plain else words


def command(name: str, params: Sequence[click.Parameter]) -> Callable[[Callable[..., Any]], Grouped]:
    """Make a function a command with these parameters."""
    return click.command(name, cls=Grouped, params=[*params])
