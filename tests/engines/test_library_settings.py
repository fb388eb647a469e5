"""What of an engine's options may come from a folder that somebody else has made."""

from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from qdqtune.engines import EngineSpec
from qdqtune.engines.fake import FakeOptions
from qdqtune.engines.library_settings import PLAIN_OPTIONS, OnnxRuntimeOptions, plain
from qdqtune.engines.providers import PROVIDERS
from qdqtune.engines.tensorrt.options import CachedOptions
from qdqtune.engines.tensorrt.rtx import RtxOptions
from qdqtune.engines.tensorrt.trtexec import TrtexecOptions

FOREIGN = {
    "qnn": {
        "backend_path": "lib.so", "backend_type": "", "op_packages": "a:lib.so:f", "qnn_saver_path": "lib.so",
        "qnn_ir_backend_path": "lib.so", "profiling_file_path": "a.csv", "dump_json_qnn_graph": "1",
        "json_qnn_graph_dir": "/tmp", "qnn_context_priority": "high",
    },
    "cuda": {
        "device_id": "../x", "gpu_external_alloc": "4096", "user_compute_stream": "4096",
        "tunable_op_tuning_enable": "1",
    },
}  # fmt: skip
"""Options of providers that name a file, a library or an address in memory, or that nobody has looked at."""


@pytest.mark.parametrize("engine", FOREIGN)
def test_options_of_providers_that_name_files_stay_where_they_are(engine: str) -> None:
    for spec in (
        EngineSpec(engine, {"provider_options": FOREIGN[engine]}),
        EngineSpec("onnxruntime", {"provider": PROVIDERS[engine].ep, "provider_options": FOREIGN[engine]}),
    ):
        taken, left = plain(spec)
        assert taken == EngineSpec(engine, {"provider_options": {}})
        assert left == [f"provider_options {name}" for name in FOREIGN[engine]]


@pytest.mark.parametrize("engine", PROVIDERS)
def test_the_usual_options_of_each_provider_are_plain(engine: str) -> None:
    table = PROVIDERS[engine]
    usual = {**table.options, **table.simulated_as}
    spec = EngineSpec(engine, {"provider_options": usual})
    assert plain(spec) == (spec, [])


def test_a_provider_that_nobody_knows_gets_no_options() -> None:
    given = {"provider": "OtherExecutionProvider", "provider_options": {"device_id": "1"}, "library": "lib.so"}
    taken, left = plain(EngineSpec("onnxruntime", given))
    assert taken.options == {"provider": "OtherExecutionProvider", "provider_options": {}}
    assert left == ["library", "provider_options device_id"]
    assert plain(EngineSpec("qnn", {"provider_options": ["backend_path"]}))[0].options == {"provider_options": {}}


@pytest.mark.parametrize("kind", [FakeOptions, OnnxRuntimeOptions, CachedOptions, RtxOptions, TrtexecOptions])
def test_what_is_a_text_is_plain_only_if_it_names_no_file(kind: Any) -> None:
    names, hints = {field.name for field in fields(kind)}, get_type_hints(kind)
    texts = {name for name in names if hints[name] in (str, str | None)}
    assert texts & PLAIN_OPTIONS <= {"provider", "target"}
    assert names - PLAIN_OPTIONS <= {"library", "timing_cache", "plugin_libraries", "trtexec", "trtexec_args"}
