import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import farandole

from .markdown import PAGES, ROOT


def test_the_site_has_every_page_and_what_pages_link_to(tmp_path: Path) -> None:
    """Strict: a page outside the navigation, or a link to nothing, also within a page, ends the build.

    Quiet, it would count no warning, and none would end it.
    """
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert built.returncode == 0, built.stdout
    assert len([*tmp_path.rglob("*.html")]) == len(PAGES) + 1, "all pages and the one for what is not found"
    assert (tmp_path / "examples/own_loop.py").read_bytes() == (ROOT / "examples/own_loop.py").read_bytes()
    first = (tmp_path / "index.html").read_text()
    assert 'href="faq.html' in first
    assert not re.search(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)"', first), "it loads nothing from elsewhere"
    python = unescape((tmp_path / "python.html").read_text())
    assert all(f"farandole.{name}" in python for name in farandole.__all__)
