"""Trained models tuned with their own calibration data: latency before and after, and the accuracy of the outputs.

Each model is NAME/model.onnx with NAME/calib.npz. 'never slower' is NO where the interval of final/float lies above 1.
"""

from __future__ import annotations

import json

import tuning_runs
import zoo

COLUMNS = ("model", "float ms", "final ms", "final/float", "never slower", "ships", "output dB", "pairs", "builds",
           "trials", "seconds", "static ms", "static dB", "final/static")  # fmt: skip


def row(facts: tuning_runs.Facts) -> list[str]:
    """The numbers of one model, in the order of `COLUMNS`."""
    static = facts.get("static")
    sqnr = facts["output_sqnr_db"]
    slower = facts["ratio_low"] is not None and facts["ratio_low"] > 1
    return [
        facts["name"], f"{facts['baseline_ms']:.3f}", f"{facts['final_ms']:.3f}", tuning_runs.ratio_text(facts),
        "NO" if slower else "yes", facts["shipped"], "exact" if sqnr is None else f"{sqnr:.1f}", str(facts["pairs"]),
        str(facts["builds"]), str(facts["trials"]), f"{facts['seconds']:.0f}",
        f"{static['ms']:.3f}" if static else "",
        f"{static['sqnr_db']:.1f}" if static and static["sqnr_db"] is not None else "",
        tuning_runs.ratio_text(static) if static else "",
    ]  # fmt: skip


def main() -> None:
    arguments = zoo.parser(__doc__, ())
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


if __name__ == "__main__":
    main()
