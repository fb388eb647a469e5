"""The command line as a user meets it: options, exit codes, one line for every bad input, and what goes where."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import onnx
import pytest
from click import Command, Group
from click.shell_completion import ShellComplete

from conftest import Call
from models import conv_net
from qdqtune.calibration.scales import Calibration
from qdqtune.calibration.workloads import WorkloadFile
from qdqtune.cli import main, models, streams, tune
from qdqtune.cli.children import DRIVER
from qdqtune.commands.apply import Applied, ApplyOptions
from qdqtune.commands.inspect import Inspection
from qdqtune.engines import EngineSpec, runner
from qdqtune.errors import BadModel
from qdqtune.graph.saving import save
from qdqtune.tuning.settings import EFFORTS, Settings, builds_for
from qdqtune.tuning.subject import tuned_patterns
from qdqtune.types import Edge, Placement
from runs import environment, hopeless, mixed, room_for, write
from workers import in_process

COMMANDS: dict[str, Command] = {name: later.command for name, later in main.app.commands.items()}
QUICK = ("--engine", "fake", "--builds", "7")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and in `out` beside it what a tuning run on the fake engine has written."""
    path = write(mixed(), tmp_path_factory.mktemp("tuned"))
    arguments = ["tune", str(path), *QUICK, "--calibration-data", str(path.with_suffix(".npz"))]
    with in_process(), pytest.raises(SystemExit) as end:
        main.main([*arguments, "-o", str(path.parent / "out")])
    assert end.value.code == 0
    return path


# Options


def settings_of(monkeypatch: pytest.MonkeyPatch, call: Call, *arguments: object) -> Settings:
    """What `tune` is called with."""
    given: list[Settings] = []

    def caught(settings: Settings, observer: object) -> NoReturn:
        given.append(settings)
        raise BadModel("caught")

    monkeypatch.setattr(tune, "tune", caught)
    monkeypatch.setenv(DRIVER, "1")  # with --ray, too, it runs in this process
    assert call("tune", *arguments) == (2, "", "error: caught\n")
    return given[0]


TUNE: dict[str, tuple[Sequence[str], Callable[[Settings], object], object]] = {
    "--output-dir": (["x/y"], lambda s: s.output_dir, Path("x/y")),
    "--mode": (["region"], lambda s: s.mode, "region"),
    "--no-cut-seed": ([], lambda s: s.cut_seed, False),
    "--quant-type": (["fp8"], lambda s: s.quant_type, "fp8"),
    "--precision": (["fp16"], lambda s: s.precision, "fp16"),
    "--engine": (["fake"], lambda s: s.engine, EngineSpec("fake")),
    "--threads": (["3", "--deploy-threads", "1"], lambda s: s.engine.options.get("threads"), 3),
    "--deploy-threads": (["1"], lambda s: s.deploy_threads, (1,)),
    "--workers": (["3"], lambda s: s.workers, 3),
    "--ray": (["auto"], lambda s: s.ray, "auto"),
    "--cores-per-worker": (["2"], lambda s: s.cores_per_worker, 2),
    "--provider": (["CUDA"], lambda s: s.engine.options.get("provider"), "CUDA"),
    "--target": (["sm89"], lambda s: s.engine.options.get("target"), "sm89"),
    "--min-shapes": (["a:1x2"], lambda s: s.engine.options.get("min_shapes"), {"a": [1, 2]}),
    "--opt-shapes": (["a:1x2"], lambda s: s.engine.options.get("opt_shapes"), {"a": [1, 2]}),
    "--max-shapes": (["a:1x2"], lambda s: s.engine.options.get("max_shapes"), {"a": [1, 2]}),
    "--timing-cache": (["t.cache"], lambda s: s.engine.options.get("timing_cache"), "t.cache"),
    "--plugin-libraries": (["p.so"], lambda s: s.engine.options.get("plugin_libraries"), ["p.so"]),
    "--workspace-mb": (["64"], lambda s: s.engine.options.get("workspace_mb"), 64),
    "--builder-level": (["3"], lambda s: s.engine.options.get("builder_level"), 3),
    "--trtexec": (["/x/trtexec"], lambda s: s.engine.options.get("trtexec"), "/x/trtexec"),
    "--trtexec-args": (["--fp16 --best"], lambda s: s.engine.options.get("trtexec_args"), "--fp16 --best"),
    "--engine-option": (["noise=0.5"], lambda s: s.engine.options.get("noise"), 0.5),
    "--time-limit": (["90s"], lambda s: s.time_limit, 90),
    "--calibration-data": (["a:b"], lambda s: s.calibration_data, "a:b"),
    "--calibration-samples": (["7"], lambda s: s.calibration_samples, 7),
    "--input-shape": (["a:b:1x3x224"], lambda s: s.input_shapes, {"a:b": (1, 3, 224)}),
    "--seed": (["5"], lambda s: s.seed, 5),
    "--calibration-method": (["percentile"], lambda s: s.calibration, Calibration("percentile", 99.99, True, True)),
    "--no-bias-correction": ([], lambda s: s.calibration.bias_correction, False),
    "--no-equalize": ([], lambda s: s.calibration.equalization, False),
    "--percentile": (["99.5"], lambda s: s.calibration.percentile, 99.5),
    "--rewrites": (["off"], lambda s: s.rewrites, "off"),
    "--formats": (["int8,w4"], lambda s: s.formats, ("int8", "w4")),
    "--weight-rounding": (["gptq", "--calibration-data", "d.npz"], lambda s: s.weight_rounding, "gptq"),
    "--calibration-cache": (["c.cache"], lambda s: s.calibration_cache, Path("c.cache")),
    "--fix-input": (["sr=16000"], lambda s: s.fix_inputs, {"sr": 16000}),
    "--effort": (["extensive"], lambda s: (s.builds, s.plan.looks, s.config.schemes_per_region, s.proof),
                 (EFFORTS["extensive"].builds["cut"], EFFORTS["extensive"].looks, 200, EFFORTS["extensive"].proof)),
    "--builds": (["33"], lambda s: s.builds, 33),
    "--schemes-per-region": (["9"], lambda s: s.config.schemes_per_region, 9),
    "--time-budget": (["1.5h"], lambda s: s.time_budget, 5400),
    "--timing-runs": (["25"], lambda s: s.plan.looks, (12, 20, 25)),
    "--warmup-runs": (["0"], lambda s: s.plan.warmup, 0),
    "--regions": (["topology"], lambda s: s.regions, "topology"),
    "--node-filter-list": (["names.txt"], lambda s: s.node_filter, ("/a/*", "b?")),
    "--default-dq-dtype": (["float16"], lambda s: s.default_dq_dtype, "float16"),
    "--qdq-baseline": (["q.onnx"], lambda s: s.qdq_baseline, Path("q.onnx")),
    "--from-qdq": ([], lambda s: s.from_qdq, True),
    "--pattern-cache": (["c.yaml", "--mode", "region"], lambda s: s.pattern_cache, Path("c.yaml")),
    "--price-cache": (["p.json"], lambda s: s.price_cache, Path("p.json")),
    "--state-file": (["s.yaml"], lambda s: s.state, Path("s.yaml")),
    "--min-sqnr": (["20.5"], lambda s: s.min_sqnr, 20.5),
    "--min-agreement": (["none"], lambda s: s.min_agreement, None),
    "--front": ([], lambda s: (s.front, s.builds), (True, 25)),
    "--evaluate": (["metric:score"], lambda s: s.evaluate, "metric:score"),
    "--max-drop": (["0.5", "--evaluate", "metric:score"], lambda s: s.max_drop, 0.5),
    "--graph-json": (["g.json", "--mode", "subgraph"], lambda s: s.graph_json, Path("g.json")),
    "--no-incremental-validation": ([], lambda s: s.incremental_validation, False),
    "--restart": ([], lambda s: s.restart, True),
    "--workload": (["a.b/decode.npz:0.8"], lambda s: s.workloads, (WorkloadFile(Path("a.b/decode.npz"), 0.8),)),
}  # fmt: skip
"""Option to values, what to look at in the settings, and what is expected there."""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], Path("/caches/qdqtune/prices.json")),
        (["--price-cache", "none"], None),
        (["--timing-cache", "gpu/t.cache"], Path("gpu/t.prices.json")),
    ],
)
def test_prices_go_beside_the_timing_cache_or_to_the_users_caches(given, expected, monkeypatch, call):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert settings_of(monkeypatch, call, "m.onnx", *given).price_cache == expected


