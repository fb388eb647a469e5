"""What stands in the way of a search, found before it begins, and what to do about it."""

from __future__ import annotations

from qdqtune.calibration.matching import from_file
from qdqtune.engines import TENSORRT_FAMILY, EngineSpec
from qdqtune.engines.runner import Runner
from qdqtune.errors import EngineUnavailable
from qdqtune.graph.model import Model
from qdqtune.search.regions.cache import read_cache
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.subgraphs import groups

WITHOUT_GPU = (
    "without a GPU: `qdqtune quantize MODEL --engine tensorrt -o quantized.onnx` places pairs by rules, and "
    "`qdqtune check quantized.onnx --engine tensorrt-rtx --target sm89` builds it for a GPU that is not here"
)


def insist_on_device(spec: EngineSpec, runner: Runner) -> None:
    """Refuse an engine that can time nothing here, before anything takes long.

    Raises:
        EngineUnavailable: it cannot be opened, or builds for a device that this machine does not have.
    """
    try:
        device = runner.describe().get("device")
    except EngineUnavailable as error:
        if spec.name in TENSORRT_FAMILY:
            raise EngineUnavailable(f"{str(error).rstrip('.')}; {WITHOUT_GPU}") from error
        raise
    if device == "none":
        raise EngineUnavailable(f"{spec.name} builds here but times nothing, and a search needs times; {WITHOUT_GPU}")


def check_files(settings: Settings, model: Model) -> None:
    """Read the files that a run of `model`, shaped as it is measured, reads later.

    Raises:
        InputError: one is missing, damaged, or of another model.
    """
    if settings.pattern_cache is not None:
        read_cache(settings.pattern_cache)
    if settings.graph_json is not None:
        groups.from_file(model, settings.graph_json)
    if settings.calibration_cache is not None:
        from_file(settings.calibration_cache, model, settings.model)
