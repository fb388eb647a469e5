"""A pass of Olive that tunes its model. A package configuration of Olive names it:

{"passes": {"QdqTune": {"module_path": "qdqtune.olive_pass.QdqTune"}}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from olive.model import ONNXModelHandler
from olive.passes import Pass
from olive.passes.pass_config import PassConfigParam

from qdqtune.api import tune
from qdqtune.engines.provider_table import OF_EP


class QdqTune(Pass):  # type: ignore[misc]
    """Finds the fastest Q/DQ placement for an ONNX model on the engine, and proves it. Gives the float model where
    nothing is faster. The model's folder holds all that `qdqtune tune` writes."""

    @staticmethod
    def is_accelerator_agnostic(accelerator_spec: Any) -> bool:
        """A placement holds for the engine that it was measured on."""
        return False

    @classmethod
    def _default_config(cls, accelerator_spec: Any) -> dict[str, PassConfigParam]:
        provider = str(accelerator_spec.execution_provider)
        engine = OF_EP[provider].name if provider in OF_EP else "onnxruntime"
        return {
            "calibration_data": PassConfigParam(
                type_=str, required=True, description="Samples: an .npz, a folder, or module:callable."
            ),
            "engine": PassConfigParam(type_=str, default_value=engine, description="What to measure on."),
            "options": PassConfigParam(
                type_=dict[str, Any], default_value={}, description="Other keywords of qdqtune.tune, such as min_sqnr."
            ),
        }

    def _run_for_config(self, model: ONNXModelHandler, config: Any, output_model_path: str) -> ONNXModelHandler:
        folder = Path(output_model_path).with_suffix("")
        data, engine = config.calibration_data, config.engine
        done = tune(str(model.model_path), calibration_data=data, engine=engine, output_dir=folder, **config.options)
        return ONNXModelHandler(
            model_path=str(folder), onnx_file_name=done.file.name, model_attributes=model.model_attributes
        )