SHOWN = {"--dry-run", "--report", "--pick", "--json"}
"""Options of `tune` that change what is shown. Other tests see to them."""


@pytest.mark.parametrize("spelling", ["-", "_"])
@pytest.mark.parametrize("option", TUNE)
def test_every_option_of_tune_reaches_its_setting(option, spelling, monkeypatch, call, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("names.txt").write_text("# encoder only\n/a/*\n\n  b?\n")
    values, look, expected = TUNE[option]
    written = "--" + option[2:].replace("-", spelling)
    assert look(Settings(Path("m"))) != expected
    assert look(settings_of(monkeypatch, call, "m.onnx", written, *values)) == expected


@pytest.mark.parametrize("engine", ["tensorrt", "trtexec"])
def test_a_timing_cache_lies_beside_the_output_unless_named(engine, monkeypatch, call, tmp_path):
    monkeypatch.chdir(tmp_path)
    beside = settings_of(monkeypatch, call, "m.onnx", "--engine", engine, "-o", "out").engine
    assert beside.options == {"timing_cache": str(tmp_path / "out" / "timing.cache")}
    named = settings_of(
        monkeypatch, call, "m.onnx", "--engine", engine, "--timing-cache", "t", "--input-shape", "x:1x2"
    )
    assert named.engine.options == {"timing_cache": "t", "opt_shapes": {"x": [1, 2]}}


def test_no_option_of_tune_is_left_out():
    names = {next(o for o in p.opts if o.startswith("--")) for p in COMMANDS["tune"].params if p.opts[0] != "model"}
    assert names == {name.replace("--no-", "--") for name in TUNE} | SHOWN


def test_every_field_of_the_settings_has_an_option(monkeypatch, call, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("names.txt").write_text("/a/*\n")
    usual = settings_of(monkeypatch, call, "m.onnx")
    reached = set()
    for option, (values, _, _) in TUNE.items():
        given = settings_of(monkeypatch, call, "m.onnx", option, *values)
        reached |= {name for name, value in vars(given).items() if value != getattr(usual, name)}
    assert reached == {field.name for field in fields(Settings)} - {"model", "accuracy_samples"}


def test_defaults_are_those_of_settings(monkeypatch, call):
    given = settings_of(monkeypatch, call, "m.onnx", "--price-cache", "none")
    assert given == Settings(Path("m.onnx"), engine=EngineSpec("onnxruntime", {"threads": 1}))


def test_a_search_runs_at_the_largest_number_of_threads_that_is_deployed(monkeypatch, call):
    monkeypatch.setattr("qdqtune.tuning.contexts.usable_cores", lambda: 16)
    for asked, counts in (((), (16, 1, 4)), (("--threads", 4), (4, 1, 16))):
        given = settings_of(monkeypatch, call, "m.onnx", "--deploy-threads", "1,4,16", *asked)
        assert (given.engine.options["threads"], given.thread_counts) == (counts[0], counts)


def test_an_option_that_is_given_twice_is_told(call):
    typed = ("--min-sqnr", 20, "--min_sqnr", 30, "--fix-input", "a=1", "--fix-input", "b=1")
    said = [line for line in call("tune", "missing.onnx", *typed)[2].splitlines() if line.startswith("note: ")]
    assert said == ["note: --min-sqnr is given more than once: the last one counts"]


def test_explicit_options_win_over_the_preset(monkeypatch, call):
    given = settings_of(monkeypatch, call, "m.onnx", "--builds", 50, "--effort", "quick", "-s", 3, "--timing_runs", 12)
    assert (given.builds, given.config.schemes_per_region, given.plan.looks) == (50, 3, (12,))
    assert given.proof == EFFORTS["quick"].proof


def test_schemes_that_are_asked_for_have_as_many_builds_as_they_take(monkeypatch, call, tmp_path):
    path = tmp_path / "model.onnx"
    save(mixed(), path)

    def builds(*more):
        return settings_of(monkeypatch, call, path, "--mode", "region", *more).builds

    assert builds("-s", 30) == builds_for(30, len(tuned_patterns(path))) > 4 * 30
    assert builds("-s", 30, "--builds", 20) == 20
    assert builds("-s", 1) == builds() == EFFORTS["default"].builds["region"]


class Recorder:
    """Stands in for the runner and keeps what it was made with."""

    made: list[tuple[EngineSpec, float]]

    def __init__(self, spec: EngineSpec, *, time_limit_s: float, log_dir: Path) -> None:
        self.made.append((spec, time_limit_s))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def numeric_format(self, quant_type: str) -> str:
        return quant_type


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineSpec, float]]:
    """Engines and time limits of the runners that a command opens."""
    monkeypatch.setattr(runner, "Runner", Recorder)
    Recorder.made = []
    return Recorder.made


