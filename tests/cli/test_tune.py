"""`qdqtune tune`: every option reaches its setting; what is printed of a result, and where."""

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from command_lines import COMMANDS, QUICK, UNCHECKED, errors
from models import conv_net
from qdqtune.calibration.scales import Calibration
from qdqtune.calibration.workloads import WorkloadFile
from qdqtune.cli import main, tune
from qdqtune.cli.progress import Progress
from qdqtune.commands.tune import result_table
from qdqtune.engines import EngineSpec
from qdqtune.engines.runner import Runner
from qdqtune.explanation.formatting import built
from qdqtune.explanation.report import report_of_run
from qdqtune.timing.ratios import Plan
from qdqtune.tuning import loop
from qdqtune.tuning.observer import Observers
from qdqtune.tuning.settings import EFFORTS, Settings
from qdqtune.types import Accuracy
from runs import mixed, settings, write


def settings_of(*arguments: object, model: str | Path = "m.onnx") -> Settings:
    """The settings of a search with these arguments of `tune`."""
    with main.app.make_context("qdqtune", ["tune"]) as program:
        words = [str(model), *map(str, arguments)]
        given = tune.tune_command.make_context("tune", words, parent=program).params
    settings: Settings = given["options"].settings(("qdqtune", *map(str, arguments)))
    return settings


TUNE: dict[str, tuple[Sequence[str], Callable[[Settings], object], object]] = {
    "--output-dir": (["x/y"], lambda s: s.output_dir, Path("x/y")),
    "--mode": (["region"], lambda s: s.mode, "region"),
    "--quant-type": (["fp8"], lambda s: s.quant_type, "fp8"),
    "--precision": (["fp16"], lambda s: s.precision, "fp16"),
    "--engine": (["fake"], lambda s: s.engine, EngineSpec("fake")),
    "--threads": (["3", "--ray", "auto"], lambda s: (s.engine.options.get("threads"), s.threads), (3, (3,))),
    "--workers": (["3"], lambda s: s.workers, 3),
    "--ray": (["auto"], lambda s: s.ray, "auto"),
    "--cores-per-worker": (["2"], lambda s: s.cores_per_worker, 2),
    "--engine-option": (["noise=0.5"], lambda s: s.engine.options.get("noise"), 0.5),
    "--time-limit": (["90s"], lambda s: s.time_limit, 90),
    "--calibration-data": (["a:b"], lambda s: s.calibration_data, "a:b"),
    "--calibration-samples": (["7"], lambda s: s.calibration_samples, 7),
    "--input-shape": (["a:b:1x3x224"], lambda s: s.input_shapes, {"a:b": (1, 3, 224)}),
    "--seed": (["5"], lambda s: s.seed, 5),
    "--calibration-method": (["percentile:99.5"], lambda s: s.calibration, Calibration("percentile", 99.5, True)),
    "--no-bias-correction": ([], lambda s: s.calibration.bias_correction, False),
    "--rewrites": (["off"], lambda s: s.rewrites, "off"),
    "--formats": (["int8,w4"], lambda s: s.formats, ("int8", "w4")),
    "--calibration-cache": (["c.cache"], lambda s: s.calibration_cache, Path("c.cache")),
    "--fix-input": (["sr=16000"], lambda s: s.fix_inputs, {"sr": 16000}),
    "--effort": (["extensive"], lambda s: (s.builds, s.plan.looks, s.config.schemes_per_region, s.proof),
                 (EFFORTS["extensive"].builds["cut"], EFFORTS["extensive"].looks, 200, EFFORTS["extensive"].proof)),
    "--builds": (["33"], lambda s: s.builds, 33),
    "--time-budget": (["1.5h"], lambda s: s.time_budget, 5400),
    "--node-filter": (["names.txt"], lambda s: s.node_filter, ("/a/*", "b?")),
    "--from-qdq": ([], lambda s: s.from_qdq, True),
    "--portable": ([], lambda s: s.portable, True),
    "--min-sqnr": (["20.5"], lambda s: s.min_sqnr, 20.5),
    "--min-agreement": (["none"], lambda s: s.min_agreement, None),
    "--scores": (["y:1,z"], lambda s: s.scores, ("y:1", "z")),
    "--front": ([], lambda s: (s.front, s.builds), (True, 18)),
    "--labels": (["l.npy"], lambda s: s.labels, "l.npy"),
    "--metric": (["top5"], lambda s: s.metric, "top5"),
    "--evaluate": (["metric:score"], lambda s: s.evaluate, "metric:score"),
    "--max-drop": (["0.5", "--evaluate", "metric:score"], lambda s: s.max_drop, 0.5),
    "--restart": ([], lambda s: s.restart, True),
    "--workload": (["a.b/decode.npz:0.8"], lambda s: s.workloads, (WorkloadFile(Path("a.b/decode.npz"), 0.8),)),
}  # fmt: skip
"""Option to values, what to look at in the settings, and what is expected there."""


