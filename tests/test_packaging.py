"""Packaging: folders stay at the top level, and `src/farandole/` links to them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # PyYAML comes without types
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
DEBIANS_PYTHON = "3.11.2"
# Benchmarks and attack tools are not part of what a volunteer installs.
FROM_SOURCE_ALONE = ("testnet/bench/", "testnet/zoo/")
FOLDERS = ("node", "protocol", "training", "testnet")
# Pinned packages, with hashes, of the image and of releases; CUDA's in a separate file.
LOCKS = ("requirements.lock", "requirements-cuda.lock")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel, built from a copy of the source: a build writes into the source folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "src", *FOLDERS):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info"))
        else:
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    """Return the contents of the wheel."""
    shutil.unpack_archive(built, built.parent / "installed", "zip")
    return built.parent / "installed"


def test_the_wheel_has_every_module_but_benchmarks_and_attack_tools(wheel: Path) -> None:
    on_disk = {str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    expected = {path for path in on_disk if not path.startswith(FROM_SOURCE_ALONE)}
    installed = {str(path.relative_to(wheel / "farandole")) for path in wheel.rglob("*.py")}
    assert installed - expected == {"__init__.py", "hf.py", "lightning.py"}
    assert expected - installed == set()
    assert not list(wheel.rglob("hostile-*.toml"))


def run_in(wheel: Path, code: str) -> str:
    """Run code with the wheel's modules; the path of the editable install would find the source's."""
    begin = (
        "import sys\n"
        f"sys.path[:] = [each for each in sys.path if not each.startswith({str(ROOT / 'src')!r})]\n"
        f"sys.path.insert(0, {str(wheel)!r})\n"
    )
    return subprocess.check_output([sys.executable, "-c", begin + code], text=True, cwd=wheel)


def test_the_testnet_works_without_benchmarks(wheel: Path) -> None:
    shown = run_in(wheel, "from farandole.node.cli import main\nmain(['testnet', '--help'])\n")
    assert "compare" in shown
    assert "bench" not in shown


def test_a_wheel_that_carries_libp2p_needs_none(built: Path, tmp_path: Path) -> None:
    whole = shutil.copy(built, tmp_path)
    packages = str(distribution("libp2p").locate_file(""))
    subprocess.run([sys.executable, str(ROOT / ".ci/carry-libp2p"), packages, whole], check=True, capture_output=True)
    shutil.unpack_archive(whole, tmp_path, "zip")
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    needed = set(re.findall(r"^Requires-Dist: ([\w.-]+)", metadata.read_text(), re.MULTILINE))
    assert needed & {"libp2p", "coincurve", "fastecdsa", "noiseprotocol", "torch"} == {"noiseprotocol", "torch"}
    tests = [str(ROOT / "tests/node/mesh" / name) for name in ("test_host.py", "test_private_network.py")]
    run_in(
        tmp_path,
        "sys.modules.update(libp2p=None, coincurve=None, fastecdsa=None)\n"  # whoever imports one of them fails
        "import pytest\n"
        f"assert pytest.main(['-q', '-x', '-p', 'no:cacheprovider', '--rootdir', {str(ROOT)!r}, *{tests!r}]) == 0\n",
    )


def test_the_interface_is_what_it_names(wheel: Path) -> None:
    code = (
        "import farandole\n"
        "print('torch' in sys.modules, len([name for name in sys.modules if name.startswith('farandole')]))\n"
        "print(*(getattr(farandole, name).__name__ for name in farandole.__all__ if name != '__version__'))\n"
    )
    shown = run_in(wheel, code).splitlines()
    assert shown == ["False 1", "FarandoleError Mesh MeshError NoLoCo NodeError create_run model_of"]


ALL_OF_PROTOCOL = (
    "import pkgutil, importlib, farandole.protocol as p\n"
    "for m in pkgutil.walk_packages(p.__path__, 'farandole.protocol.'): importlib.import_module(m.name)"
)


@pytest.mark.parametrize(
    ("code", "never"),
    [
        (
            "import farandole.node.daemon, farandole.node.relay_node, farandole.testnet.cli",
            {"torch", "transformers", "fastecdsa"},  # the last has no wheel
        ),
        (ALL_OF_PROTOCOL, {"trio", "libp2p", "torch", "sqlite3", "asyncio"}),
    ],
)
def test_what_is_never_imported(code: str, never: set[str]) -> None:
    shown = subprocess.check_output(
        [sys.executable, "-c", f"{code}\nimport sys\nprint({never} & set(sys.modules))"], text=True
    )
    assert shown.strip() == "set()"


def test_the_image_is_built_of_all_that_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {"pyproject.toml", "constraints.txt", *LOCKS, project["readme"], *project["license-files"]}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == needed | {"src", *FOLDERS}
    assert "extra-index-url" not in (ROOT / "Dockerfile").read_text().lower()


def pins(name: str) -> dict[str, str]:
    """Return package -> version."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\n]+)", (ROOT / name).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found}


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[^a-z0-9-]", name.lower())[0] for name in requirements}


def test_the_locks_hold_what_was_tested_with_hashes() -> None:
    """`make lock` brings them up to date. The runtime's has what a node needs, and no tool of developers.

    torch comes separately, from the index with the wanted build; fastecdsa has no wheel, and is never imported.
    """
    locked, runtime = pins("requirements.lock") | pins("requirements-cuda.lock"), pins("requirements-runtime.lock")
    for pinned in (locked, runtime):
        assert (
            pinned.items()
            >= {name: version for name, version in pins("constraints.txt").items() if name in pinned}.items()
        )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed, extras = names_of(project["dependencies"]), project["optional-dependencies"]
    assert needed | names_of([*extras["tokenizers"], *extras["hf"], *extras["data"]]) <= set(locked)
    for lock in LOCKS:
        packages = re.split(r"\n(?=\S)", (ROOT / lock).read_text().strip())
        assert [text for text in packages if not re.search(r"--hash=sha256:[0-9a-f]{64}", text)] == []
    assert needed - set(runtime) == {"torch"}
    assert set(runtime) & {"pytest", "mypy", "ruff", "transformers", "triton", "pyarrow"} == set()
    text = (ROOT / "requirements-runtime.lock").read_text()
    assert re.search(r"^fastecdsa==\S+ ; sys_platform == 'never'", text, re.MULTILINE)


def test_citation_and_changelog_name_this_release() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["title"], citation["version"]) == (project["name"], project["version"])
    assert citation["license"] == project["license"]
    assert citation["repository-code"] == project["urls"]["Source"]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    is_released = ".dev" not in project["version"]
    assert project["version"] in headings if is_released else headings[0] == "Unreleased"


def test_what_is_pinned_installs_with_the_python_of_debian_12() -> None:
    """The set-up failed there once: a package of this environment needed Python 3.11.5."""
    key = "Requires-Python"
    needs = {dist.name: dist.metadata[key] for dist in distributions() if key in dist.metadata}
    assert "pymdown-extensions" in needs
    assert [name for name, versions in needs.items() if not SpecifierSet(versions).contains(DEBIANS_PYTHON)] == []
