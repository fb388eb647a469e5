"""Whether a file may be written, asked before any work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from qdqtune.errors import BadOption, OutputError


def check_output(output: Path, read: Mapping[str, Iterable[Path | str | None]]) -> None:
    """Refuse an output in a folder that is not there, or one that would overwrite what is `read`, under what it is.

    Raises:
        BadOption, OutputError: see above.
    """
    for what, files in read.items():
        if any(_is_same(output, Path(file)) for file in files if file is not None):
            raise BadOption(f"{output} would overwrite the {what}: choose another --output")
    if not output.parent.is_dir():
        raise OutputError(f"cannot write {output}: there is no folder {output.parent}")


def _is_same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve() or (a.exists() and b.exists() and a.samefile(b))
