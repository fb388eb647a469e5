"""Hooks of MkDocs: links to files outside of docs/ lead to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<place>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that leave docs/ lead to the repository, or be plain text where no repository is configured. The first
    page takes the whole width."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    folder = Path(page.file.src_uri).parent

    def led(link: re.Match[str]) -> str:
        path = normpath(f"docs/{folder.as_posix()}/{link['place']}")
        if path.startswith("docs/"):
            return link[0]
        if config.repo_url:
            return f"[{link['text']}]({config.repo_url.rstrip('/')}/blob/main/{path}{link['anchor'] or ''})"
        return link["text"] if path in link["text"] else f"{link['text']} (`{path}`)"

    return LINK.sub(led, markdown)
