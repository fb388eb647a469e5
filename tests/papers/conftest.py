"""What documents take for granted, made once for all of them."""

import shutil
from pathlib import Path

import pytest

from documents import prepare


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    prepare(folder)
    (folder / "demo").mkdir()
    for made, bundled in (("model.onnx", "digits.onnx"), ("samples.npz", "samples.npz")):
        shutil.copy(folder / made, folder / "demo" / bundled)
    return folder
