"""The folder of a run: it is locked, no name in it leads out of it, and what is not of our making stays."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from command_lines import is_refused
from conftest import Call
from qdqtune.errors import BadOption, BadState, QdqtuneError
from qdqtune.system.checks import LIST
from qdqtune.tuning.folder import OutputFolder
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import Settings
from runs import contents, mixed, settings, write
from workers import in_process

Finished = Callable[[str], Path]
LINKS: dict[str, Callable[[Path, Path], None]] = {
    "symbolic": lambda victim, name: name.symlink_to(victim),
    "to nothing": lambda victim, name: name.symlink_to(victim.with_name("nothing")),
    "to itself": lambda _, name: name.symlink_to(name),
    "relative": lambda victim, name: name.symlink_to(os.path.relpath(victim, name.parent)),
    "hard": lambda victim, name: os.link(victim, name),
}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The folder of a finished run in a mode, its model beside it."""
    made: dict[str, Path] = {}

    def ran(mode: str) -> Path:
        if mode not in made:
            home = tmp_path_factory.mktemp(mode)
            with in_process():
                tune(asked(write(mixed(), home), mode))
            made[mode] = home
        return made[mode]

    return ran


def asked(model: Path, mode: str) -> Settings:
    if mode == "front":
        return settings(model, mode="cut", builds=14, front=True, min_sqnr=None)
    return settings(model, mode=mode, builds=6)


@pytest.mark.parametrize("mode", ["cut", "region", "subgraph", "front"])
def test_no_name_of_a_run_leads_out_of_its_folder(mode, finished, tmp_path, request):
    """Each kind of file and each folder that a run writes is a link to a file elsewhere, or lies behind one. Names of a
    kind differ in numbers and digests, and the first stands for all: all are checked in one loop."""
    home, count = shutil.copytree(finished(mode), tmp_path / "home"), 0
    model, victims, aside = home / "model.onnx", tmp_path / "victims", tmp_path / "aside"
    (victims / "folder").mkdir(parents=True)
    names = [path.relative_to(home / "out") for path in sorted((home / "out").rglob("*"))]
    kinds = {re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "#", str(name)): name for name in reversed(names)}
    for name in kinds.values():
        for kind, link in LINKS.items():
            if kind == "hard" and not ((home / "out" / name).is_file() and is_appended(name)):
                continue
            place = home / "out" / name
            (victims / "file").write_text("mine")
            for inner in place.rglob("*"):
                (victims / "folder" / inner.name).write_text("mine")
            before = contents(victims)
            target = victims / ("folder" if place.is_dir() else "file")
            place.rename(aside)
            link(target, place)
            with pytest.raises(QdqtuneError) as error, OutputFolder(asked(model, mode)):
                pass
            assert error.value.exit_code == 2
            assert "\n" not in str(error.value)
            assert contents(victims) == before, (name, kind)
            assert not (victims / "nothing").exists()
            place.unlink()
            aside.rename(place)
            count += 1
    request.node.add_report_section("call", "links", f"tune --mode {mode}: {count} links, all refused and untouched")


def is_appended(name: Path) -> bool:
    """Whether a run writes to a file as it lies there: others are replaced, and a second name keeps the old content."""
    return name.parts[0] == "logs" or name.name in (LIST, "autotuner_state.yaml")


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("mode", ["cut", "region", "subgraph", "front"])
def test_second_names_keep_their_content(mode: str, finished: Finished, tmp_path: Path) -> None:
    """A run replaces files under their names: what else they are called keeps what it holds."""
    shutil.copytree(finished(mode), tmp_path / "home")
    model, out = tmp_path / "home" / "model.onnx", tmp_path / "home" / "out"
    (tmp_path / "second").mkdir()
    for number, path in enumerate(sorted(out.rglob("*"))):
        if path.is_file() and not is_appended(path.relative_to(out)):
            os.link(path, tmp_path / "second" / str(number))
    before = contents(tmp_path / "second")
    tune(replace(asked(model, mode), restart=True))
    assert contents(tmp_path / "second") == before


