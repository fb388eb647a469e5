"""Region search on ONNX Runtime, one thread: what it gains over the float model, and against quantize_static's file."""

from __future__ import annotations

import json

import numpy as np
import tuning_runs
import zoo

NAMES = ("resnet50", "mobilenet_v2", "efficientnet_b0", "deit_small", "convnext_tiny")
COLUMNS = ("model", "float ms", "final ms", "final/float", "builds", "trials", "seconds", "outside engine", "pairs",
           "final dB", "static ms", "static dB", "final/static")  # fmt: skip


def row(facts: tuning_runs.Facts) -> list[str]:
    """The numbers of one model, in the order of `COLUMNS`."""
    static = facts.get("static")
    sqnr = facts["output_sqnr_db"]
    return [
        facts["name"], f"{facts['baseline_ms']:.2f}", f"{facts['final_ms']:.2f}", tuning_runs.ratio_text(facts),
        str(facts["builds"]), str(facts["trials"]), f"{facts['seconds']:.0f}",
        f"{tuning_runs.outside_engine(facts):.0f} %", str(facts["pairs"]), "exact" if sqnr is None else f"{sqnr:.1f}",
        f"{static['ms']:.2f}" if static else "", f"{static['sqnr_db']:.1f}" if static else "",
        tuning_runs.ratio_text(static) if static else "",
    ]  # fmt: skip


def geometric_mean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def main() -> None:
    arguments = zoo.parser(__doc__, NAMES)
    tuning_runs.add_arguments(arguments, builds=60)
    given = arguments.parse_args()
    zoo.print_machine()
    runs = []
    for facts in tuning_runs.run_all(given):
        print("  ".join(row(facts)) if "failed" not in facts else f"{facts['name']}: {facts['failed']}", flush=True)
        runs.append(facts)
        if given.json:
            given.json.write_text(json.dumps(runs, indent=1))
    tuning_runs.show(COLUMNS, row, runs)
    if good := [r for r in runs if "failed" not in r]:
        print(f"final/float, geometric mean: {geometric_mean([r['ratio'] for r in good]):.3f}")
    if paired := [r["static"]["ratio"] for r in good if "static" in r]:
        print(f"final/static, geometric mean: {geometric_mean(paired):.3f}")


if __name__ == "__main__":
    main()
