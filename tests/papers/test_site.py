"""The site of the documents: its reference tells all that the code has, and a broken link ends its build."""

import re
from pathlib import Path

import pytest
import yaml

import examples
import qdqtune
import reference
from documents import ROOT
from qdqtune.cli import main
from qdqtune.options import options_of
from qdqtune.tuning.folder import FILES
from qdqtune.tuning.summary import Summary

DOCS = ROOT / "docs"


def written(nav: object) -> set[str]:
    """The pages that the navigation names."""
    if isinstance(nav, str):
        return {nav}
    parts = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ()
    return {page for part in parts for page in written(part)}


def test_every_page_is_in_the_navigation() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert written(nav) == pages | {reference.OVERVIEW, *reference.OTHERS}


@pytest.mark.parametrize("name", main.app.commands)
def test_the_page_of_a_command_has_all_its_options(name: str) -> None:
    command = main.app.commands[name].command
    page = reference.command_page(f"qdqtune {name}", command)
    told = re.findall(r"`(--?[\w-]+)`\{ \.flag \}", page)
    flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    assert {flag for flag in flags if flag.startswith("-")} <= set(told)
    assert len(told) == len(set(told))


def test_python_has_all_names_and_keywords() -> None:
    page = reference.python_page()
    assert set(re.findall(r"^## (\w+)$", page, re.MULTILINE)) == set(qdqtune.__all__) - {"__version__"}
    compare = page.split("\n## compare\n")[1].split("\n## ")[0]
    assert all(f"`{name}`" in compare for name in options_of(reference.KEYWORDS["compare"]))


def test_files_exit_codes_and_fields_are_told() -> None:
    assert all(f"| `{name}` |" in reference.files_page() for name in FILES)
    assert all(f"| `{code}` |" in reference.exit_page() for code in main.EXIT_CODES)
    assert all(f"| `{field}` |" in reference.fields_of(Summary, {}) for field in Summary.__annotations__)


def test_fields_of_a_value() -> None:
    value = {"first": "a.onnx", "others": [{"ratio": {"low": 0.5}, "reason": None}], "notes": []}
    told = [("first", "text"), ("others[].ratio.low", "number"), ("others[].reason", "null, or a value")]
    assert list(examples.fields(value)) == [*told, ("notes", "array")]


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    pytest.importorskip("material")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    (tmp_path / "docs").mkdir()

    def built(text: str) -> None:
        (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n{text}\n")
        own = {"docs_dir": str(tmp_path / "docs"), "site_dir": str(tmp_path / "site"), "nav": ["index.md"]}
        build(load_config(str(ROOT / "mkdocs.yml"), hooks=[], strict=True, **own))

    built("[here](#title)")
    assert "Title" in (tmp_path / "site" / "index.html").read_text()
    for broken in ("[there](missing.md)", "[there](#missing)"):
        with pytest.raises(Abort):
            built(broken)
