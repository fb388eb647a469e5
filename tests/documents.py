"""What the tests of the README, of docs/ and of examples/ share: fenced blocks, and how their commands are run."""

import ast
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import yaml

from decoders import exported
from models import build, normal
from qdqtune.autotune import __main__ as autotune
from qdqtune.cli import main
from qdqtune.engines.fake import FakeModel
from qdqtune.graph.saving import save
from qdqtune.tuning.settings import FRONT_LEAST
from qdqtune.types import Tensors
from sample_files import cache_of_scales
from workers import in_process

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
MAKEFILE = (ROOT / "Makefile").read_text()

GPU = re.compile(r"<!-- needs a GPU: (.+?) -->\n\*Needs a GPU\.\*\n\n")
FENCED = re.compile(rf"^(?:{GPU.pattern})?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"# exit code (\d+)")
PRINTED = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
FAKED = {r'EngineSpec\("onnxruntime"[^)]*\)': 'EngineSpec("fake")',
         r'engine="onnxruntime",\s+threads=1': 'engine="fake"',
         r"3, 32, 32\)": "3, 8, 8)",
         r"init_benchmark_instance\((?=[a-z])": 'init_benchmark_instance(engine="fake", '}  # fmt: skip
"""What names the engine or the size of images in Python code, and what a test puts there."""
SHELL = ("cat", "cp", "ls", "mkdir", "printf")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITHOUT_ENGINE = ("inspect", "doctor", "build", "quantize", "explain", "report", "verify")
"""Commands that take no engine, or write what the fake engine has no format for."""
TIMING = ("tune", "compare")
"""Commands that take long on any other engine."""
OPTIONAL = {"openvino": "openvino", "tensorrt-rtx": "tensorrt_rtx_bindings"}
"""Engines that a test may use, and the package without which it cannot."""
EXPORTER = "torch"
"""What code of documents may import besides; without it such code is not run, since `prepare` has made its model."""


VAD = """vad (float[N,576] input, float[2,N,128] state, int64 sr) => (float[N,1] output, float[2,N,128] stateN) {
    wide = MatMul(input, up)
    deep = MatMul(wide, on)
    narrow = MatMul(deep, down)
    hertz = Cast <to = 1> (sr)
    speed = Div(hertz, rate)
    sum = Mul(narrow, speed)
    output = Sigmoid(sum)
    stateN = Tanh(state)
}"""
"""A detector of voices by its inputs and outputs."""


@dataclass(frozen=True)
class Block:
    """Fenced text. `releases` are the versions of TensorRT that it needs a GPU for, none if it needs none."""

    kind: str
    text: str
    releases: tuple[str, ...] = ()

    @property
    def commands(self) -> list[str]:
        """One command a line; lines that end in a backslash go on."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a document, in order."""
    found = FENCED.findall(text)
    return [Block(kind, body, tuple(re.findall(r"\d+(?:\.\d+)?", gpu or ""))) for gpu, kind, body in found]


def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ONNX Runtime compute what the fake engine gives out: it takes milliseconds. It fuses nothing, since fused
    products of 8 bits saturate on some processors. Biases are corrected on the fewest samples.
    """

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL

    def run(self: FakeModel, inputs: Tensors) -> Mapping[str, object]:
        session: Any = self._evaluator
        if session is None:
            session = onnxruntime.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
            self._evaluator = session
        known = {given.name for given in session.get_inputs()}
        names = [output.name for output in session.get_outputs()]
        feed = {name: array for name, array in inputs.items() if name in known}
        return dict(zip(names, session.run(names, feed), strict=True))

    monkeypatch.setattr(FakeModel, "run", run)
    monkeypatch.setattr("qdqtune.numerics.fitting.MOST_SECONDS", 0.0)
    monkeypatch.setattr("qdqtune.numerics.simulation.SAMPLES", 1)


def run_command(command: str, *, on_gpu: bool = False, builds: int | None = None) -> None:
    """A command of a document. Only its engine is changed, to the one that answers at once, and its `builds`, if given.

    It must end with the exit code that its comment tells, else 0. `on_gpu` replaces engines that need one, too.
    """
    few = command.replace("--batch-size 128", "--batch-size 2").replace("x32x32", "x8x8")  # 128 images take a second
    program, *arguments = shlex.split(few, comments=True)
    code = int(found[1]) if (found := CODE.search(command)) else 0
    if program == "qdqtune":
        _run_ours(arguments, code, on_gpu=on_gpu, builds=builds)
    elif program == "python":
        _run_python(arguments, code, builds)
    elif program == "trtexec" or program in SHELL:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        assert done.returncode == code, f"{command}: {done.stderr}"
    elif program == "curl":
        shutil.copy("model.onnx", arguments[arguments.index("-o") + 1])  # nothing is downloaded in a test
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", MAKEFILE, re.MULTILINE)
    elif program == "cd":
        assert (ROOT / arguments[0]).is_dir()
    elif command == ". .venv/bin/activate":
        assert "VENV := .venv\n" in MAKEFILE
    else:
        assert command.startswith(("pip install ", "pip wheel "))


def _run_ours(arguments: list[str], code: int, *, on_gpu: bool, builds: int | None) -> None:
    named = arguments[arguments.index("--engine") + 1] if "--engine" in arguments else ""
    if not on_gpu and named in OPTIONAL and importlib.util.find_spec(OPTIONAL[named]) is None:
        return
    fake = on_gpu or not named or arguments[0] in TIMING
    quick = ["--engine", "fake"] if fake and arguments[0] not in WITHOUT_ENGINE else []
    if arguments[0] == "tune":
        quick += ["--builds", str(FRONT_LEAST if "--front" in arguments else builds)] if builds else []
    if arguments[0] in ("tune", "quantize") and "--calibration-samples" not in arguments:
        quick += ["--calibration-samples", "2"]
    _ends(lambda: main.main([*arguments, *quick]), code, shlex.join(arguments))


def _run_python(arguments: list[str], code: int, builds: int | None) -> None:
    if arguments[:2] == ["-m", "qdqtune.autotune"]:
        quick = ["--engine", "fake", *(["--builds", str(builds)] if builds else [])]
        _ends(lambda: autotune.main([*arguments[2:], *quick]), code, shlex.join(arguments))
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments[1 if arguments[0] == "-m" else 0 :])
        if arguments[0] == "-m":
            _ends(lambda: runpy.run_module(arguments[1], run_name="__main__"), code, shlex.join(arguments))
        else:
            _ends(lambda: runpy.run_path(arguments[0], run_name="__main__"), code, shlex.join(arguments))


def _ends(call: Callable[[], object], code: int, what: str) -> None:
    try:
        call()
        ended: object = 0
    except SystemExit as end:
        ended = end.code or 0
    assert ended == code, f"{what} ends with {ended}, not {code}"


def faked(code: str) -> str:
    for named, fake in FAKED.items():
        code = re.sub(named, fake, code)
    return code


def run_python(code: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Python code of a document; on the fake engine where it names ONNX Runtime. What it prints, and says it does."""
    capsys.readouterr()
    exec(compile(faked(code), "document", "exec"), {"__name__": "document"})
    printed = capsys.readouterr().out
    for line in PRINTED.findall(code):
        assert line in printed.splitlines(), f"{line!r} is not what it prints: {printed}"
    return printed


def run_notebook(path: Path) -> list[object]:
    """The cells of a notebook in order, on the fake engine where it names ONNX Runtime: the values that they end with,
    of those that end with one."""
    scope: dict[str, object] = {"__name__": "notebook"}
    values = []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            tree = ast.parse(faked("".join(cell["source"])))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, str(path), "exec"), scope)
            if isinstance(last, ast.Expr):
                values.append(eval(compile(ast.Expression(last.value), str(path), "eval"), scope))
    return values