@pytest.mark.usefixtures("workers")
def test_a_list_from_elsewhere_deletes_nothing_elsewhere(finished: Finished, tmp_path: Path) -> None:
    for mode, part in (("region", "region_models"), ("subgraph", "subgraphs"), ("front", "front")):
        home, victim = tmp_path / mode, tmp_path / f"{mode} victim"
        shutil.copytree(finished(mode), home)
        victim.mkdir()
        (victim / "x").write_text("mine")
        with (home / "out" / LIST).open("a") as listed:
            listed.write(f"{part}/x\n../{mode} victim/x\n{victim}/x\n")
        shutil.rmtree(home / "out" / part, ignore_errors=True)
        (home / "out" / part).symlink_to(victim)
        with pytest.raises(QdqtuneError):
            tune(asked(home / "model.onnx", mode))
        assert contents(victim) == {"x": b"mine"}


@pytest.mark.usefixtures("workers")
def test_what_ends_a_run_does_not_write_through_links(finished: Finished, tmp_path: Path, call: Call) -> None:
    """`report` and `tune --pick` in a folder that came from elsewhere."""
    shutil.copytree(finished("front"), tmp_path / "home")
    out, victim = tmp_path / "home" / "out", tmp_path / "victim"
    point = next((out / "front").glob("*.onnx")).stem
    for name in ("report.html", "summary.json", "placement.yaml", "optimized_final.onnx", "optimized_final.onnx.data"):
        kept = (out / name).read_bytes() if (out / name).exists() else None
        for kind in ("symbolic", "to nothing"):
            victim.write_text("mine")
            (out / name).unlink(missing_ok=True)
            LINKS[kind](victim, out / name)
            is_refused(call, tmp_path, "", "tune", tmp_path / "home" / "model.onnx", "--pick", point, "-o", out)
            if name == "report.html":
                is_refused(call, tmp_path, "", "report", out)
            assert victim.read_text() == "mine"
            (out / name).unlink()
        if kept is not None:
            (out / name).write_bytes(kept)
    assert not [path for path in tmp_path.iterdir() if path.name == "nothing"]


@pytest.mark.usefixtures("workers")
def test_parts_of_an_earlier_run_go(model: Path) -> None:
    tune(settings(model, builds=4, mode="subgraph"))
    parts = model.parent / "out" / "subgraphs"
    shutil.copy(parts / "group_001.onnx", parts / "group_009.onnx")
    with (parts.parent / LIST).open("a") as listed:
        listed.write("subgraphs/group_009.onnx\nsubgraphs/../../model.onnx\n")
    tune(settings(model, builds=4, mode="subgraph"))
    assert not (parts / "group_009.onnx").exists()
    assert model.exists()


def test_a_folder_has_one_run_at_a_time(model: Path) -> None:
    with OutputFolder(settings(model)), pytest.raises(BadState, match="in use by another run"):
        OutputFolder(settings(model, state_file=model.parent / "other.yaml"))
    OutputFolder(settings(model)).__exit__()


@pytest.mark.usefixtures("workers")
def test_a_list_that_is_not_ours_is_left_alone(model: Path) -> None:
    out = model.parent / "out"
    out.mkdir()
    (out / LIST).write_text("mine\n")
    with pytest.raises(Exception, match="is not of qdqtune's making"):
        tune(settings(model))
    assert (out / LIST).read_text() == "mine\n"


def test_a_run_that_ends_before_it_has_written_anything_leaves_nothing(tmp_path: Path) -> None:
    model = write(mixed(), tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for out in ("mine", "new/folder"):
        with pytest.raises(BadState), OutputFolder(settings(model, output_dir=tmp_path / out)):
            raise BadState("refused")
    assert sorted(tmp_path.rglob("*")) == before
    with OutputFolder(settings(model, output_dir=tmp_path / "new")):
        (tmp_path / "new" / "logs" / "worker.log").write_text("what the engine has said")
    assert (tmp_path / "new" / LIST).exists()


@pytest.mark.parametrize("end", [10, -3])
def test_a_list_whose_writer_was_killed_is_gone_on_with(model: Path, end: int) -> None:
    told = settings(model)
    with OutputFolder(told) as folder:
        (folder.path / "baseline.onnx").touch()
        expected = (folder.path / LIST).read_bytes()
    (told.output_dir / LIST).write_bytes(expected[:end])
    if end < 0:
        with OutputFolder(told):
            pass
        assert (told.output_dir / LIST).read_bytes() == expected
    else:
        with pytest.raises(BadOption, match=r"baseline\.onnx was there before, and is not of"):
            OutputFolder(told)
