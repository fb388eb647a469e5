"""The common beginning of these scripts; `script_of` inserts it in place of its import."""

import json
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from statistics import median

parser = ArgumentParser(description=__doc__)
parser.add_argument("runs", type=int, nargs="?", default=100, help="inferences that are timed [100]")
runs = parser.parse_args().runs
here = Path(__file__).resolve().parent
if not (here / "settings.json").exists():
    raise SystemExit(f"settings.json is missing: copy it from the folder deploy to {here}")
settings = json.loads((here / "settings.json").read_text(encoding="utf-8"))
library, model = settings["library"], here.parent / settings["model"]
if not model.exists():
    model = here / model.name
if not model.exists():
    raise SystemExit(f"{model.name} is missing: copy it from the folder of the run to {here}")


def measure(infer: Callable[[], object], how: str) -> None:
    """Time `infer`, and print the median latency; `how` describes the conditions."""
    times = []
    for _ in range(runs):
        begun = time.perf_counter()
        infer()
        times.append(time.perf_counter() - begun)
    print(settings["told"])
    print(f"median of {runs} runs: {1e3 * median(times):.3f} ms, {how}")
