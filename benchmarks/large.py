"""What `tune` needs for a model of several GB: memory of all its processes together, bytes written, disk in use.

The model is made here: blocks of LayerNormalization, two matrix products with a Gelu between them, and a sum, with
random weights as external data. Memory is the sum of the proportional set sizes of the command and all processes under
it, looked at ten times a second, so that pages which several of them share count once. 'beyond' is what it is above
the size of the model. 'written' are the bytes that all processes wrote, and 'disk' the most that the output folder and
the folder of temporary files held, each file once however many names it has; 'left' is what the output folder holds in
the end; all three divided by the size of the model. With `--kill` the command alone is killed (SIGKILL) after so many
seconds, and what is left is counted when the cleanup has had its time.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import resource
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import zoo
from onnx import TensorProto, helper, numpy_helper

GB = 1e9
PATIENCE = 10.0
"""Seconds that the cleanup gets."""

BLOCK_BYTES = 512
"""Unit of `getrusage`."""

WIDTH, TOKENS = 2048, 4
BLOCK = 4 * (8 * WIDTH * WIDTH + 2 * WIDTH)
"""Bytes of the weights of a block."""


def generate(folder: Path, size: float) -> Path:
    """A model with about `size` bytes of weights in one file of external data, and its calibration data.

    Each block has weights of its own content.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    weights = {
        "up": rng.standard_normal((WIDTH, 4 * WIDTH), np.float32) / WIDTH**0.5,
        "down": rng.standard_normal((4 * WIDTH, WIDTH), np.float32) / (4 * WIDTH) ** 0.5,
    }
    nodes, constants = [], [numpy_helper.from_array(np.ones(WIDTH, np.float32), "ones")]
    current, offset = "tokens", 0
    with (folder / "model.data").open("wb") as data:
        for i in range(max(1, round(size / BLOCK))):
            for name, weight in weights.items():
                rolled = np.roll(weight, i, axis=0)
                tensor = TensorProto(name=f"{name}{i}", data_type=TensorProto.FLOAT, dims=rolled.shape)
                tensor.data_location = TensorProto.EXTERNAL
                for key, value in (("location", "model.data"), ("offset", offset), ("length", rolled.nbytes)):
                    tensor.external_data.add(key=key, value=str(value))
                constants.append(tensor)
                offset += data.write(rolled.data)
            nodes += [
                helper.make_node("LayerNormalization", [current, "ones"], [f"n{i}"], f"norm{i}"),
                helper.make_node("MatMul", [f"n{i}", f"up{i}"], [f"u{i}"], f"up{i}"),
                helper.make_node("Gelu", [f"u{i}"], [f"g{i}"], f"gelu{i}"),
                helper.make_node("MatMul", [f"g{i}", f"down{i}"], [f"d{i}"], f"down{i}"),
                helper.make_node("Add", [current, f"d{i}"], [f"x{i}"], f"sum{i}"),
            ]
            current = f"x{i}"
    shape = (1, TOKENS, WIDTH)
    graph = helper.make_graph(
        nodes,
        "large",
        [helper.make_tensor_value_info("tokens", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(current, TensorProto.FLOAT, shape)],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "calib.npz", tokens=rng.standard_normal((8, TOKENS, WIDTH), np.float32))
    return folder / "model.onnx"


@dataclass
class Watch:
    """The most that was seen of each, in bytes."""

    memory: int = 0
    disk: int = 0

    def look(self, root: int, folders: Sequence[Path]) -> None:
        """Look once at a process and all under it, and at what folders hold."""
        self.memory = max(self.memory, sum(map(resident, family(root))))
        self.disk = max(self.disk, sum(held(folders).values()))


def family(root: int) -> Iterator[int]:
    """A process and all processes that it has started, those of them among them."""
    yield root
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{root}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from family(int(child))


def resident(pid: int) -> int:
    """Bytes of the proportional set size of a process; 0 if it is gone."""
    return 1024 * number(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")


def number(file: Path, word: str) -> int:
    """The number behind a word in a file of /proc; 0 if there is none."""
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(word):
                return int(line.split()[1])
    return 0


def held(folders: Sequence[Path]) -> dict[tuple[int, int], int]:
    """Bytes of each file in some folders, by its inode."""
    sizes = {}
    for top in folders:
        for folder, _, names in os.walk(top):
            for name in names:
                with contextlib.suppress(OSError):  # gone since
                    found = os.lstat(os.path.join(folder, name))
                    if stat.S_ISREG(found.st_mode):
                        sizes[found.st_dev, found.st_ino] = 512 * found.st_blocks
    return sizes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=4.0, help="GB of weights (default: %(default)s)")
    parser.add_argument("--embedded", action="store_true", help="one file with its weights inside, of less than 2 GB")
    parser.add_argument("--folder", type=Path, help="where the model, the results and temporary files go")
    parser.add_argument("--kill", type=float, default=math.inf, metavar="SECONDS", help="kill the command after that")
    parser.add_argument("options", nargs="*", help="options of `tune`, behind --")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        model = generate(folder / "model", args.size * GB)
        if args.embedded:
            onnx.save(onnx.load(model), model)
            (model.parent / "model.data").unlink()
        size = sum(f.stat().st_size for f in model.parent.iterdir())
        command = [sys.executable, "-m", "qdqtune", "tune", str(model), "--calibration-data"]
        command += [str(model.parent / "calib.npz"), "-o", str(folder / "out"), *args.options]
        own = {"TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "cache")}
        watch, start = Watch(), time.monotonic()
        process = subprocess.Popen(command, env={**os.environ, **own})
        while process.poll() is None:
            watch.look(process.pid, [folder / "out", folder / "tmp"])
            if time.monotonic() - start > args.kill:
                process.kill()
                time.sleep(PATIENCE)
            time.sleep(0.1)
        seconds = time.monotonic() - start
        written = BLOCK_BYTES * resource.getrusage(resource.RUSAGE_CHILDREN).ru_oublock
        left = sum(held([folder / "out"]).values())
        forgotten = sum(1 for f in (folder / "tmp").rglob("*") if f.is_file())
    cells = [
        f"{size / GB:.2f}",
        f"{watch.memory / GB:.2f}",
        f"{(watch.memory - size) / GB:+.2f}",
        f"{written / size:.2f}",
        f"{watch.disk / size:.2f}",
        f"{left / size:.2f}",
        str(forgotten),
        f"{seconds:.0f}",
    ]
    heads = ["model, GB", "memory, GB", "beyond, GB", "written", "disk", "left", "temporary files left", "s"]
    zoo.print_table(heads, [cells])
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
