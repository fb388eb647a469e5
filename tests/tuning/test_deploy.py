"""The folder `deploy`: settings that hold what the engine does, and scripts that run without the package."""

import ast
import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from conftest import Call
from qdqtune.engines import EngineSpec
from qdqtune.engines.library_settings import library_settings, script_of
from qdqtune.errors import BadOption
from qdqtune.tuning.deploy import read_settings
from runs import mixed, write
from tensorrt_fakes import install
from trtexec_stand_in import stand_in


def told(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "deploy" / "settings.json").read_text())


def test_the_settings_hold_what_was_proven(tuned: Path) -> None:
    folder = tuned.parent / "out"
    settings, summary = read_settings(folder), json.loads((folder / "summary.json").read_text())
    assert (settings.shipped, settings.proven.ratio) == ("tuned", summary["ratio"])
    assert settings.engine == summary["engine"]
    assert settings.inputs == {"x": ("float32", (8, 8, 64))}
    for name in ("optimized_final.onnx", "baseline.onnx"):
        assert settings.sha256[name] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert settings.told.startswith("optimized_final.onnx: proven ")


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "tensorrt", "trtexec"])
def test_scripts_need_the_vendor_and_numpy_only(engine: str) -> None:
    tree = ast.parse(script_of(EngineSpec(engine)))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {"onnxruntime", "openvino", "numpy", "cuda"}
    assert {name.partition(".")[0] for name in names} <= own | sys.stdlib_module_names


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_the_script_runs_what_a_real_engine_has_proven(engine: str, call: Call, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    model, out = write(mixed(), tmp_path), tmp_path / "out"
    data = ("--calibration-data", model.with_suffix(".npz"), "-o", out, "--no-report")
    code, _, err = call("tune", model, "--engine", engine, "--builds", 2, "--threads", 1, *data)
    assert code in (0, 3), err

    def said(folder: Path, argument: str = "3") -> list[str]:
        command = [sys.executable, "-I", str(folder / "run.py"), argument]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return (done.stdout + done.stderr).splitlines()

    alone = tmp_path / "alone"
    alone.mkdir()
    for part, line in (
        ("deploy/run.py", "settings.json is missing: copy it"),
        ("deploy/settings.json", "optimized_final.onnx is missing: copy it"),
        ("optimized_final.onnx", told(out)["told"]),
    ):
        shutil.copy(out / part, alone)
        assert said(alone)[0].startswith(line)
    assert said(out / "deploy")[-1].startswith("median of 3 runs: ")
    assert said(out / "deploy", "--help")[0].startswith("usage: run.py ")


def test_damaged_and_missing_settings_are_refused(tuned: Path, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="is not there: name the output folder"):
        read_settings(tmp_path)
    (tmp_path / "deploy").mkdir()
    known = told(tuned.parent / "out")
    for damaged in ({}, known | {"proven": known["proven"] | {"ratio": -1.0}}, known | {"inputs": {"x": 3}}):
        (tmp_path / "deploy" / "settings.json").write_text(json.dumps(damaged))
        with pytest.raises(BadOption, match="is not what a run has written"):
            read_settings(tmp_path)
    (tmp_path / "deploy" / "settings.json").write_text(json.dumps(known | {"format": 9}))
    with pytest.raises(BadOption, match="has format 9, not 1"):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    ("version", "build", "run"),
    [
        ("8.6.1", ["--fp16", "--int8"], ["--useCudaGraph", "--useSpinWait", "--noDataTransfers"]),
        ("10.16", ["--stronglyTyped"], ["--useCudaGraph", "--useSpinWait", "--noDataTransfers"]),
        ("11.4", [], []),
    ],
)
def test_trtexec_gets_flags_that_its_version_knows(version: str, build: list[str], run: list[str]) -> None:
    described = {"version": version, "typing": "weak" if version < "9" and "." in version[:2] else "strong"}
    unset = EngineSpec("tensorrt", {"builder_level": None, "workspace_mb": None})
    assert library_settings(unset, described, {}).keys() == {"module", "plugin_libraries", "min", "opt", "max"}
    options = {"builder_level": 4, "plugin_libraries": "my.so"}
    found = library_settings(EngineSpec("trtexec", options), described, {"x": (1, 3)})
    flags = [*(f"--{which}Shapes=x:1x3" for which in ("min", "opt", "max")), "--builderOptimizationLevel=4"]
    plugins = ["--staticPlugins=my.so"]
    assert (found["build"], found["run"]) == ([*plugins, *build, *flags], [*plugins, "--shapes=x:1x3", *run])


def with_kit(folder: Path, tuned: Path, engine: str, described: dict[str, str], **options: Any) -> Path:
    """The files of a run with the script and settings of another engine."""
    shutil.copytree(tuned.parent / "out", folder)
    spec, settings = EngineSpec(engine, options), read_settings(folder)
    renewed = msgspec.structs.replace(settings, library=library_settings(spec, described, {}))
    (folder / "deploy" / "settings.json").write_bytes(msgspec.json.encode(renewed))
    (folder / "deploy" / "run.py").write_text(script_of(spec))
    return folder / "deploy" / "run.py"


@pytest.mark.parametrize("version", ["8.6.1", "10.16.1", "11.4.0"])
def test_the_script_of_tensorrt_fits_each_version(version, tuned, tmp_path, monkeypatch, capsys):
    trt, _ = install(monkeypatch, version)
    more = {"workspace_mb": 3, "builder_level": 5, "plugin_libraries": [str(tmp_path / "my.so")]}
    script = with_kit(tmp_path / "out", tuned, "tensorrt", {"version": version}, **more)
    monkeypatch.setattr(sys, "argv", ["run.py", "2"])
    with monkeypatch.context() as damaged:
        damaged.setattr("importlib.import_module", Mock(side_effect=ImportError("libnvinfer.so: cannot open")))
        with pytest.raises(ImportError, match=r"libnvinfer\.so: cannot open"):
            runpy.run_path(str(script), run_name="__main__")
    runpy.run_path(str(script), run_name="__main__")
    assert f"ms, TensorRT {version}" in capsys.readouterr().out
    assert (trt.seen.config._limits, trt.seen.config.builder_optimization_level) == ({"WORKSPACE": 3 << 20}, 5)


def test_the_script_of_trtexec_calls_it(tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, "10.16")
    script = with_kit(tmp_path / "out", tuned, "trtexec", {"version": "10.16", "typing": "strong"})
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, str(script), "2"], env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "GPU Compute Time" in done.stdout
    assert not (script.parent / "model.plan").exists()
