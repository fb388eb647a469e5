"""`python -m qdqtune.autotune` with the flags that ModelOpt's documentation shows."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qdqtune
from conftest import Call
from models import build, normal
from qdqtune.autotune import __main__ as autotune
from qdqtune.autotune import region_inspect
from qdqtune.autotune.__main__ import apply_mode_presets, get_parser
from qdqtune.autotune.workflows import AutotuneOptions
from qdqtune.cli import tune
from qdqtune.placement.files import read_placement_file
from qdqtune.tuning.settings import EFFORTS, Settings, builds_for
from runs import cost, environment, hopeless, mixed, write


@pytest.fixture
def run(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Run the command on the fake engine: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments, engine=("--engine", "fake"): call("autotune", *arguments, *engine)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `qdqtune tune` is asked for, instead of a run."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(tune, "run", lambda options: calls.append(vars(options)) or 0)
    return calls


def test_a_run_writes_the_files_that_users_know_and_its_pattern_cache_warms_the_next(run: Call, model: Path) -> None:
    code, output, errors = run("--onnx_path", model, "--mode", "quick", "-v")
    assert code == 0
    assert errors.splitlines()[0] == "engine: fake (as you asked)"
    assert "autotuner_output/optimized_final.onnx is the tuned model" in output
    out = Path("autotuner_output")
    names = {"autotuner_state.yaml", "autotuner_state_pattern_cache.yaml", "baseline.onnx", "optimized_final.onnx"}
    assert names | {"logs", "region_models"} <= {p.name for p in out.iterdir()}
    logs = {p.name for p in (out / "logs").iterdir()}
    assert {"baseline.log", "final.log"} <= logs
    discovery = [name for name in logs if re.fullmatch(r"region_\d+_scheme_\d+\.log", name)]
    assert discovery
    assert all("building" in (out / "logs" / name).read_text() for name in discovery)
    shipped = read_placement_file(out / "placement.yaml").placement
    assert f"{shipped.digest}.onnx" in (out / "logs" / "final.log").read_text()
    assert cost(out / "optimized_final.onnx") < cost(model)
    assert re.search(r"^patterns: \d+, in \d+ regions$", errors, re.MULTILINE)
    assert re.search(r"^Baseline: [\d.]+ ms\nFinal: [\d.]+ ms \([\d.]+x speedup\)$", output, re.MULTILINE)
    assert re.search(r"^Results: [\d.]+ ms -> [\d.]+ ms \([\d.]+x speedup\)$", output, re.MULTILINE)
    cache = out / "autotuner_state_pattern_cache.yaml"
    _, _, errors = run("-m", model, "-o", "run2", "--mode", "quick", "--pattern_cache", cache, "-v")
    assert re.search(r"^ +1 .* pattern cache: .*faster than the float model", errors, re.MULTILINE)


def test_no_improvement_is_no_error(run: Call, tmp_path: Path) -> None:
    path = write(hopeless(), tmp_path)
    code, output, _ = run("--model", path, "--output", "out")
    assert code == 0
    assert "Nothing faster was found" in output
    assert Path("out/logs/final.log").read_text() == Path("out/logs/baseline.log").read_text()


@pytest.mark.parametrize("dashed", [False, True])
def test_every_flag(run: Call, asked: list[dict[str, Any]], model: Path, dashed: bool) -> None:
    flags = (
        "--onnx_path", model, "--output_dir", "results", "--mode=extensive", "--schemes_per_region", 30,
        "--pattern_cache", "cache.yaml", "--qdq_baseline", "quantized.onnx", "--state_file", "state.yaml",
        "--quant_type", "fp8", "--default_dq_dtype", "bfloat16", "--timing_cache", "times",
        "--warmup_runs", 50, "--timing_runs", 100, "--plugin_libraries", "a.so", "b.so", "--verbose",
        "--trtexec_benchmark_args", "--fp16 --workspace=4096", "--use_trtexec", "--node_filter_list", "names.txt",
    )  # fmt: skip
    Path("names.txt").write_text("# the second product\nsecond*\n")
    assert autotune.get_node_filter_list("names.txt") == ["second*"]
    assert autotune.get_node_filter_list(None) is None
    spelled = (f.replace("_", "-") if dashed and isinstance(f, str) and f.startswith("--") else f for f in flags)
    code, _, errors = run(*spelled, engine=())
    assert code == 0, errors
    (given,) = asked
    assert errors.splitlines()[0] == "engine: trtexec (as you asked)"
    own = {"timing_cache": "times", "plugin_libraries": ["a.so", "b.so"], "trtexec_args": "--fp16 --workspace=4096"}
    assert given.items() >= {
        "model": model, "output_dir": Path("results"), "mode": "region", "effort": "extensive",
        "builds": None,  # so that there are enough
        "schemes_per_region": 30, "warmup_runs": 50, "timing_runs": 100, "quant_type": "fp8",
        "default_dq_dtype": "bfloat16", "pattern_cache": Path("cache.yaml"), "qdq_baseline": Path("quantized.onnx"),
        "state_file": Path("state.yaml"), "node_filter": ("second*",), "engine": "trtexec", "engine_options": own,
    }.items()  # fmt: skip


def test_short_flags_those_of_subgraph_mode_and_defaults(run: Call, asked: list[dict[str, Any]], model: Path) -> None:
    run("-m", model, "-o", "out", "-s", 7, "-v", "--calibration_data", "x.npz", "--threads=2")
    subgraph = ("--mode", "subgraph", "--mode", "quick", "--graph-json", "g.json")
    run("--model", model, "--output", "out", "--timing-runs", 20, *subgraph)
    run("--onnx_path", model, "--no-incremental-validation")
    first, second, default = asked
    assert (first["schemes_per_region"], first["calibration_data"]) == (7, "x.npz")
    assert (second["mode"], second["effort"], second["builds"]) == ("subgraph", "quick", None)
    assert (second["graph_json"], second["incremental_validation"]) == (Path("g.json"), True)
    assert (default["output_dir"], default["incremental_validation"]) == (Path("autotuner_output"), False)
    assert (default["mode"], default["effort"], default["builds"]) == ("region", "default", None)
    assert (default["quant_type"], default["default_dq_dtype"]) == ("int8", "float32")


def test_what_the_engine_cannot_take_is_said(run: Call, asked: list[dict[str, Any]], model: Path) -> None:
    flags = "--fp16 --optShapes=x:8x8x64 --minShapes=x:1x8x64"
    _, _, errors = run("-m", model, "--trtexec_args", flags, "--plugins", "a.so")
    (given,) = asked
    assert given["input_shapes"] == {"x": (8, 8, 64)}
    assert errors.count("note: ") == 2
    assert "fake takes no arguments of trtexec" in errors
    assert "fake loads no TensorRT plug-ins" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing option"),
        (("-m", "missing.onnx"), "missing.onnx"),
        (("-m", "model.onnx", "--mode", "thorough"), "'thorough' is not one of"),
        (("-m", "model.onnx", "--no_such_flag"), "No such option"),
        (("-m", "model.onnx", "--pattern_cache", "none.yaml"), "cannot read pattern cache none.yaml"),
        (("-m", "model.onnx", "--node_filter_list", "none.txt"), "--node-filter-list: cannot read none.txt"),
        (("-m", "model.onnx", "--graph_json", "g.json"), "--graph-json is for --mode subgraph"),
        (("-m", "model.onnx", "--mode=subgraph", "--pattern_cache", "c.yaml"), "--pattern-cache is for --mode region"),
    ],
)
def test_bad_input_is_one_line(run: Call, model: Path, arguments: Sequence[str], words: str) -> None:
    code, _, errors = run(*arguments)
    assert code == 2
    assert words in errors.splitlines()[-1]


def test_regions_can_be_looked_at(model, capfd, monkeypatch):
    more = ["--verbose", "--max-sequence-size", "20", "--include-all-regions"]
    assert region_inspect.main(["--model", str(model), *more]) == 0
    text = capfd.readouterr().out
    assert "Phase 1 complete:" in text
    assert "Summary:" in text
    assert "  - softmax" in text
    assert region_inspect.main(["--model", str(model)]) == 0
    assert "├─ Region " in capfd.readouterr().out
    assert region_inspect.main(["--model", "missing.onnx"]) == 1
    assert capfd.readouterr().err.startswith("error: cannot read the model missing.onnx")

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(region_inspect, "inspect", interrupted)
    assert region_inspect.main(["--model", str(model)]) == 1
    assert capfd.readouterr().err == "interrupted\n"


def test_patterns_that_are_shown_are_those_that_a_run_tunes(run, tmp_path, capfd):
    text = """net (float[2,8,4,4] x) => (float[2,8,4,4] y) {
        [conv] c = Conv(x, w)
        [norm] n = BatchNormalization(c, scale, shift, mean, variance)
        [relu] r = Relu(n)
        [second] d = Conv(r, w)
        [last] y = BatchNormalization(d, scale, shift, mean, variance)
    }"""
    ones = {name: np.full(8, value, np.float32) for name, value in
            (("scale", 2), ("shift", 1), ("mean", 0.5), ("variance", 1.5))}  # fmt: skip
    path = write(build(text, {"w": normal(8, 8, 1, 1)} | ones), tmp_path)
    code, _, progress = run("-m", path, "-o", "out", "-s", 2, "--no-cut-seed", "--builds", 40, "-v")
    tuned = set(re.findall(r"in pattern ([0-9a-f]{8})", progress))
    assert (code, bool(tuned)) == (0, True)

    assert region_inspect.main(["--model", str(path)]) == 0
    shown = capfd.readouterr().out
    assert set(re.findall(r"^  ([0-9a-f]{8})[0-9a-f]*  ", shown, re.MULTILINE)) == tuned
    assert {p["digest"][:8] for p in qdqtune.inspect(path).to_dict()["patterns"]} == tuned
    assert "BatchNormalization" not in shown
    tops = region_inspect.inspect_region_search(path)  # of the graph that functions of scripts tune: that of the file
    assert sum(len(top.get_region_nodes_and_descendants()) for top in tops) == 5
    assert "BatchNormalization" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("qdqtune.autotune --engine fake --dry-run", "builds: up to"),
        ("qdqtune.autotune.region_search", "├─ Region "),
    ],
)
def test_as_programs(model: Path, tmp_path: Path, program: str, words: str) -> None:
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", *program.split(), "--model", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


def test_only_tensorrt_cares_what_lies_where_its_timing_cache_goes(run, model, tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "TIMING_CACHE", str(tmp_path / "trtexec_timing.cache"))
    (tmp_path / "trtexec_timing.cache").write_text("notes of somebody else")
    assert run("-m", model, "--dry-run")[0] == 0


def test_tensorrt_has_a_timing_cache_where_modelopt_has_it(run: Call, asked: list[dict[str, Any]], model: Path) -> None:
    run("-m", model, "--use-trtexec", engine=())
    run("-m", model, "--use-trtexec", "--timing-cache", "own.cache", engine=())
    assert [given["engine_options"]["timing_cache"] for given in asked] == [autotune.TIMING_CACHE, "own.cache"]
    assert get_parser().parse_args(["-m", "model.onnx"]).timing_cache == autotune.TIMING_CACHE


def test_a_dry_run_checks_the_files_that_it_is_given(run: Call, model: Path) -> None:
    Path("given.yaml").write_text("baseline_latency_ms: 3.0\n")
    code, _, errors = run("-m", model, "--state_file", "given.yaml", "--dry-run")
    assert code == 2
    assert "is a state file of ModelOpt's autotuner" in errors.splitlines()[-1]


def test_presets_fill_what_was_not_given() -> None:
    args = get_parser().parse_args(["--onnx_path", "m.onnx", "--mode", "quick", "-s", "7", "--plugins", "a", "b"])
    apply_mode_presets(args)
    assert (args.num_schemes, args.warmup_runs, args.timing_runs) == (7, 10, 50)
    assert (args.plugin_libraries, args.output_dir) == (["a", "b"], "./autotuner_output")


def test_ctrl_c_while_it_is_imported_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)")
    command = [sys.executable, "-m", "qdqtune.autotune", "-m", "model.onnx"]
    path = {**environment(), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=path, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "")


OPTIONS: dict[str, tuple[object, Callable[[Settings], object], object]] = {
    "cut_seed": (False, lambda s: s.cut_seed, False),
    "incremental_validation": (False, lambda s: s.incremental_validation, False),
    "regions": ("topology", lambda s: s.regions, "topology"),
    "default_dq_dtype": ("float16", lambda s: s.default_dq_dtype, "float16"),
    "qdq_baseline": ("q.onnx", lambda s: s.qdq_baseline, Path("q.onnx")),
    "state_file": ("s.yaml", lambda s: s.state, Path("s.yaml")),
    "pattern_cache": ("c.yaml", lambda s: s.pattern_cache, Path("c.yaml")),
    "schemes_per_region": (9, lambda s: s.config.schemes_per_region, 9),
    "timing_runs": (50, lambda s: s.plan.looks, (12, 20, 25)),  # a round runs each model twice
    "warmup_runs": (0, lambda s: s.plan.warmup, 0),
    "node_filter": (["b?"], lambda s: s.node_filter, ("b?",)),
}
"""Option to a value, what to look at in the settings, and what is expected there."""


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_its_own_reaches_its_setting(option: str) -> None:
    value, look, expected = OPTIONS[option]

    def settings(**more: Any) -> Settings:
        return AutotuneOptions(model="m.onnx", engine="fake", builds=30, **more).settings()

    assert look(settings()) != expected
    assert look(settings(**{option: value})) == expected


def test_schemes_that_are_asked_for_have_as_many_builds_as_they_take(tmp_path: Path) -> None:
    path = write(mixed(), tmp_path)

    def builds(**more: Any) -> int:
        return AutotuneOptions(model=path, engine="fake", **more).settings().builds

    assert builds(schemes_per_region=30) == builds_for(30, 4)
    assert builds(schemes_per_region=30, builds=20) == 20
    assert builds(schemes_per_region=1) == builds() == EFFORTS["default"].builds["region"]
