"""Runs in experiment trackers: what MLflow and Weights & Biases write to disk, and spans of OpenTelemetry."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qdqtune
from conftest import Call
from qdqtune.errors import BadOption
from qdqtune.system import tracing
from qdqtune.tuning.tracking import TRACKERS

QUICK: dict[str, Any] = {"engine": "fake", "builds": 5, "price_cache": "none", "report": False}


@pytest.fixture
def tracked(model: Path, tmp_path: Path, workers: object) -> Any:
    """Tune a model with a tracker."""

    def run(name: str, **more: Any) -> qdqtune.Result:
        samples = model.with_suffix(".npz")
        return qdqtune.tune(model, calibration_data=samples, output_dir=tmp_path / "out", track=[name], **QUICK | more)

    return run


def test_mlflow_keeps_settings_numbers_and_files(tracked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    result = tracked("mlflow")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "model")
    assert (run.data.params["engine"], run.data.params["builds"]) == ("fake", "5")
    assert run.data.metrics["ratio"] == result.ratio.median
    assert len(client.get_metric_history(run.info.run_id, "best_speedup")) == len(result.history)
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"summary.json", "placement.yaml"}
    with pytest.raises(qdqtune.QdqtuneError):
        tracked("mlflow", seed=5)  # another run stands in the folder
    assert {run.info.status for run in client.search_runs(["0"])} == {"FINISHED", "FAILED"}


def test_wandb_writes_a_run_without_a_network(tracked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    tracked("wandb")
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (log,) = folder.glob("run-*.wandb")
    written = log.read_bytes()
    assert b"best_speedup" in written
    assert b"baseline_ms" in written
    assert {path.name for path in (folder / "files").iterdir()} >= {"summary.json", "placement.yaml"}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What OpenTelemetry collects, by a provider of this test alone."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def test_spans_of_builds_and_rounds_lie_in_their_stages(tracked: Any, spans: Any) -> None:
    result = tracked("otel")
    found = spans.get_finished_spans()
    (root,) = [span for span in found if span.parent is None]
    assert root.name == "qdqtune tune"
    assert root.attributes["engine"] == "fake"
    assert root.attributes["ratio"] == result.ratio.median
    stages = {span.context.span_id: span.name for span in found if span.parent is not None
              and span.parent.span_id == root.context.span_id}  # fmt: skip
    assert "searching" in stages.values()
    rounds = [span for span in found if span.name == "rounds"]
    assert {stages[span.parent.span_id] for span in rounds} >= {"searching"}
    events = [event for span in found for event in span.events if event.name == "candidate"]
    assert [event.attributes["number"] for event in events] == [trial.number for trial in result.history]


def test_a_span_costs_nothing_where_nobody_collects_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
    with tracing.span("nothing", what="at all"):
        pass
    assert "opentelemetry.trace" not in sys.modules


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named(name: str, tracked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, {"otel": "opentelemetry.trace"}.get(name, name), None)
    with pytest.raises(BadOption, match=rf"pip install 'qdqtune\[{name}\]'"):
        tracked(name)


def test_an_unknown_tracker_is_refused_before_anything_is_measured(call: Call, model: Path, tmp_path: Path) -> None:
    code, out, err = call("tune", model, "-o", tmp_path / "out", "--engine", "fake", "--track", "mlflow,diary")
    assert (code, out) == (2, "")
    assert "--track knows mlflow, wandb, otel, not 'diary'" in err
    assert not (tmp_path / "out").exists()