SHOWN = {"--dry-run", "--report", "--json", "--on", "--quiet", "--verbose", "--help-all"}
"""Options of `tune` that change what is shown, or where it is measured. Other tests see to them."""


@pytest.mark.parametrize("option", TUNE)
def test_every_option_of_tune_reaches_its_setting(option, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("names.txt").write_text("# encoder only\n/a/*\n\n  b?\n")
    values, look, expected = TUNE[option]
    assert look(Settings(Path("m"))) != expected
    assert look(settings_of("--" + option[2:].replace("-", "_"), *values)) == expected


@pytest.mark.parametrize("engine", ["tensorrt", "trtexec"])
def test_a_timing_cache_lies_beside_the_output_unless_named(engine, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    beside = settings_of("--engine", engine, "-o", "out").engine
    assert beside.options == {"timing_cache": str(tmp_path / "out" / "timing.cache")}
    named = settings_of("--engine", engine, "--engine-option", "timing_cache=t", "--input-shape", "x:1x2")
    assert named.engine.options == {"timing_cache": "t", "opt_shapes": {"x": [1, 2]}}


def test_no_option_of_tune_is_left_out():
    names = {next(o for o in p.opts if o.startswith("--")) for p in COMMANDS["tune"].params if p.opts[0] != "model"}
    assert names == {name.replace("--no-", "--") for name in TUNE} | SHOWN


def test_defaults_are_those_of_settings():
    given = settings_of()
    assert given == Settings(Path("m.onnx"), engine=EngineSpec("onnxruntime", {"threads": 1}))


def test_a_search_runs_at_the_largest_number_of_threads_that_is_deployed():
    given = settings_of("--threads", "1,4,16", "--ray", "auto")  # whose nodes may have as many
    assert (given.engine.options["threads"], given.thread_counts) == (16, (16, 1, 4))


def test_explicit_options_win_over_the_preset():
    given = settings_of("--builds", 50, "--effort", "quick")
    assert (given.builds, given.plan.looks) == (50, EFFORTS["quick"].looks)
    assert given.proof == EFFORTS["quick"].proof


def test_a_baseline_that_gives_nothing_is_refused(call, tuned, model, tmp_path):
    """The float model itself, and another network with pairs."""
    model = write(conv_net(), tmp_path, "network")
    for other in (write(conv_net(), tmp_path, "other"), tuned.parent / "out" / "optimized_final.onnx"):
        code, error = errors(call("autotune", "-m", model, *QUICK, "--qdq-baseline", other, "-o", tmp_path / "out"))
        assert code == 2
        assert error.startswith(f"{other} has no Q/DQ pair that fits {model}: give a quantized version of it")


def test_tune_prints_a_table_and_tells_its_progress_in_plain_lines(call, model, tmp_path):
    code, out, err = call("tune", model, *QUICK, *UNCHECKED, "-o", tmp_path / "out")
    assert code == 0
    assert re.search(r"^ output accuracy +not measured, shipped unchecked *$", out, re.MULTILINE)
    assert re.search(r"^ latency +[\d.]+ ms +[\d.]+ ms *$", out, re.MULTILINE)
    assert re.search(r"^ speedup \[interval\] +1x +[\d.]+x \[[\d.]+x, [\d.]+x\] *$", out, re.MULTILINE)
    assert "dB" not in out
    assert (
        out.splitlines()[-1]
        == f"{tmp_path / 'out' / 'optimized_final.onnx'} is the tuned model; nobody has checked its accuracy"
    )
    lines = err.splitlines()
    assert lines[0] == "reading model.onnx"
    assert any(re.fullmatch(r" +1 +\d+/7 builds  best [\d.]+x  [\w ]+ \(.*\): .*", line) for line in lines)
    assert any(line.startswith("note: no --calibration-data") for line in lines)
    assert lines[-1] == f"{tmp_path / 'out' / 'report.html'} shows how it went"
    assert "\x1b" not in out + err


def test_quiet_leaves_the_result(call, tuned):
    command = ["tune", tuned, *QUICK, "--calibration-data", tuned.with_suffix(".npz"), "-o", tuned.parent / "out"]
    code, out, err = call(*command, "--quiet")
    assert (code, err) == (0, "")
    assert "is the tuned model" in out


def test_when_every_candidate_fails_one_note_says_why(call, model, tmp_path):
    """A candidate with a pair at `softmax` gives NaN, and any other is refused. One that runs needs no note."""
    data = ["--calibration-data", model.with_suffix(".npz")]
    faults = 'faults={"nan": "softmax", "refuse": "*"}'
    code, out, err = call("tune", model, *QUICK, *data, "--engine-option", faults, "-o", tmp_path / "out")
    assert code == 3
    (note,) = (line for line in err.splitlines() if line.startswith("note: "))
    told = re.fullmatch(r"note: every candidate failed; the first: (.*) \(see (.*)\)", note)
    first, *others = re.findall(r": failed: (.*)", err)
    assert told[1] == first
    assert Path(told[2]).is_file()
    assert f"candidates: {1 + len(others)} ({1 + len(others)} failed)" in out
    faults = 'faults={"refuse": "softmax"}'
    code, _, err = call("tune", model, *QUICK, *data, "--engine-option", faults, "-o", tmp_path / "other")
    assert (code, ": failed: " in err, "every candidate failed" in err) == (0, True, False)


def test_dry_run_refuses_a_metric_before_it_reads_the_model(call, tmp_path):
    (tmp_path / "damaged.onnx").write_text("no model")
    _, _, err = call("tune", tmp_path / "damaged.onnx", "--dry-run", "--evaluate", "nowhere:metric")
    assert "nowhere" in err


def test_dry_run_says_what_would_be_done_and_does_nothing(call, model, monkeypatch, tmp_path):
    asked, turns = list[float](), Runner.turns
    monkeypatch.setattr(
        Runner, "turns", lambda self, handles, least: asked.append(least) or turns(self, handles, least)
    )
    code, out, _ = call("tune", model, *QUICK, "-o", tmp_path / "out", "--dry-run", "--time-budget", "9m")
    assert code == 0
    assert asked == [Plan.turn_seconds]  # as races time: single inferences take longer
    up_to = r"up to \d+ within the 9 min 0 s, without the proof"
    assert re.fullmatch(rf"regions: \d+\npatterns: \d+\nbuilds: {up_to}\ntime: about \d+ s \(.* ms\)\n", out)
    assert not (tmp_path / "out").exists()


def test_a_short_budget_is_content_with_few_rounds_where_few_candidates_may_win_by_luck() -> None:
    def plan(*more: object) -> Plan:
        return settings_of(*more).plan

    assert (plan().looks, plan().error) == (EFFORTS["default"].looks, Plan.error)
    assert (plan("--time-budget", "90s").looks[0], plan("--time-budget", "90s").error) == (7, 0.02)
    assert plan("--time-budget", "10m") == plan("--time-budget", "90s", "--mode", "region") == plan()


# Builds, candidates and models are told alike wherever people read of them


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("mode", ["cut", "subgraph"])
def test_a_run_has_one_count_of_builds_and_candidates_without_holes(mode: str, tmp_path: Path) -> None:
    asked = settings(write(mixed(), tmp_path), mode=mode, builds=9)
    written = [io.StringIO(), io.StringIO()]
    moving, plain = (Progress(Console(file=file, width=200), is_moving=file is written[0]) for file in written)
    result = loop.tune(asked, Observers([moving, plain]))
    for file in written:
        lines = re.findall(r"^ +(\d+) +(\d+)/(\d+) builds  best", file.getvalue(), re.MULTILINE)
        assert [int(number) for number, *_ in lines] == list(range(1, len(result.history) + 1))
        assert {int(limit) for *_, limit in lines} <= {9}
        told = [f"builds: {spent}" for _, spent, _ in lines[-1:]]
    table, judged = result_table(result), Accuracy(**result.summary["output_accuracy"])
    level, place = f"{judged.slice_db:.1f} dB", judged.slice_name
    assert built(result.summary) in table.caption
    assert all(words in table.caption for words in told)
    assert ("  of the worst slice", "", f"{level} ({place})") in table.rows
    page = report_of_run(tmp_path / "out")
    assert any(built(result.summary) in fact.hint for fact in page.facts)
    assert any((fact.value, fact.hint) == (level, place) for fact in page.facts)
    assert [one.number for one in page.candidates] == list(range(1, len(result.history) + 1))


@pytest.mark.usefixtures("workers")
def test_what_the_fastest_candidate_missed_is_told_with_what_was_compared(tmp_path: Path) -> None:
    result = loop.tune(settings(write(mixed(), tmp_path), min_sqnr=190.0))
    assert not result.improved
    without = result.summary["fastest_without_limits"]
    assert re.fullmatch(r"the output SQNR of all samples is [\d.]+ dB, and 190 dB are asked for", without["missed"])
    _, missed, compared, told = (result_table(result).caption or "").splitlines()
    assert missed == f"the fastest without limits was not taken: {without['missed']}"
    assert compared.startswith("outputs compared on ")
    assert told == result.summary["scores_told"]
    assert any(without["missed"] in note for note in report_of_run(tmp_path / "out").notes)
