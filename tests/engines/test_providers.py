"""Execution providers as engines: their tables, and the two ways to name one."""

import platform
import re
from dataclasses import replace

import pytest

from qdqtune.engines import CPU_PROVIDER, EngineSpec, devices, normal, open_engine, threads_of, unwatched
from qdqtune.engines.formats import numeric_format, weight_formats
from qdqtune.engines.machine import architecture, is_simulated, processor_name, simulated, simulated_chip, this_machine
from qdqtune.engines.options import EngineOptions
from qdqtune.engines.providers import OF_EP, PROVIDERS, table_of
from qdqtune.errors import BadOption, EngineUnavailable
from qdqtune.placement.engine_rules import rules_of

TABLES = list(PROVIDERS.values())


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_table_is_whole(table) -> None:
    assert table.source.startswith("https://")
    assert table.install
    assert numeric_format(table.name, "int8") == table.numbers
    with pytest.raises(BadOption, match="no FP8"):
        numeric_format(table.name, "fp8")
    assert {f.name for f in weight_formats(table.name)} == set(table.weights)
    assert all(rules_of(table.name, numbers) == rules_of(table.like, numbers) for numbers in ("int8", "fp8"))
    assert rules_of(table.name, "int8")
    assert all(set(re.compile(pattern).groupindex) == {"nodes", "reason"} for pattern in table.words)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_provider_is_named_in_two_ways_that_make_one_engine(table) -> None:
    provider = {"provider": table.ep}
    long, short = EngineOptions(engine_options=provider), EngineOptions(engine=table.name)
    assert long.spec() == short.spec() == EngineOptions(engine=table.name, engine_options=provider).spec()
    given = EngineSpec("onnxruntime", {**long.spec().options, "provider": table.ep})
    assert long.spec() == EngineOptions(engine=given).spec()
    assert long.engine_name == table.name
    assert threads_of(short.spec()) is None
    assert devices.needs_gpu(short.spec()) is table.is_gpu


def test_the_usual_provider_needs_no_name() -> None:
    assert EngineOptions(engine_options={"provider": CPU_PROVIDER}).spec() == EngineOptions().spec()
    unknown = EngineSpec("onnxruntime", {"provider": "OtherExecutionProvider"})
    assert normal(unknown) == unknown
    assert str(unwatched(unknown)).startswith(unknown.options["provider"])
    assert not any(unwatched(normal(EngineSpec("onnxruntime", {"provider": ep}))) for ep in (CPU_PROVIDER, *OF_EP))


def test_two_names_that_differ_are_refused() -> None:
    with pytest.raises(BadOption, match="engine 'qnn' is the provider QNNExecutionProvider: leave `provider` CUDA"):
        EngineOptions(engine="qnn", engine_options={"provider": "CUDAExecutionProvider"}).spec()


def test_a_chip_is_named_to_a_simulator_alone() -> None:
    assert bool(simulated_chip(PROVIDERS["qnn"])) == is_simulated("qnn")
    assert simulated_chip(PROVIDERS["cuda"]) == simulated_chip(table_of(CPU_PROVIDER)) == {}


def test_the_simulator_is_known_by_the_processor() -> None:
    here, board = this_machine(), replace(this_machine(), machine="aarch64", emulation="", where="board")
    far = replace(here, machine="x86_64", emulation="", where="far")
    assert is_simulated("qnn", far)
    assert simulated("qnn", far) == "qnn is a simulator on far, whose times mean nothing"
    assert not is_simulated("qnn", board)
    assert not is_simulated("cuda", far)
    assert not is_simulated("fake", far)
    emulated = replace(board, emulation="this ARM processor is emulated")
    assert is_simulated("onnxruntime", emulated)
    assert simulated("onnxruntime", emulated) == "board: this ARM processor is emulated"
    assert not is_simulated("fake", emulated)


def test_times_on_an_emulated_processor_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_simulated("onnxruntime")
    monkeypatch.setattr("qdqtune.engines.machine.emulated_on", lambda: "x86")
    assert is_simulated("onnxruntime")
    assert not is_simulated("fake")  # its times are those of a cost model
    told = "processor is emulated on x86, so times mean nothing"
    assert simulated("onnxruntime") == f"this {architecture()} {told}"
    assert processor_name() == f"{platform.machine()}, emulated on x86"


@pytest.mark.parametrize("name", [n for n, table in PROVIDERS.items() if table.plugin])
def test_a_plug_in_that_is_not_installed_says_how(name, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(EngineUnavailable, match=re.escape(f"is not installed: {PROVIDERS[name].install}")):
        open_engine(EngineSpec(name))


def test_a_library_that_is_no_plug_in_is_refused(tmp_path) -> None:
    (tmp_path / "lib.so").write_bytes(b"no library")
    with pytest.raises(EngineUnavailable, match="QNNExecutionProvider does not load"):
        open_engine(EngineSpec("qnn", {"library": str(tmp_path / "lib.so")}))
