"""The folders stay at the top level; setuptools maps them. An unlisted package works when editable and is missing
from the wheel, so the list is checked against the disk."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_package_on_disk_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = {
        "farandole." + ".".join(init.parent.relative_to(ROOT).parts)
        for folder in ("node", "protocol", "training", "testnet")
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert on_disk == set(settings["packages"])
    assert set(settings["package-dir"]) == on_disk


def test_type_checkers_see_each_folder_once() -> None:
    for folder in ("node", "protocol", "training", "testnet"):
        link = ROOT / ".typing" / "farandole" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder


def test_the_mesh_process_never_imports_torch_or_transformers() -> None:
    code = "import sys, farandole.node.daemon; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_protocol_imports_no_io() -> None:
    code = (
        "import sys, pkgutil, importlib, farandole.protocol as p\n"
        "for m in pkgutil.iter_modules(p.__path__): importlib.import_module('farandole.protocol.' + m.name)\n"
        "print(sorted({'trio', 'libp2p', 'torch', 'sqlite3', 'asyncio'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_image_is_built_of_all_that_the_package_needs() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {Path(folder).parts[0] for folder in settings["tool"]["setuptools"]["package-dir"].values()}
    needed = {"pyproject.toml", "constraints.txt", settings["project"]["readme"], *settings["project"]["license-files"]}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == needed | folders
