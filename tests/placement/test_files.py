"""Files that carry a result to another model."""

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models import ranges
from qdqtune.calibration.scales import Calibration
from qdqtune.errors import BadOption, Failure
from qdqtune.graph.rewrites import Rewrites
from qdqtune.placement.files import PlacementFile, existing, read_placement_file, write_placement, write_yaml
from qdqtune.placement.possible import possible_edges
from qdqtune.search.regions import discovery, patterns
from qdqtune.search.regions.cache import cache_of, content_of, read_cache
from qdqtune.search.regions.discovery import Point, PointKind, Scheme
from qdqtune.timing.ratios import Plan
from qdqtune.types import Edge, Measurement, Placement, Proposal, Trial
from runs import mixed

MODEL = mixed()
GROUPED = patterns.group(MODEL, discovery.find(MODEL))
POSSIBLE = possible_edges(MODEL, ranges(MODEL))
SHIPPED = Placement.of([Edge("b", "second", 0), Edge("w1", "second", 1), Edge("d", "softmax", 0), Edge("y", "", 0)])

small = st.integers(0, 99)
points = st.builds(Point, st.sampled_from(get_args(PointKind)), small, small)
printable = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1)


@given(st.frozensets(st.builds(Edge, printable, printable | st.just(""), small)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12, deadline=None)
def test_a_placement_survives_with_what_it_was_made_for(tmp_path: Path, edges: frozenset[Edge]) -> None:
    inputs = {"sr": 16000, "scale": 0.5, "mode": "fast"}
    calibration, rewrites = Calibration("percentile", 99.5, bias_correction=True), Rewrites(True, ("hardswish",))
    recorded = PlacementFile(Placement(edges), "fp8", "tensorrt", inputs, calibration, rewrites)
    write_placement(tmp_path / "placement.yaml", recorded, "some.onnx")
    assert read_placement_file(tmp_path / "placement.yaml") == recorded


def test_a_placement_file_names_what_people_know(tmp_path: Path) -> None:
    write_placement(tmp_path / "p.yaml", PlacementFile(SHIPPED, "int8", "onnxruntime", {}), "net.onnx")
    text = (tmp_path / "p.yaml").read_text()
    assert "{tensor: w1, node: second, input: 1}" in text
    assert "{tensor: y, output: 0}" in text


@pytest.mark.parametrize("share", ["200.0", ".nan"])
def test_a_percentile_that_is_none_is_refused(tmp_path: Path, share: str) -> None:
    path, calibration = tmp_path / "p.yaml", Calibration("percentile", 99.5)
    write_placement(path, PlacementFile(SHIPPED, "int8", "onnxruntime", {}, calibration), "net.onnx")
    path.write_text(path.read_text().replace("99.5", share))
    with pytest.raises(BadOption, match="percentile lies in"):
        read_placement_file(path)


def test_only_edges_that_can_carry_a_pair_are_kept_and_the_others_told() -> None:
    gone = [Edge("b", "renamed", 0), Edge("nobody", "second", 0), Edge("b", "second", 7)]
    kept, lost = existing(MODEL, SHIPPED | Placement.of(gone), POSSIBLE)
    assert kept == SHIPPED
    assert sorted(lost) == sorted(gone)


@given(st.lists(st.frozensets(points), min_size=1, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12, deadline=None)
def test_a_cache_survives_in_its_order(tmp_path: Path, schemes: list[Scheme]) -> None:
    entries = {p.digest: [(s, 0.5 + k / 8) for k, s in enumerate(schemes)] for p in GROUPED[1:]}
    write_yaml(tmp_path / "cache.yaml", content_of(entries))
    assert read_cache(tmp_path / "cache.yaml") == {d: tuple(s for s, _ in rows) for d, rows in entries.items()}


def test_missing_files_are_refused(tmp_path: Path) -> None:
    for read in (read_placement_file, read_cache):
        for place in (tmp_path / "missing.yaml", tmp_path):
            with pytest.raises(BadOption, match="cannot read"):
                read(place)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(BadOption, match="is no pattern cache file"):
        read_cache(tmp_path / "binary.yaml")


def trial(number: int, pattern: str, placement: Placement, ratio: float) -> Trial:
    proposal = Proposal("mutated", placement, pattern)
    return Trial(number, proposal, Placement(), Measurement((1.0,) * 12, (ratio,) * 12), accepted=ratio < 1)


def test_the_cache_holds_the_final_scheme_then_the_winners_that_differ_enough() -> None:
    pattern = next(p for p in GROUPED if len(p.points) >= 5)
    region = pattern.instances[0]

    def placed(count: int) -> Placement:
        return Placement.of(patterns.resolve(pattern, region, frozenset(pattern.points[:count])))

    final = placed(0)
    history = [
        trial(1, pattern.digest, placed(1), 0.8),  # too near to the final one
        trial(2, pattern.digest, placed(5), 0.9),
        trial(3, pattern.digest, placed(4), 0.7),  # faster, so it comes first, and keeps trial 2 out
        trial(4, pattern.digest, placed(3), 1.1),  # slower
        trial(5, "", placed(2), 0.5),  # of no pattern
        Trial(6, Proposal("all", placed(3), pattern.digest), Placement(), Failure("build", "refused")),
    ]

    def cached(distance: int, most: int = 32) -> list[tuple[Scheme, float]]:
        made = cache_of(GROUPED, (final, 0.66), history, Plan(), minimum_distance=distance, maximum_entries=most)
        return made[pattern.digest]

    sizes = [(len(scheme), ratio) for scheme, ratio in cached(4)]
    assert sizes == [(0, 0.66), (4, 0.7)]
    assert [len(s) for s, _ in cached(1)] == [0, 4, 1, 5]
    assert [len(s) for s, _ in cached(1, 2)] == [0, 4]


WRONG = {
    "pattern cache file|placement file": "",
    "no (pattern cache|placement) file, or damaged": "{",
    "of this version": "version: 2\nedges: []\npatterns: []",
    "missing.*(patterns|quant_type)": "version: 1",
    "Expected|names neither": "version: 1\nquant_type: int8\nengine: fake\nedges: [{tensor: x}]\npatterns: [x]",
    "schemes|Expected .*array": "version: 1\nedges: 3\nquant_type: int8\nengine: fake\npatterns: [{pattern: a}]",
    "python/name:os.system": "version: !!python/name:os.system x",
    "single document": "a: 1\n---\na: 1",
    "invalid": b"a: \xff\xfe".decode("latin-1"),
    "month must be in 1..12": "version: 2024-99-99",
}


@pytest.mark.parametrize("read", [read_placement_file, read_cache])
@pytest.mark.parametrize("words", WRONG)
def test_placements_and_pattern_caches_are_refused_in_one_line(tmp_path, words, read):
    path = tmp_path / "some.yaml"
    path.write_text(WRONG[words], encoding="latin-1")
    with pytest.raises(BadOption, match=words) as refused:
        read(path)
    assert len(str(refused.value).splitlines()) == 1
    assert "some.yaml" in str(refused.value)
