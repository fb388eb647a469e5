"""Results appear whole under their names or not at all; what had these names stays until then."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqtune.errors import OutputError
from qdqtune.graph.saving import save
from qdqtune.placement.files import write_yaml
from qdqtune.system.writing import atomic_write, write_json
from runs import hopeless, mixed, room_for

OLD, NEW = b"old", b"new" * 1000


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def write_both(target: Path, then: Callable[[], None]) -> None:
    """A model and its data, and what happens before they take their names."""
    with atomic_write(target) as fresh:
        fresh.write_bytes(NEW)
        fresh.with_name(f"{fresh.name}.data").write_bytes(NEW)
        then()


def test_a_file_has_its_old_content_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "r.onnx"
    target.write_bytes(OLD)
    with atomic_write(target) as fresh:
        fresh.write_bytes(NEW)
        assert target.read_bytes() == OLD
    assert target.read_bytes() == NEW
    assert names(tmp_path) == {"r.onnx"}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError()])
def test_an_error_leaves_existing_files_unchanged(tmp_path: Path, error: BaseException) -> None:
    for name in ("r.onnx", "r.onnx.data"):
        (tmp_path / name).write_bytes(OLD)
    expected = OutputError if isinstance(error, OSError) else type(error)

    def fail() -> None:
        raise error

    with pytest.raises(expected):
        write_both(tmp_path / "r.onnx", fail)
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {OLD}
    assert names(tmp_path) == {"r.onnx", "r.onnx.data"}


@pytest.mark.parametrize("stop", range(4))
def test_files_of_one_result_take_their_names_together_or_none_does(
    tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renaming stops at any step: two old files go aside, two new ones take their names."""
    for name in ("r.onnx", "r.onnx.data"):
        (tmp_path / name).write_bytes(OLD)
    replace, done = Path.replace, [0]

    def limited(self: Path, target: Path) -> Path:
        done[0] += 1
        if done[0] == stop + 1:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    with pytest.raises(OutputError, match="No space left"):
        write_both(tmp_path / "r.onnx", lambda: monkeypatch.setattr(Path, "replace", limited))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"r.onnx": OLD, "r.onnx.data": OLD}


def test_a_link_stays_a_link_and_a_second_name_keeps_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "real.onnx"
    target.write_bytes(OLD)
    target.chmod(0o640)
    (tmp_path / "link.onnx").symlink_to(target)
    os.link(target, tmp_path / "second.onnx")
    with atomic_write(tmp_path / "link.onnx") as fresh:
        fresh.write_bytes(NEW)
    assert (tmp_path / "link.onnx").is_symlink()
    assert target.read_bytes() == NEW
    assert target.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "second.onnx").read_bytes() == OLD


@pytest.mark.parametrize("limit", [1 << 30, 6000])
@pytest.mark.parametrize("room", [0, 1000, 20_000])
def test_a_model_on_a_full_disk(tmp_path: Path, limit: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdqtune.graph.saving.ONE_FILE_LIMIT", limit)
    path = tmp_path / "m.onnx"
    save(hopeless(), path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with room_for(room), pytest.raises(OutputError, match=r"cannot write .*m\.onnx"):
        save(mixed(), path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    save(mixed(), path)
    onnx.checker.check_model(str(path))


@pytest.mark.parametrize("write", [write_json, write_yaml])
def test_records_on_a_full_disk(tmp_path: Path, write: Callable[..., None]) -> None:
    path = tmp_path / "summary"
    write(path, {"a": 1})
    before = path.read_bytes()
    with room_for(100), pytest.raises(OutputError, match="File too large"):
        write(path, {"a": list(map(float, np.arange(1000)))})
    assert path.read_bytes() == before
    assert names(tmp_path) == {"summary"}
