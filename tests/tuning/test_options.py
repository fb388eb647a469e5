"""Values of search options: numbers of threads, and wildcards of node names."""

from pathlib import Path

import click
import pytest

from qdqtune.engines.options import ThreadCounts
from qdqtune.tuning.options import Wildcards


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), ("1,4, 16", (1, 4, 16)), (4, (4,)), ([1, 4], (1, 4)), (["4,1", "4"], (4, 1))],
)
def test_numbers_of_threads_are_told_in_every_form(given: object, expected: tuple[int, ...] | None) -> None:
    assert ThreadCounts().convert(given, None, None) == expected


@pytest.mark.parametrize("given", ["1;4", "0", "-2", "1.5", "10000", [], "1,,4"])
def test_what_is_no_number_of_threads_is_refused(given: object) -> None:
    with pytest.raises(click.BadParameter, match="no number of threads"):
        ThreadCounts().convert(given, None, None)


def test_wildcards_are_a_sequence_or_the_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "names.txt"
    file.write_text("# encoder only\n/a/*\n\n  b?\n")
    assert Wildcards().convert(file, None, None) == ("/a/*", "b?")
    assert Wildcards().convert(["/a/*"], None, None) == ("/a/*",)
    file.write_text("# nothing\n")
    for wrong, words in ((file, "holds no wildcard"), (tmp_path / "gone", "No such file"), (tmp_path, "cannot read")):
        with pytest.raises(click.BadParameter, match=words):
            Wildcards().convert(wrong, None, None)