def test_options_of_compare_reach_the_measurement(monkeypatch, call, made, tmp_path):
    path = write(mixed(batch=None), tmp_path)
    given = SimpleNamespace()
    monkeypatch.setattr("qdqtune.commands.compare.compare_files", lambda *a, **k: given.__dict__.update(a=a, **k) or [])
    code, _, _ = call("compare", path, path, "--engine", "fake", "--engine_option", "noise=0.1", "--time-limit", "3m",
                      "--input-shape", "x:5x64x64", "--calibration_samples", 2, "--seed", 4,
                      "--timing_runs", 30, "--warmup-runs", 1, "--threads", 2, "--provider", "P")  # fmt: skip
    assert code == 0
    compared, _, samples, plan = given.a
    assert (compared, given.seed, plan.looks, plan.warmup) == ((path, path), 4, (30,), 1)
    assert [s["x"].shape for s in samples] == [(5, 64, 64)] * 2
    assert made == [(EngineSpec("fake", {"noise": 0.1, "provider": "P"}), 180)]
    code, _, _ = call("compare", path, path, "--calibration-data", path.with_suffix(".npz"), "--threads", 2, "--json")
    assert code == 0
    assert len(given.a[2]) == 3
    assert made[1] == (EngineSpec("onnxruntime", {"threads": 2}), 600)


def test_options_of_apply_reach_it(monkeypatch, call, made, tuned, tmp_path):
    given = SimpleNamespace()

    def caught(options: ApplyOptions, _: object) -> Applied:
        given.options = options
        return Applied(target, Placement(), (Edge("t", "n", 1),), random_data=False)

    monkeypatch.setattr(models, "apply", caught)
    target, placement = tmp_path / "made.onnx", tuned.parent / "out" / "placement.yaml"
    code, out, err = call("apply", tuned, "--placement", placement, "--output", target, "--engine", "onnxruntime",
                          "--calibration_data", "d.npz", "--calibration-samples", 2, "--input-shape", "x:1x2",
                          "--seed", 3, "--calibration-method", "percentile", "--percentile", 99,
                          "--precision", "fp16")  # fmt: skip
    assert code == 0
    assert given.options == ApplyOptions(
        tuned, output=target, precision="fp16", calibration_data="d.npz", calibration_samples=2,
        input_shapes={"x": (1, 2)}, seed=3, placement=placement, engine="onnxruntime", calibration_method="percentile",
        percentile=99,
    )  # fmt: skip
    assert out == f"{target}: 0 tensors with a Q/DQ pair\n"
    assert "note: 1 edges are not in this model, the first: t -> n[1]\n" in err
    call("apply", tuned, "--placement", placement)
    assert given.options == ApplyOptions(tuned, output=tuned.with_suffix(".qdq.onnx"), placement=placement)
    assert not made  # numbers are known without the engine


