"""The service that compares files: what is built, asked again, kept in the store, and when it ends."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import BaselineFailed, EngineRefused, Failure
from qdqtune.graph.saving import save
from qdqtune.timing.ratios import Plan, Ratio, across_builds
from qdqtune.tuning import comparison
from qdqtune.tuning.comparison import Comparer, ComparisonRequest, SharedBuilds
from qdqtune.tuning.contexts import Context
from qdqtune.tuning.shipping import Compared
from qdqtune.tuning.store import Store
from qdqtune.types import Measurement, Mix
from refusals import or_raise, refusal
from runs import hopeless, mixed

PLAN = Plan((16,))


@dataclass
class Script:
    """Stands in for the runner. `speed(path, build)` is what one build of a file takes, in seconds."""

    speed: Callable[[Path, int], float] = lambda path, _: {"a": 1.0, "given": 1.0}.get(path.stem, 0.6)
    refused: Callable[[Path, int], Failure | None] = lambda _path, _build: None
    builds: list[str] = field(default_factory=list)
    present: set[Handle] = field(default_factory=set)
    most: int = 0
    seeds: list[int] = field(default_factory=list)
    check = None

    def load(self, path: Path, log_name: str, *, fresh: bool) -> Handle:
        assert fresh
        number = len(self.builds)
        self.builds.append(path.stem)
        or_raise(self.refused(path, number))
        self.present.add(handle := Handle(path, number, 0.0))
        self.most = max(self.most, len(self.present))
        return handle

    def feed(self, mix: Mix) -> None:
        pass

    def unload(self, handle: Handle) -> None:
        self.present.remove(handle)

    def rounds(self, a: Handle, b: Handle, count: int, *, seed: int, **_: Any) -> Measurement:
        assert {a, b} <= self.present
        self.seeds.append(seed)
        return Measurement((self.speed(a.path, a.build),) * count, (self.speed(b.path, b.build),) * count)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    found = tmp_path / "a.onnx", tmp_path / "b.onnx"
    for path, model in zip(found, (mixed(), hopeless()), strict=True):
        save(model, path)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "state.yaml", {"model": "m"}) as opened:
        yield opened


def context(script: Script, threads: int | None = None) -> Context:
    return Context(threads, cast(Runner, script), ())


def request(files: tuple[Path, Path], script: Script) -> ComparisonRequest:
    return ComparisonRequest("proof:x", *files, context(script))


def test_files_are_compared_on_two_fresh_builds_of_each(files: tuple[Path, Path], store: Store) -> None:
    script = Script(speed=lambda path, build: 1.0 if path.stem == "a" else 0.6 if build < 2 else 0.605)
    found = Comparer(PLAN, 7, store=store).compare(request(files, script))
    assert isinstance(found, Compared)
    assert found.ratio == across_builds([Ratio(r, r, r) for r in (0.6, 0.605)], PLAN)
    assert found.ratio.median == pytest.approx((0.6 * 0.605) ** 0.5)
    assert (found.a_seconds, found.b_seconds, found.builds) == (1.0, pytest.approx(0.6025, rel=1e-3), 4)
    assert (script.builds, script.seeds, script.present) == (["b", "a"] * 2, [7, 8], set())


def test_what_is_known_of_the_same_contents_is_not_measured_again(files: tuple[Path, Path], store: Store) -> None:
    comparer = Comparer(PLAN, 7, store=store)
    first = comparer.compare(request(files, Script()))
    again = Script()
    assert comparer.compare(request(files, again)) == first
    assert again.builds == []
    longer = Comparer(Plan((20,)), 7, store=store)  # which needs more rounds than are known
    longer.compare(request(files, again))
    save(hopeless(), files[0])
    comparer.compare(request(files, again))
    assert again.builds == ["b", "a"] * 4
    assert [of.split(" ")[0] for of in store.values("comparison:", Measurement)] == ["proof:x:0", "proof:x:1"] * 2


def test_contexts_have_records_of_their_own(files: tuple[Path, Path], store: Store) -> None:
    asked = ComparisonRequest("given:x", *files, context(Script(), 4))
    found = Comparer(PLAN, 0, store=store).compare(asked)
    assert isinstance(found, Compared)
    assert found.threads == 4
    assert [of.split(" ")[0] for of in store.values("comparison:", Measurement)] == ["given:x:4t:0", "given:x:4t:1"]


@pytest.mark.parametrize(("tries", "fails", "works"), [(3, 2, True), (3, 3, False), (1, 1, False)])
def test_a_transient_failure_is_tried_again(files: tuple[Path, Path], tries: int, fails: int, works: bool) -> None:
    script = Script(refused=lambda _, build: Failure("crash", "killed") if build < fails else None)
    with nullcontext() if works else pytest.raises(EngineRefused):
        Comparer(PLAN, 0, tries=tries).compare(request(files, script))


def test_what_fails_when_no_time_is_left_is_not_tried_again(files: tuple[Path, Path]) -> None:
    for stage, left, builds in (("timeout", 0.0, 1), ("timeout", 9.0, 3), ("crash", 0.0, 1), ("crash", 9.0, 3)):
        script = Script(refused=lambda _, __, stage=stage: Failure(stage, "lost"))  # type: ignore[misc]
        comparer = Comparer(PLAN, 0, tries=3, lacks=lambda s, left=left: s >= left)  # type: ignore[misc]
        asked = request(files, script)
        assert refusal(partial(comparer.compare, asked)) == Failure(stage, "lost")  # type: ignore[arg-type]
        assert len(script.builds) == builds


def test_a_file_that_is_refused_is_built_once(files: tuple[Path, Path], store: Store) -> None:
    script = Script(refused=lambda path, _: Failure("build", "no kernel") if path.stem == "b" else None)
    comparer = Comparer(PLAN, 0, store=store, tries=3)
    assert refusal(lambda: comparer.compare(request(files, script))) == Failure("build", "no kernel")
    assert script.builds == ["b"]


def test_pairs_of_large_files_are_built_one_after_the_other(files, monkeypatch):
    small, large = Script(), Script()
    Comparer(PLAN, 0).compare(request(files, small))
    monkeypatch.setattr(comparison, "SIDE_BY_SIDE", 0)
    Comparer(PLAN, 0).compare(request(files, large))
    assert (small.most, large.most) == (4, 2)


@pytest.mark.parametrize(("how", "builds"), [({}, 16), ({"only_not_slower": True}, 4), ({"pairs": 1}, 2)])
def test_more_builds_are_made_until_it_is_decided(files: tuple[Path, Path], how: dict[str, Any], builds: int) -> None:
    """Builds that differ by more than the files do."""
    script = Script(speed=lambda path, build: 1.0 if path.stem == "a" else 0.97 + 0.01 * (build % 4))
    Comparer(PLAN, 0).compare(request(files, script), **how)
    assert len(script.builds) == builds


def test_without_time_two_pairs_of_builds_have_to_do(files: tuple[Path, Path]) -> None:
    script = Script(speed=lambda path, build: 1.0 if path.stem == "a" else 0.97 + 0.01 * (build % 4))
    Comparer(PLAN, 0, lacks=lambda _: True).compare(request(files, script))
    assert len(script.builds) == 4


def test_many_files_share_builds_of_the_users(files: tuple[Path, Path], store: Store) -> None:
    script, comparer = Script(), Comparer(PLAN, 0, store=store)
    with SharedBuilds(comparer, context(script), *files) as shared:
        for number in (0, 1):
            assert not shared.is_open(number)
            for digest in ("x", "y"):
                assert isinstance(shared.compare(number, digest, files[1]), Measurement)
            assert shared.is_open(number)
    assert (shared.builds, script.builds, script.present) == (6, ["b", "a", "b"] * 2, set())
    with SharedBuilds(comparer, context(script), *files) as known:
        known.compare(0, "x", files[1])
    assert (known.builds, len(script.builds)) == (2, 6)


def test_the_float_model_takes_the_place_of_a_users_file_that_does_not_run(files: tuple[Path, Path]) -> None:
    script = Script(refused=lambda path, _: Failure("build", "no kernel") if path.stem == "a" else None)
    with SharedBuilds(Comparer(PLAN, 0), context(script), *files) as shared:
        assert isinstance(shared.compare(0, "x", files[1]), Measurement)
    script.refused = lambda _, build: Failure("build", "no kernel") if build > 3 else None
    assert script.builds == ["b", "a", "b"]
    with (
        SharedBuilds(Comparer(PLAN, 0), context(script), *files) as shared,
        pytest.raises(BaselineFailed, match="does not build the float model again"),
    ):
        shared.compare(0, "x", files[1])
