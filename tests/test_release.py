"""`make release`, in a scratch repository."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
WHEEL = "farandole-0.2.0-py3-none-any.whl"
BEFORE = {
    ".gitignore": "dist/\n",
    "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n## [0.1.0]\n\n- First.\n",
    "CITATION.cff": "version: 0.1.0\nrepository-code: https://farandole.invalid/source\n",
    "pyproject.toml": '[project]\nname = "farandole"\nversion = "0.2.0.dev0"\n',
}


def run(folder: Path, *command: str) -> tuple[int, str]:
    """Run a command; return its exit code and its output."""
    someone = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **someone}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def step(folder: Path, name: str) -> tuple[int, str]:
    return run(folder, sys.executable, ".ci/release", name)


def test_a_release_is_refused_until_all_is_done_and_then_committed_tagged_hashed_and_noted(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    for name in (".ci/release", "Makefile"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in BEFORE.items():
        (tmp_path / name).write_text(text)
    run(tmp_path, "git", "init", "--quiet", "--initial-branch", "main")
    code, shown = run(tmp_path, "make", "release", f"PYTHON={sys.executable}")
    assert code == 2
    assert re.findall(r"^  (.+)", shown, re.MULTILINE) == [
        "the working tree is not clean; commit or remove: .ci/, .gitignore, CHANGELOG.md, CITATION.cff, Makefile, "
        "pyproject.toml",
        "CITATION.cff, line 2 is a placeholder; fill it in: repository-code: https://farandole.invalid/source",
        "CITATION.cff has another version than pyproject.toml; write 0.2.0.dev0 into it",
        "CHANGELOG.md: the section [Unreleased] is empty; say what users see",
        "CHANGELOG.md: say in the section [Unreleased] whether nodes train with those of 0.1.0",
    ]

    (tmp_path / "CITATION.cff").write_text("version: 0.2.0.dev0\nrepository-code: https://example.org/source\n")
    changed = BEFORE["CHANGELOG.md"].replace("[Unreleased]", "[Unreleased]\n\n- New; trains with 0.1.0.")
    (tmp_path / "CHANGELOG.md").write_text(changed)
    run(tmp_path, "git", "add", "--all")
    run(tmp_path, "git", "commit", "--quiet", "--message", "Change")
    for _ in range(2):  # again after a wheel that failed
        assert step(tmp_path, "version") == (0, "")
    assert step(tmp_path, "publish") == (1, "there is no wheel of 0.2.0 in dist/; type: make release\n")
    (dist := tmp_path / "dist").mkdir()
    (dist / WHEEL).write_bytes(b"wheel")
    assert step(tmp_path, "publish")[0] == 0
    assert run(tmp_path, "git", "log", "--format=%s")[1].splitlines() == ["Begin 0.3.0", "Release 0.2.0", "Change"]
    assert 'version = "0.2.0"' in run(tmp_path, "git", "show", "v0.2.0^{commit}:pyproject.toml")[1]
    assert (dist / "SHA256SUMS").read_text() == f"{hashlib.sha256(b'wheel').hexdigest()}  {WHEEL}\n"
    assert "- New; trains with 0.1.0.\n\n## SHA-256" in (dist / "release-notes-0.2.0.md").read_text()
    changelog = (tmp_path / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[Unreleased\]\n\n## \[0\.2\.0\] - \d{4}-\d\d-\d\d\n\n- New;", changelog, re.MULTILINE)
    assert "version: 0.3.0.dev0" in (tmp_path / "CITATION.cff").read_text()
    run(tmp_path, "git", "tag", "v0.3.0")
    assert "there is a tag v0.3.0 already" in step(tmp_path, "check")[1]