def test_options_of_inspect_reach_it(monkeypatch, call):
    given: dict[str, Any] = {}
    found = Inspection({}, ("shown",), ("named",))
    monkeypatch.setattr(models, "inspect", lambda options: given.update(vars(options)) or found)
    code, out, _ = call("inspect", "m.onnx", "--regions", "topology", "--max_sequence_size", 4,
                        "--include-all-regions", "--fix-input", "sr=1", "-v")  # fmt: skip
    assert (code, out) == (0, "named\n")
    assert given == {"model": Path("m.onnx"), "fix_inputs": {"sr": 1}, "regions": "topology", "max_sequence_size": 4,
                     "include_all_regions": True, "tree": False}  # fmt: skip


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_shows_every_option(command, call):
    code, out, err = call(*filter(None, [command]), "--help")
    assert (code, err) == (0, "")
    shown: Command | Group = COMMANDS[command] if command else main.app
    for option in shown.params:
        assert all(name in out for name in option.opts if name.startswith("-"))
    if command is None:
        assert all(f"  {name} " in out for name in COMMANDS)
    assert max(map(len, out.splitlines())) <= 110
    if command is not None:
        assert all(name in out for name in ("--json", "--quiet", "--verbose", "--help-all"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_a_page_of_80_columns_and_the_whole_explains_every_option(command, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(command, "--help")
    assert code == 0
    assert len(out.splitlines()) <= 60
    assert max(map(len, out.split("\nOutput:\n")[1].splitlines())) <= 80
    assert "<=x" not in out
    _, everything, _ = call(command, "--help-all")
    told = " ".join(everything.split())
    for option in COMMANDS[command].params:
        words = " ".join((getattr(option, "help", None) or "").split()[:4])
        assert words.partition("-")[0].partition("`")[0] in told


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_completion(shell, call, tmp_path):
    code, script, _ = call("completion", shell)
    assert code == 0
    assert "_QDQTUNE_COMPLETE" in script
    if shutil.which(shell):
        file = tmp_path / "script"
        file.write_text(script)
        subprocess.run([shell, "-n", str(file)], check=True)


def test_a_shell_that_asks_is_answered(monkeypatch, call):
    for name, value in {"COMP_WORDS": "qdqtune tune --incr", "COMP_CWORD": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_QDQTUNE_COMPLETE", "bash_complete")
    assert call() == (0, "plain,--incremental-validation\n", "")


def test_quiet_is_for_every_command(call, model):
    code, _, err = call(
        "compare", model, model, "--engine", "fake", "-q", "--calibration-data", model.with_suffix(".npz")
    )
    assert (code, err) == (0, "")


@pytest.mark.parametrize("width", [40, 60, 95, 300])
def test_the_summary_of_a_command_is_the_beginning_of_its_help(width):
    for name, later in main.app.commands.items():
        assert later.get_short_help_str(width) == COMMANDS[name].get_short_help_str(width)
        assert later.name == COMMANDS[name].name


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["tuen"]])
def test_what_runs_no_command_imports_none(arguments):
    code = f"""
import sys
from qdqtune.cli import main
try:
    main.main({arguments})
finally:
    print(*sys.modules, file=sys.stderr)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment())
    loaded = set(done.stderr.split())
    assert "qdqtune.cli.main" in loaded
    assert not loaded & {"numpy", "onnx", "scipy", "onnxruntime", "qdqtune.options", "qdqtune.engines"}


def test_a_shell_completes_the_options_of_a_command():
    completing = ShellComplete(main.app, {}, "qdqtune", "_QDQTUNE_COMPLETE")
    assert [item.value for item in completing.get_completions(["tune"], "--incr")] == ["--incremental-validation"]
    assert {item.value for item in completing.get_completions([], "")} == COMMANDS.keys()


def test_version_and_bare_call(call):
    code, out, err = call("--version")
    assert (code, err) == (0, "")
    assert out.startswith("qdqtune, version ")
    code, out, err = call()
    assert code == 2
    assert "Usage:" in out + err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument 'MODEL'"),
        (["m", "--nonsense"], "No such option '--nonsense'"),
        (["m", "--effort", "huge"], "'huge' is not one of"),
        (["m", "--timing-runs", "3"], "3 is not in the range"),
        (["m", "--time-budget", "3 days"], "'3 days' is no duration"),
        (["m", "--time-budget", "0s"], "'0s' is no duration"),
        (["m", "--time-limit", "9999999h"], "'9999999h' is longer than a year"),
        (["m", "--percentile", "nan"], "'nan' is no finite number"),
        (["m", "--min-sqnr", "inf"], "'inf' is no finite number"),
        (["m", "--evaluate", "a:b", "--max-drop", "nan"], "'nan' is no finite number"),
        (["m", "--threads", "9999999999999999"], "9999999999999999 is not in the range"),
        (["m", "--input-shape", "1x3"], "'1x3' is no shape"),
        (["m", "--fix-input", "sr"], "'sr' fixes nothing"),
        (["m", "--engine-option", "noise"], "'noise' sets nothing"),
        (["m", "--builds", "1"], "--builds 1 leaves no candidate"),
        (["m", "--mode", "region", "--builds", "3"], "--builds 3 leaves no candidate"),
        (["m", "--node-filter-list", "gone.txt"], "'--node-filter-list': cannot read gone.txt: No such file"),
        (["m", "--from-qdq", "--qdq-baseline", "q"], "exclude each other"),
        (["m", "--pattern-cache", "c.yaml"], "--pattern-cache is for --mode region"),
        (["m", "--graph-json", "g.json"], "--graph-json is for --mode subgraph"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(arguments, words, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("tune", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_does_not_exist(call):
    assert call("tuen") == (2, "", call("tuen")[2])
    assert re.fullmatch(r"error: No such command 'tuen'.* \(see qdqtune --help\)\n", call("tuen")[2])


# Bad input


def errors(found: tuple[int, str, str]) -> tuple[int, str]:
    """Code and error of a run that failed: nothing on standard output, and one line at the end of standard error."""
    code, out, err = found
    assert out == ""
    *before, last = err.splitlines()
    assert last.startswith("error: ")
    assert not any(line.startswith(("error", "Traceback", " ")) for line in before)
    return code, last.removeprefix("error: ")


def damage_model(kind: str, path: Path) -> None:
    """Turn a good model file into a bad one."""
    content, proto = path.read_bytes(), onnx.load(path)
    match kind:
        case "missing":
            path.unlink()
        case "folder":
            path.unlink()
            path.mkdir()
        case "empty":
            path.write_bytes(b"")
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case "text":
            path.write_text("no model\n" * 50)
        case "invalid":
            proto.graph.node[0].input[0] = "nowhere"
            onnx.save(proto, path)
        case "external":
            onnx.save(proto, path, save_as_external_data=True, size_threshold=0, location="weights.bin")
            (path.parent / "weights.bin").unlink()
        case "short external":
            onnx.save(proto, path, save_as_external_data=True, size_threshold=0, location="weights.bin")
            (path.parent / "weights.bin").write_bytes(b"1234")
        case _:
            raise AssertionError(kind)


BAD_MODELS = {
    "missing": "cannot read the model: No such file or directory",
    "folder": "is a folder: name an ONNX file",
    "empty": "not an ONNX file",
    "truncated": "not an ONNX file",
    "text": "not an ONNX file",
    "invalid": "nowhere",
    "external": "weights.bin",
    "short external": "weights.bin",
}


@pytest.mark.parametrize("kind", BAD_MODELS)
@pytest.mark.parametrize("command", ["tune", "compare", "apply", "inspect"])
def test_bad_models(kind, command, call, model, tuned, tmp_path):
    damage_model(kind, model)
    more = {"tune": [*QUICK, "-o", tmp_path / "out"], "compare": [tuned, "--engine", "fake"], "inspect": [],
            "apply": ["--placement", tuned.parent / "out" / "placement.yaml"]}  # fmt: skip
    code, error = errors(call(command, model, *more[command]))
    assert code == 2
    assert str(model) in error
    assert ("holds no .onnx file" if (kind, command) == ("folder", "tune") else BAD_MODELS[kind]) in error


def test_compare_refuses_a_bad_file_in_second_place(call, tuned, model):
    damage_model("truncated", model)
    code, error = errors(call("compare", tuned, model, "--engine", "fake"))
    assert code == 2
    assert str(model) in error
    assert errors(call("compare", tuned))[0] == 2
    code, error = errors(call("compare", tuned, write(hopeless(), model.parent, "other"), "--engine", "fake"))
    assert code == 2
    assert "takes other inputs (x: float32[2,8]) than" in error


BAD_DATA: dict[str, tuple[Callable[[np.ndarray], dict[str, np.ndarray]], str]] = {
    "wrong name": (lambda x: {"y": x}, "has no array 'x'"),
    "one too many": (lambda x: {"x": x, "z": x}, "'z' that is no input"),
    "wrong shape": (lambda x: {"x": x[..., :5]}, "has shape (3, 8, 8, 5), the model wants x: float32[8,8,64]"),
    "wrong dtype": (lambda x: {"x": x.astype(np.float64)}, "is float64, the model wants float32"),
    "NaN in the last sample": (lambda x: {"x": np.concatenate([x, np.full_like(x, np.nan)])}, "holds NaN"),
    "no sample": (lambda x: {"x": x[:0]}, "holds no sample"),
}


# `compare` reads the first samples only
@pytest.mark.parametrize(
    ("command", "kind"),
    [(c, k) for c in ("tune", "compare", "apply") for k in BAD_DATA if c != "compare" or not k.startswith("NaN")],
)
def test_bad_calibration_arrays(kind, command, call, model, tuned, tmp_path):
    change, words = BAD_DATA[kind]
    path = tmp_path / "data.npz"
    np.savez(path, **change(np.load(model.with_suffix(".npz"))["x"]))
    more = {"tune": [*QUICK, "-o", tmp_path / "out"], "compare": [model, "--engine", "fake"],
            "apply": ["--placement", tuned.parent / "out" / "placement.yaml"]}  # fmt: skip
    code, error = errors(call(command, model, *more[command], "--calibration-data", path))
    assert code == 2
    assert str(path) in error
    assert words in error


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("gone.npz", "gone.npz not found"),
        ("gone", "gone not found: give an .npz, a folder of .npy/.npz, or module:callable"),
        ("empty", "empty holds no .npy or .npz file"),
        ("text.npz", "text.npz is no .npz or .npy file: write it with numpy.savez or numpy.save"),
        ("nomodule:samples", "cannot import calibration data 'nomodule:samples'"),
        ("user_samples:gone", "cannot import calibration data 'user_samples:gone'"),
        ("user_samples:broken", "user_samples:broken"),
    ],
)
def test_bad_calibration_sources(source, words, call, model, monkeypatch):
    monkeypatch.chdir(model.parent)
    Path("empty").mkdir()
    Path("text.npz").write_text("no arrays")
    Path("user_samples.py").write_text("def broken():\n    raise RuntimeError('line one\\nline two')\n")
    code, error = errors(call("tune", model, *QUICK, "--calibration-data", source))
    assert code == 2
    assert words in error


@pytest.mark.parametrize("below", ["", "sub"])
def test_an_output_folder_that_cannot_be(below, call, model, tmp_path):
    (tmp_path / "taken").write_text("a file")
    code, error = errors(call("tune", model, *QUICK, "-o", tmp_path / "taken" / below))
    assert code == 2
    assert f"cannot write to {tmp_path / 'taken' / below}" in error
    assert (tmp_path / "taken").read_text() == "a file"


def test_apply_into_a_folder_that_is_not_there(call, tuned, tmp_path):
    placement = tuned.parent / "out" / "placement.yaml"
    code, error = errors(call("apply", tuned, "--placement", placement, "-o", tmp_path / "no" / "m.onnx"))
    assert code == 2
    assert "there is no folder" in error


@pytest.mark.parametrize("content", [None, "text", "version: 1\nedges: 7\n", "version: 9\n", "a: [\n", "\x00"])
def test_files_of_an_earlier_run_that_cannot_be_read(content, call, model, tmp_path):
    path = tmp_path / "earlier.yaml"
    if content is not None:
        path.write_text(content)
    tuning = ["tune", model, *QUICK, "--mode", "region", "-o", tmp_path / "o", "--pattern-cache", path]
    for arguments in (["apply", model, "--placement", path], tuning):
        code, error = errors(call(*arguments))
        assert code == 2
        assert str(path) in error


def test_a_damaged_state_file(call, tuned, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(tuned.parent / "out", output)
    state = output / "autotuner_state.yaml"
    lines = state.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"1", b"2", 1)
    state.write_bytes(b"".join(lines))
    command = ["tune", tuned, *QUICK, "--calibration-data", tuned.with_suffix(".npz"), "-o", output]
    code, error = errors(call(*command))
    assert (code, error) == (2, f"{state}, line 3 is damaged: restore the file, or start over with --restart")
    assert call(*command, "--restart", "-q")[0] == 0


def test_a_state_file_of_other_options(call, tuned):
    before = (tuned.parent / "out" / "autotuner_state.yaml").read_bytes()
    code, error = errors(call("tune", tuned, *QUICK, "-o", tuned.parent / "out", "--seed", 1))
    assert code == 2
    assert "was made with seed 0, now it is 1" in error
    code, error = errors(call("tune", tuned, "--engine", "onnxruntime", "-o", tuned.parent / "out"))
    assert code == 2
    assert "was made with engine fake, now it is onnxruntime: " in error
    assert (tuned.parent / "out" / "autotuner_state.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--engine", "abacus"], 2, "unknown engine 'abacus'; there are "),
        (["--engine-option", "colour=3"], 2, "engine 'onnxruntime' has no option 'colour'"),
        (["--provider", "NoSuchProvider"], 5, "no provider 'NoSuchProvider'"),
        (["--quant-type", "fp8"], 2, "ONNX Runtime has no FP8 kernels"),
    ],
)
def test_engines_that_cannot_be_had(options, code, words, call, model, tmp_path):
    found, error = errors(call("tune", model, *options, "-o", tmp_path / "out"))
    assert found == code
    assert words in error


def test_a_model_with_pairs_needs_from_qdq(call, tuned, model, tmp_path):
    quantized = tuned.parent / "out" / "optimized_final.onnx"
    code, error = errors(call("tune", quantized, *QUICK, "-o", tmp_path / "a"))
    assert code == 2
    assert "already has Q/DQ pairs: give --from-qdq" in error
    code, error = errors(call("tune", model, *QUICK, "--from-qdq", "-o", tmp_path / "b"))
    assert code == 2
    assert "has no Q/DQ pairs" in error
    placement = tuned.parent / "out" / "placement.yaml"
    assert errors(call("apply", quantized, "--placement", placement))[0] == 2
    assert call("tune", quantized, *QUICK, "--from-qdq", "-o", tmp_path / "c")[0] in (0, 3)


def test_files_that_would_overwrite_the_model(call, tuned):
    out = tuned.parent / "out"
    code, error = errors(call("tune", out / "baseline.onnx", *QUICK, "-o", out))
    assert (code, error) == (2, f"{out / 'baseline.onnx'} would be overwritten: choose another --output-dir")
    code, error = errors(call("apply", tuned, "--placement", out / "placement.yaml", "-o", tuned))
    assert code == 2
    assert "would overwrite the model" in error


def test_apply_keeps_what_it_reads(call, tuned, tmp_path):
    placement = Path(shutil.copy(tuned.parent / "out" / "placement.yaml", tmp_path))
    data = Path(shutil.copy(tuned.with_suffix(".npz"), tmp_path))
    for path, what in ((placement, "placement"), (data, "calibration data")):
        before = path.read_bytes()
        command = ["apply", tuned, "--placement", placement, "--calibration-data", data, "-o", path]
        assert errors(call(*command)) == (2, f"{path} would overwrite the {what}: choose another --output")
        assert path.read_bytes() == before


def test_apply_for_an_engine_that_is_not_installed(call, tuned, tmp_path):
    command = ["apply", tuned, "--placement", tuned.parent / "out" / "placement.yaml", "-o", tmp_path / "m.onnx"]
    assert call(*command, "--engine", "tensorrt")[0] == 0
    assert errors(call(*command, "--engine", "abacus")) == (2, errors(call("tune", tuned, "--engine", "abacus"))[1])


@pytest.mark.parametrize("pairs", ["none", "others"])
def test_a_baseline_that_gives_nothing_is_refused(pairs, call, tuned, model, tmp_path):
    """The float model itself, and another network with pairs."""
    other = write(conv_net(), tmp_path, "other") if pairs == "none" else tuned.parent / "out" / "optimized_final.onnx"
    model = write(conv_net(), tmp_path, "network")
    code, error = errors(call("tune", model, *QUICK, "--qdq-baseline", other, "-o", tmp_path / "out"))
    assert code == 2
    assert error.startswith(f"{other} has no Q/DQ pair that fits {model}: give a quantized version of it")


# What comes out, and where


def test_tune_prints_a_table_and_tells_its_progress_in_plain_lines(call, model, tmp_path):
    code, out, err = call("tune", model, *QUICK, "-o", tmp_path / "out")
    assert code == 0
    assert re.search(r"^ latency +[\d.]+ ms +[\d.]+ ms *$", out, re.MULTILINE)
    assert re.search(r"^ speedup \[interval\] +1x +[\d.]+x \[[\d.]+x, [\d.]+x\] *$", out, re.MULTILINE)
    assert "dB" not in out
    assert out.splitlines()[-1] == f"{tmp_path / 'out' / 'optimized_final.onnx'} is the tuned model"
    lines = err.splitlines()
    assert lines[0] == "reading model.onnx"
    assert any(re.fullmatch(r" +1 +\d+/7 builds  best [\d.]+x  [\w ]+: .*", line) for line in lines)
    assert any(line.startswith("note: no --calibration-data") for line in lines)
    assert lines[-1] == f"{tmp_path / 'out' / 'report.html'} shows how it went"
    assert "\x1b" not in out + err


def test_the_same_command_goes_on(call, tuned):
    command = ["tune", tuned, *QUICK, "--calibration-data", tuned.with_suffix(".npz"), "-o", tuned.parent / "out"]
    code, _, err = call(*command, "-v")
    assert code == 0
    assert "this run has finished before: nothing is measured again" in err
    state = tuned.parent / "out" / "autotuner_state.yaml"
    state.write_bytes(b"".join(state.read_bytes().splitlines(keepends=True)[:-1]))
    code, _, err = call(*command, "-v")
    assert code == 0
    trials = [line for line in err.splitlines() if " builds  best " in line]
    assert trials
    assert all(line.endswith(", from the state file") for line in trials)


def test_quiet_leaves_the_result(call, tuned):
    command = ["tune", tuned, *QUICK, "--calibration-data", tuned.with_suffix(".npz"), "-o", tuned.parent / "out"]
    code, out, err = call(*command, "--quiet")
    assert (code, err) == (0, "")
    assert "is the tuned model" in out


def test_no_improvement_is_code_3(call, tmp_path):
    path = write(hopeless(), tmp_path)
    code, out, _ = call("tune", path, *QUICK, "-o", tmp_path / "out")
    assert code == 3
    final = tmp_path / "out" / "optimized_final.onnx"
    assert out.splitlines()[-1] == f"no improvement found: {final} is the baseline"
    assert final.read_bytes() == (tmp_path / "out" / "baseline.onnx").read_bytes()
    assert "speedup" not in out
    for name in ("placement.yaml", "summary.json", "autotuner_state.yaml", "autotuner_state_pattern_cache.yaml"):
        assert (tmp_path / "out" / name).is_file()


def noted(err: str) -> list[str]:
    return [line.removeprefix("note: ") for line in err.splitlines() if line.startswith("note: ")]


def test_when_every_candidate_fails_one_note_says_why(call, model, tmp_path):
    """A candidate with a pair at `softmax` gives NaN, and any other is refused."""
    data = ["--calibration-data", model.with_suffix(".npz")]
    faults = 'faults={"nan": "softmax", "refuse": "*"}'
    code, out, err = call("tune", model, *QUICK, *data, "--engine-option", faults, "-o", tmp_path / "out")
    assert code == 3
    (note,) = noted(err)
    told = re.fullmatch(r"all (\d+) candidates failed, (\d+) of them: (.*) \(see (.*)\)", note)
    assert told is not None
    reasons = Counter(re.findall(r": failed: (.*)", err))
    assert len(reasons) == 2
    assert int(told[1]) == reasons.total()
    assert (told[3], int(told[2])) == reasons.most_common(1)[0]
    assert Path(told[4]).is_file()
    assert f"candidates: {told[1]} ({told[1]} failed)" in out


def test_candidates_that_hang_alike_have_one_reason(call, model, tmp_path, workers):
    """Although the name of a candidate's file stands in it."""

    def hangs(build):
        if any(node.op_type == "DequantizeLinear" for node in onnx.load(build.path).graph.node):
            raise TimeoutError

    workers.refused = hangs
    data = ["--calibration-data", model.with_suffix(".npz")]
    limit = ["--time-limit", "1", "--builds", "3", "--json"]
    code, _, err = call("tune", model, *QUICK, *data, *limit, "-o", tmp_path / "out")
    assert code == 3
    *_, note = noted(err)  # behind that of --builds, which QUICK has as well
    assert (
        note
        == f"all 2 candidates failed: building a candidate took longer than 1 s (see {tmp_path}/out/logs/trial_001.log)"
    )


def test_a_candidate_that_ran_needs_no_word_about_those_that_failed(call, model, tmp_path):
    data = ["--calibration-data", model.with_suffix(".npz")]
    faults = 'faults={"refuse": "softmax"}'
    code, out, err = call("tune", model, *QUICK, *data, "--engine-option", faults, "-o", tmp_path / "out")
    assert code == 0
    assert ": failed: " in err
    assert not noted(err)
    assert re.search(r"candidates: \d+ \(\d+ failed\)", out)


def test_json_is_all_that_goes_to_standard_output(call, tuned, tmp_path):
    data = ["--calibration-data", tuned.with_suffix(".npz")]
    out = tuned.parent / "out"
    code, printed, _ = call("tune", tuned, *QUICK, *data, "-o", out, "--json")
    assert code == 0
    assert json.loads(printed) == json.loads((out / "summary.json").read_text())
    code, printed, _ = call("tune", tuned, *QUICK, *data, "-o", tmp_path / "dry", "--dry-run", "--json")
    assert code == 0
    told = {"regions", "patterns", "builds", "latency", "seconds", "notes", "rewrite_builds"}
    assert json.loads(printed).keys() == told
    code, printed, _ = call("compare", tuned, out / "optimized_final.onnx", "--engine", "fake", *data, "--json")
    assert code == 0
    (row,) = json.loads(printed)["others"]
    assert row["verdict"] == "faster"
    assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"] < 1
    target = tmp_path / "made.onnx"
    code, printed, _ = call("apply", tuned, "--placement", out / "placement.yaml", *data, "-o", target, "--json")
    assert code == 0
    applied = json.loads(printed)
    assert applied.pop("accuracy")["sqnr_db"] > 20
    assert applied == {"output": str(target), "edges": row_count(out), "lost": []}
    code, printed, _ = call("inspect", tuned, "--json")
    assert code == 0
    assert json.loads(printed)["nodes"] == 8


def row_count(out: Path) -> int:
    edges: int = json.loads((out / "summary.json").read_text())["edges"]
    return edges


def test_dry_run_says_what_would_be_done_and_does_nothing(call, model, tmp_path):
    code, out, _ = call("tune", model, *QUICK, "-o", tmp_path / "out", "--dry-run")
    assert code == 0
    told = r"regions: \d+\npatterns: \d+\nbuilds: at most \d+, without the proof\ntime: about \d+ s \(.* ms\)\n"
    assert re.fullmatch(told, out)
    assert not (tmp_path / "out").exists()


def test_compare_prints_a_table(call, tuned):
    final = tuned.parent / "out" / "optimized_final.onnx"
    code, out, err = call("compare", tuned, tuned, final, "--engine", "fake")
    assert code == 0
    assert f"first: {tuned}" in out
    assert re.search(r"1\.00x \[0\.92x, 1\.09x\] +equal files ", out)
    assert "output SQNR over 3 samples" in out
    assert re.search(rf"^ {final} .* \d\.\d\dx \[\d\.\d\dx, \d\.\d\dx\] +faster +[\d.]+ *$", out, re.MULTILINE)
    assert err.splitlines() == [
        "running model.onnx",
        "timing model.onnx against model.onnx",
        "timing optimized_final.onnx against model.onnx",
        f"note: no --calibration-data: the inputs are those of the run beside it, {tuned.with_suffix('.npz')}",
    ]


def test_compare_tells_each_number_of_threads(call, tuned):
    final = tuned.parent / "out" / "optimized_final.onnx"
    at = ("--engine", "fake", "--engine-option", "threads=1", "--deploy-threads", "1,4")
    code, out, _ = call("compare", tuned, final, *at)
    assert code == 0
    assert re.search(rf"{final}, 1 thread .*faster", out)
    assert re.search(rf"{final}, 4 threads .*faster", out)
    code, out, _ = call("compare", tuned, final, *at, "--json")
    assert [row["threads"] for row in json.loads(out)["others"]] == [1, 4]
    assert call("compare", tuned, final, "--engine", "fake", "--deploy-threads", "1;4")[0] == 2


def test_compare_goes_on_behind_a_file_that_the_engine_refuses(call, tuned):
    final = tuned.parent / "out" / "optimized_final.onnx"
    faults = 'faults={"refuse": "*"}'
    code, out, err = call("compare", tuned, final, tuned, "--engine", "fake", "--engine-option", faults)
    assert code == 5
    assert re.search(r" failed ", out)
    assert re.search(r" equal files ", out)
    assert err.splitlines()[-1].startswith(f"error: {final} cannot be compared: fake engine: ")


def test_apply_on_retrained_weights_gives_the_same_edges_and_other_scales(call, tuned, tmp_path):
    retrained = onnx.load(tuned)
    for tensor in retrained.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(3 * onnx.numpy_helper.to_array(tensor), tensor.name))
    onnx.save(retrained, tmp_path / "retrained.onnx")
    arguments = [
        "--placement",
        tuned.parent / "out" / "placement.yaml",
        "--calibration-data",
        tuned.with_suffix(".npz"),
    ]
    code, out, _ = call("apply", tmp_path / "retrained.onnx", *arguments)
    assert code == 0
    count = json.loads((tuned.parent / "out" / "summary.json").read_text())["pairs"]
    made = tmp_path / "retrained.qdq.onnx"
    assert out.startswith(f"{made}: {count} tensors with a Q/DQ pair, output SQNR against float: ")
    old, new = (pairs(path) for path in (tuned.parent / "out" / "optimized_final.onnx", made))
    assert old.keys() == new.keys()
    thrice = {t.removesuffix("_DequantizeLinear_Output") for t in old if np.allclose(3 * old[t], new[t], rtol=0.1)}
    assert thrice == {"w0", "b", "w1"}  # the weights of the two large products, and the activation between them
    assert [t for t in old if np.array_equal(old[t], new[t])] == ["x_DequantizeLinear_Output"]
    call("apply", tuned, *arguments, "-o", tmp_path / "again.onnx")
    shipped = tuned.parent / "out" / "optimized_final.onnx"
    assert (tmp_path / "again.onnx").read_bytes().startswith(shipped.read_bytes())  # a mark of who made it follows


def pairs(path: Path) -> dict[str, np.ndarray]:
    """Output of each DequantizeLinear to its scale."""
    graph = onnx.load(path).graph
    values = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    return {n.output[0]: values[n.input[1]] for n in graph.node if n.op_type == "DequantizeLinear"}


def test_apply_in_float16(call, tuned, tmp_path):
    """As the search with --precision fp16 had it: the edges' tensors are float16, and so are their scales."""
    target = tmp_path / "half.onnx"
    code, _, _ = call("apply", tuned, "--placement", tuned.parent / "out" / "placement.yaml", "--precision", "fp16",
                      "--calibration-data", tuned.with_suffix(".npz"), "-o", target)  # fmt: skip
    assert code == 0
    scales = [t.data_type for t in onnx.load(target).graph.initializer if t.name.endswith("_scale")]
    assert set(scales) == {onnx.TensorProto.FLOAT16}


def test_apply_says_what_is_not_there(call, tuned, tmp_path):
    code, error = errors(
        call("apply", write(conv_net(), tmp_path), "--placement", tuned.parent / "out" / "placement.yaml")
    )
    assert code == 2
    assert "is it the same network?" in error


def test_inspect_prints_the_regions(call, tuned):
    code, out, err = call("inspect", tuned, "--include-all-regions", "--verbose")
    assert (code, err) == (0, "")
    assert "8/8 nodes (100.0%)" in out
    assert "  - third" in out


def test_a_defect_is_code_70_with_its_traceback(monkeypatch, call):
    def broken(*_: object) -> NoReturn:
        raise ZeroDivisionError("unexpected")

    monkeypatch.setattr(tune, "tune", broken)
    code, out, err = call("tune", "m.onnx")
    assert (code, out) == (70, "")
    assert "ZeroDivisionError: unexpected" in err
    assert err.splitlines()[-1].startswith("error: this is a defect of qdqtune")


# As a process of its own


SLOW = ("--engine", "fake", "--builds", "12", "--engine-option", "build_seconds=0.2", "--calibration-method", "minmax",
        "--no-bias-correction", "--no-report")  # fmt: skip


def started(*arguments: object, **how: Any) -> subprocess.Popen[bytes]:
    """`qdqtune` with these arguments, as a shell starts it."""
    command = [sys.executable, "-m", "qdqtune", *map(str, arguments)]
    return subprocess.Popen(command, env=environment() | {"TERM": "xterm-256color", "COLUMNS": "100"}, **how)


def test_ctrl_c_is_code_130_and_the_same_command_goes_on(model, tmp_path, call):
    command = ["tune", model, *SLOW, "-o", tmp_path / "out"]
    process = started(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    seen = []
    while " builds  best " not in (seen or [""])[-1]:
        seen.append(process.stderr.readline().decode())
        assert seen[-1], seen
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (main.INTERRUPTED, b"")
    said = "interrupted: what was measured is kept; the same command goes on from there"
    assert err.decode().splitlines()[-1] == said
    assert b"Traceback" not in err
    code, _, again = call(*command)
    assert code == 0
    assert again.count("from the state file") >= 1


def on_a_terminal(*arguments: object) -> bytes:
    """All that a terminal of 100 columns gets of a command that succeeds."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = started(*arguments, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal hangs up when the process has ended
        while part := os.read(ours, 65536):
            shown += part
    assert process.wait() == 0
    return shown


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_on_a_terminal_the_picture_of_a_dry_run_is_gone_before_its_result(model, tmp_path, form):
    shown = on_a_terminal("tune", model, *SLOW, "-o", tmp_path / "out", "--dry-run", *form).decode()
    result = shown.rpartition("\x1b")[2].partition("{" if form else "regions: ")[2]
    assert "builds" in result
    assert not any(ord(c) in streams.BRAILLE for c in result)


def test_on_a_terminal_a_picture_follows_the_run(model, tmp_path):
    shown = on_a_terminal("tune", model, *SLOW, "-o", tmp_path / "out")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"searching  \S+  \d+ of 12 builds  \d+ s  about \d+ s left", text)
    assert re.search(r"best so far: 2\.00x the speed of float \(cut\)", text)
    assert re.search(r"last: \w[^\n]*: \d\.\d\dx \[\d\.\d\dx, \d\.\d\dx\], \w+ \w+ [^\n]*float", text)
    assert "proving the result on fresh builds" in text
    assert b"\x1b[1A" in shown  # the picture is drawn in place
    last = text.replace("\r", "").rstrip("\n").splitlines()
    assert last[-1].endswith("is the tuned model")


@pytest.mark.parametrize("again", [False, True])
def test_a_full_disk_is_one_line_and_code_2(again, tuned, tmp_path, call):
    """A limit on the size of files does to a write what a full disk does: here to the weights of the float model."""
    out = tmp_path / "out"
    if again:  # the ranges are in the state file
        out.mkdir()
        shutil.copy(tuned.parent / "out" / "autotuner_state.yaml", out)
    with room_for(50_000):
        code, printed, err = call(
            "tune", tuned, *QUICK, "--calibration-data", tuned.with_suffix(".npz"), "-o", out, "-q"
        )
    assert (code, printed) == (2, "")
    assert re.fullmatch(rf"error: cannot write {re.escape(str(out))}\S*: File too large\n", err)


def test_a_reader_that_has_gone_is_no_error(tuned):
    process = started("inspect", tuned, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_an_output_that_is_full(tuned):
    with open("/dev/full", "wb") as full:
        process = started("inspect", tuned, stdout=full, stderr=subprocess.PIPE)
    _, err = process.communicate()
    assert process.returncode == 2
    assert re.fullmatch(r"error: .*No space left on device\n", err.decode())
