"""One file for calls of several shapes: tuned for their mix, and for each alone, beside what the quantizers of ONNX
Runtime make (MatMulNBits of 4 and 8 bits, quantize_static on all workloads), all timed on the mix and on each.

    python benchmarks/workloads.py model.onnx decode.npz:0.8 prefill.npz:0.2 --folder DIR --seconds 600 --threads 1

Cells are the median ratio of time to the float model with its interval, and the output SQNR in dB over all workloads.
`seconds` bound each of the searches. A file that is there already is not made again.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from formats import BITS, cell, nbits
from quantizers import write_static

from qdqtune.calibration.prepare import Data, prepare
from qdqtune.calibration.scales import Calibration
from qdqtune.calibration.workloads import WorkloadFile, Workloads
from qdqtune.commands.compare import Row, compare_files
from qdqtune.engines import EngineSpec
from qdqtune.engines.formats import numeric_format
from qdqtune.engines.runner import Runner
from qdqtune.graph.loading import load
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.folder import FINAL
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import Settings


@dataclass(frozen=True)
class Asked:
    """What the files are made of and where they go."""

    model: Path
    mix: list[WorkloadFile]
    folder: Path
    seconds: float
    threads: int

    @property
    def engine(self) -> EngineSpec:
        """ONNX Runtime."""
        return EngineSpec("onnxruntime", {"threads": self.threads})

    def tuned(self, mix: list[WorkloadFile], name: str) -> Path:
        """The file that ships for a mix."""
        folder = self.folder / name
        settings = Settings(
            self.model, output_dir=folder, engine=self.engine, workloads=tuple(mix), time_budget=self.seconds,
            calibration=Calibration("minmax", bias_correction=False), deploy_threads=(self.threads,),
        )  # fmt: skip
        if not (folder / FINAL).exists():
            tune(settings)
        return folder / FINAL

    def peers(self) -> dict[str, Path]:
        """The files of the other quantizers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files = {name: self.folder / f"{name}.onnx" for name in (*(f"int{bits}" for bits in BITS), "static")}
        for bits in BITS:
            if not files[f"int{bits}"].exists():
                nbits(self.model, files[f"int{bits}"], bits)
        if not files["static"].exists():
            samples = prepare(load(self.model), Data(workloads=self.mix)).samples.first(len(self.mix))
            write_static(load(self.model), samples, numeric_format("onnxruntime", "int8"), files["static"])
        return files


def cells(row: Row) -> list[str]:
    """Ratio on the mix with the SQNR, and the ratio on each workload."""
    return [cell(row), *(str(part.ratio) for part in row.workloads)]


def main() -> None:
    """Tune for the mix and for each workload, and let all files meet the float model."""
    asking = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asking.add_argument("model", type=Path)
    asking.add_argument("mix", nargs="+", help="FILE:WEIGHT")
    asking.add_argument("--folder", type=Path, default=Path("workloads"))
    asking.add_argument("--seconds", type=float, default=600.0)
    asking.add_argument("--threads", type=int, default=1)
    asking.add_argument("--alone", action="store_true", help="tune for each workload as well")
    given = asking.parse_args()
    mix = [file for file in Workloads().convert(given.mix, None, None) if isinstance(file, WorkloadFile)]
    asked = Asked(given.model, mix, given.folder, given.seconds, given.threads)
    files = asked.peers() | {"tuned for the mix": asked.tuned(asked.mix, "mix")}
    files |= {f"tuned for {one.name}": asked.tuned([one], one.name) for one in asked.mix if given.alone}
    prepared = prepare(load(asked.model), Data(workloads=asked.mix))
    print("| file | " + " | ".join(["the mix", *(w.name for w in prepared.workloads)]) + " |", flush=True)
    samples = prepared.samples.first(len(asked.mix))
    with Runner(asked.engine, log_dir=asked.folder / "logs") as runner:
        for name, file in files.items():
            pair = [asked.model, file]
            (row,) = compare_files(pair, runner, samples, Plan((12, 24)), mix=prepared.workloads, builds=2)
            print(f"| {name} | " + " | ".join(cells(row)) + " |", flush=True)


if __name__ == "__main__":
    main()
