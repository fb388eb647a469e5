"""The one reader of YAML: what it reads is what was written; it refuses all that takes time or memory without end."""

import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qdqtune.errors import BadOption
from qdqtune.placement.files import MOST_BYTES, parsed_yaml, read_placement_file, write_yaml
from qdqtune.search.regions.cache import read_cache

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(min_size=1), values, max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(tmp_path: Path, content: dict[str, object]) -> None:
    write_yaml(tmp_path / "some.yaml", content)
    assert parsed_yaml(tmp_path / "some.yaml", "some") == content


@pytest.mark.parametrize(
    "text",
    ["a: 0x10", "a: 1_000", "a: .inf", "a: 1e3", "a: 0b1", "a: on", "a: ~", "a:", "? a\n: b", "", "# nothing", "a: !"],
)
def test_plain_words_are_what_yaml_says(tmp_path: Path, text: str) -> None:
    (tmp_path / "some.yaml").write_text(text)
    if text.endswith("!"):
        with pytest.raises(BadOption, match="tags such as ! are not read"):
            parsed_yaml(tmp_path / "some.yaml", "some")
    else:
        assert parsed_yaml(tmp_path / "some.yaml", "some") == yaml.safe_load(text)


def test_aliases_repeat_what_they_name(tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text("a: &a [1, &b {c: 2}]\nd: [*a, *b]")
    assert parsed_yaml(tmp_path / "some.yaml", "some")["d"] == [[1, {"c": 2}], {"c": 2}]
    assert math.isnan(parsed_yaml(_file(tmp_path, ".nan"), "some"))


def _file(folder: Path, text: str) -> Path:
    (folder / "some.yaml").write_text(text)
    return folder / "some.yaml"


WRONG = {
    "more than 32 MiB": "a" * (MOST_BYTES + 1),
    "more than 1,000,000 values": "a: &a [x]\n"
    + "".join(f"{n}: &{n} [{f'*{p},' * 9}]\n" for p, n in pairwise("abcdefghijkl")),
    "more than 50 lists": "[" * 10_000,
    "line 2: the key 'version' comes twice": "version: 1\nversion: 1",
    "line 1: 2024-99-99 is read as a timestamp: put text in quotes": "version: 2024-99-99",
    "a number of 5000 characters": f"version: {'9' * 5000}",
    "tags such as tag:yaml.org,2002:python/name:os.system": "version: !!python/name:os.system x",
    "nothing is called &b": "a: *b",
    "a key is a list": "{[1]: 2}",
    "more than one document": "a: 1\n---\na: 1",
    "invalid": b"a: \xff\xfe".decode("latin-1"),
}


@pytest.mark.parametrize("read", [read_placement_file, read_cache])
@pytest.mark.parametrize("words", WRONG)
def test_placements_and_pattern_caches_are_refused_in_one_line(
    tmp_path: Path, words: str, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(WRONG[words], encoding="latin-1")
    with pytest.raises(BadOption, match=re.escape(words)) as refused:
        read(path)
    assert len(str(refused.value).splitlines()) == 1
