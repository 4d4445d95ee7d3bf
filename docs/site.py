"""Hooks of mkdocs: what documents outside docs/ and files that documents name are on the site.

On the site all documents are in one folder: README.md is its first page, and other documents of the repository's root
keep their names. Other files, such as examples, keep their paths.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT: Final = Path(__file__).parent.parent
_FIRST: Final = "README.md"
_LINK: Final = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
_FENCE: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of the root, and every file that a document names."""
    documents = [*_ROOT.glob("*.md"), *(_ROOT / "docs").glob("*.md"), *(_ROOT / "examples").glob("*/*.md")]
    named = {_ROOT / target for document in documents for target in _targets(document)}
    for path in sorted({*documents, *named}):
        place = _place(path.relative_to(_ROOT).as_posix())
        if path.is_file() and files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change relative links between the repository's folders into the site's."""
    source = _source(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = _place(posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1])))
        return posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")

    return _LINK.sub(moved, markdown)


def _targets(document: Path) -> set[str]:
    """Return the paths from the repository's root to which a document links."""
    folder = document.parent.relative_to(_ROOT).as_posix()
    text = _FENCE.sub("", document.read_text())
    return {posixpath.normpath(posixpath.join(folder, link)) for link in _LINK.findall(text)}


def _place(path: str) -> str:
    """Return the place on the site of a path in the repository."""
    return "index.md" if path == _FIRST else path.removeprefix("docs/")


def _source(place: str) -> str:
    """Return the path in the repository of a page's place on the site."""
    if place == "index.md":
        return _FIRST
    return place if (_ROOT / place).is_file() else f"docs/{place}"