def prepare(folder: Path) -> None:
    """Put the example's scripts into a folder, with what documents take for granted: a model, and what was made of it.
    The script that makes the model gives it fewer channels, smaller images, and fewer samples.

    `model.onnx` and `samples.npz`; `decoder.onnx`; `vad.onnx`; `retrained.onnx`, the same network with other weights;
    `qdqtune_output`, a tuning run; `quantized.onnx`, the model with pairs around its convolutions and nowhere else;
    `calib.cache`, scales of all its activations; `metric.py`, the functions of how-to/accuracy.md.
    """
    for script in EXAMPLES.glob("*/*.py"):
        shutil.copy(script, folder)
    metrics = blocks((ROOT / "docs" / "how-to" / "accuracy.md").read_text())
    (folder / "metric.py").write_text("\n".join(block.text for block in metrics if block.kind == "python"))
    script = folder / "make_model.py"
    smaller = re.sub(r"32(, ?)32", r"8\g<1>8", script.read_text().replace("64", "16"))
    script.write_text(smaller.replace("default=16", "default=2"))
    with in_process(), pytest.MonkeyPatch.context() as patch:
        quickly(patch)
        patch.chdir(folder)
        run_command("python make_model.py")
        run_command("qdqtune tune model.onnx --calibration-data samples.npz -q", builds=6)
        recorded = yaml.safe_load((folder / "qdqtune_output" / "placement.yaml").read_text())
        recorded["edges"] = [edge for edge in recorded["edges"] if "conv" in edge.get("node", "")]
        (folder / "convolutions.yaml").write_text(yaml.safe_dump(recorded))
        run_command("qdqtune apply model.onnx --placement convolutions.yaml -o quantized.onnx")
    proto = onnx.load(folder / "model.onnx")
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(1.5 * onnx.numpy_helper.to_array(tensor), tensor.name))
    onnx.save(proto, folder / "retrained.onnx")
    names = ("image", *(node.output[0] for node in proto.graph.node))
    cache_of_scales(folder / "calib.cache", dict.fromkeys(names, 2**-5))
    onnx.save(exported(), folder / "decoder.onnx")
    weights = {"up": normal(576, 1024), "on": normal(1024, 512), "down": normal(512, 1), "rate": np.float32(16000)}
    save(build(VAD, weights), folder / "vad.onnx")


def code_of_notebook(path: Path) -> str:
    """All code cells of a notebook, in order."""
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def imported(code: str) -> set[str]:
    """Names of the top-level modules that code imports."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


@cache
def installed_with_the_package() -> frozenset[str]:
    """Top-level modules that `pip install .` brings: of Python, of the package and of its dependencies."""
    names = {re.split(r"[<>=;\[ ]", line)[0].lower().replace("_", "-") for line in PROJECT["dependencies"]}
    found = packages_distributions().items()
    modules = {module for module, holders in found if names & {name.lower().replace("_", "-") for name in holders}}
    return frozenset({"qdqtune", *sys.stdlib_module_names, *modules})


def options_of_commands() -> Iterator[str]:
    """Every option of every command, those of the other tool's interface with underscores as well."""
    guests = autotune.command.params
    ours = (option for later in main.app.commands.values() for option in later.command.params)
    for option in (*ours, *guests):
        yield from (*option.opts, *option.secondary_opts)
    yield from ("--" + name[2:].replace("-", "_") for option in guests for name in option.opts)
