"""Execution providers as engines: their tables, and the two ways to name one."""

import re
from dataclasses import replace

import pytest

from loaded_modules import absent
from qdqtune.engines import EngineSpec, devices, normal, open_engine, threads_of
from qdqtune.engines.facts import CPU_PROVIDER, ENGINES, OF_EP, PROVIDERS
from qdqtune.engines.formats import numeric_format, weight_formats
from qdqtune.engines.machine import simulated, this_machine
from qdqtune.engines.options import EngineOptions
from qdqtune.errors import BadOption, EngineUnavailable
from qdqtune.placement.engine_rules import rules_of

TABLES = [ENGINES[name] for name in PROVIDERS]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_table_is_whole(table) -> None:
    assert table.source.startswith("https://")
    assert table.install
    assert numeric_format(table.name, "int8") == table.numbers
    with pytest.raises(BadOption, match="no FP8"):
        numeric_format(table.name, "fp8")
    assert {f.name for f in weight_formats(table.name)} == set(table.weights)
    assert all(
        rules_of(table.name, numbers) == rules_of(table.like or table.name, numbers) for numbers in ("int8", "fp8")
    )
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
    assert str(unknown.facts.unwatched).startswith(unknown.options["provider"])
    assert not any(normal(EngineSpec("onnxruntime", {"provider": ep})).facts.unwatched for ep in (CPU_PROVIDER, *OF_EP))


def test_the_simulator_is_known_by_the_processor() -> None:
    here, board = this_machine(), replace(this_machine(), machine="aarch64", where="board")
    far = replace(here, machine="x86_64", where="far")
    assert simulated("qnn", far) == "qnn is a simulator on far, whose times mean nothing"
    assert not simulated("qnn", board)
    assert not simulated("cuda", far)
    assert not simulated("fake", far)


@pytest.mark.parametrize("name", [n for n in PROVIDERS if ENGINES[n].plugin])
def test_a_plug_in_that_is_not_installed_says_how(name, monkeypatch) -> None:
    absent(monkeypatch, ENGINES[name].plugin)
    with pytest.raises(EngineUnavailable, match=re.escape(f"): {ENGINES[name].install}")):
        open_engine(EngineSpec(name))
