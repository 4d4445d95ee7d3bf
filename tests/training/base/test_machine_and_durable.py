"""What a machine is taken for, and files that survive it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from farandole.training.base.device import CONTEXT_BYTES, Device, choose_device, limit_memory
from farandole.training.base.durable import replacing
from farandole.training.base.errors import TrainingError, how_to_add
from farandole.training.base.host_memory import available_bytes, total_bytes

MEMINFO = "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 8000 kB\n"
NO_LIMIT = str(2**63 - 4096)  # what version 1 says


def system(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def version_2(folder: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup{folder}"
    stat = f"anon {used - cache}\nfile {cache}\ninactive_file {cache}\n"
    return {f"{base}/memory.max": limit, f"{base}/memory.current": str(used), f"{base}/memory.stat": stat}


def version_1(folder: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/memory{folder}"
    stat = f"inactive_file 1\ntotal_inactive_file {cache}\n"
    return {
        f"{base}/memory.limit_in_bytes": limit,
        f"{base}/memory.usage_in_bytes": str(used),
        f"{base}/memory.stat": stat,
    }


def test_without_limits_it_is_what_the_machine_has_and_another_system_says_nothing(tmp_path: Path) -> None:
    assert (available_bytes(tmp_path), total_bytes(tmp_path)) == (None, None)
    files = version_2("/a", "max", 500) | version_1("", NO_LIMIT, 500)
    assert available_bytes(system(tmp_path, "4:memory:/\n0::/a\n", files)) == 8_000 * 1_024


@pytest.mark.parametrize("version", [version_1, version_2])
@pytest.mark.parametrize("mounted_at", ["/docker/ab", ""])  # as the machine sees it, or the container
def test_a_containers_limit_holds_less_what_is_used_and_is_no_mere_cache(
    tmp_path: Path, version: object, mounted_at: str
) -> None:
    of_group = version_1 if version is version_1 else version_2
    line = "4:memory:/docker/ab" if version is version_1 else "0::/docker/ab"
    root = system(tmp_path, f"{line}\n7:cpu:/elsewhere\n", of_group(mounted_at, "1000000", 700_000, cache=200_000))
    assert available_bytes(root) == 500_000


def test_all_of_it_and_what_is_left_are_the_least_of_the_machine_and_of_all_groups_above(tmp_path: Path) -> None:
    files = version_2("/user/node", "3000000", 100) | version_2("/user", "1000000", 900_000)
    limited = system(tmp_path / "limited", "0::/user/node\n", files)
    assert (total_bytes(limited), available_bytes(limited)) == (1_000_000, 100_000)
    assert total_bytes(system(tmp_path / "free", "0::/a\n", version_2("/a", "max", 500))) == 9_000 * 1_024


def test_in_a_real_group_with_a_limit(tmp_path: Path) -> None:
    top = Path("/sys/fs/cgroup/memory")
    if os.geteuid() or not (top / "memory.limit_in_bytes").exists():
        pytest.skip("needs root, and control groups of version 1")
    group = top / f"farandole-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        code = "from farandole.training.base.host_memory import available_bytes; print(available_bytes())"
        join = f"open('{group}/cgroup.procs', 'w').write('0'); "
        result = subprocess.run([sys.executable, "-c", join + code], capture_output=True, text=True, check=True)
        assert 0 < int(result.stdout) <= 64 << 20
    finally:
        group.rmdir()


# Devices


GB = 10**9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_taken_of_a_gpu_is_told() -> None:
    device = choose_device("cuda")
    kept = torch.zeros(2**20, device=device.torch_device)
    memory = device.memory()
    assert memory is not None
    taken, total = memory
    assert kept.nbytes <= taken < total


def test_memory_is_bounded_where_there_is_a_gpu_alone_and_what_cuda_itself_takes_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounded: list[tuple[float, int]] = []
    properties = SimpleNamespace(total_memory=16 * GB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, index: bounded.append((share, index))
    )
    gpu = Device(torch.device("cuda", 1), "a GPU")
    limit_memory(gpu, 8 * GB)
    limit_memory(gpu, 20 * GB)
    with pytest.raises(TrainingError, match="driver"):
        limit_memory(gpu, CONTEXT_BYTES)
    assert bounded == [((8 * GB - CONTEXT_BYTES) / (16 * GB), 1), (1.0, 1)]
    with pytest.raises(TrainingError, match="limits the memory of a GPU"):
        limit_memory(choose_device("cpu"), 8 * GB)


@pytest.mark.parametrize("name", ["tpu", "", "cpu:x", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(TrainingError):
        choose_device(name)


STATED = ["torch>=2.4", 'datasets>=4; extra == "data"', "transformers>=5,<6; extra == 'hf'"]


def test_the_command_names_this_python_and_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: STATED)
    assert how_to_add("data") == f"{sys.executable} -m pip install 'datasets>=4'"
    assert how_to_add("hf") == f"{sys.executable} -m pip install 'transformers>=5,<6'"


def test_an_environment_without_pip_is_uvs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: STATED)
    monkeypatch.setattr("farandole.training.base.errors.find_spec", lambda name: None)
    assert how_to_add("data") == f"uv pip install --python {sys.executable} 'datasets>=4'"


fcntl = pytest.importorskip("fcntl", reason="Windows has no fcntl")
FULL_FSYNC = 51  # sys/fcntl.h of macOS


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a system that says it is macOS is asked for."""
    asked = []

    def fsync(descriptor: int) -> None:
        asked.append("fsync")

    def control(descriptor: int, command: int) -> None:
        assert command == FULL_FSYNC
        asked.append("F_FULLFSYNC")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL_FSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", fsync)
    return asked


def save(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"new")


def test_a_macs_drive_is_told_to_write_what_it_has(tmp_path: Path, asked: list[str]) -> None:
    save(tmp_path / "file")

    assert (tmp_path / "file").read_bytes() == b"new"
    assert asked == ["F_FULLFSYNC"] * 2  # the file, and the folder with its name


@pytest.mark.parametrize(("code", "is_saved"), [(errno.ENOTSUP, True), (errno.EIO, False)])
def test_only_a_file_system_that_cannot_tell_its_drive_is_asked_for_less(
    code: int, is_saved: bool, tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, command: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    if is_saved:
        save(tmp_path / "file")
        assert asked == ["fsync"] * 2
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            save(tmp_path / "file")
        assert not (tmp_path / "file").exists()
        assert asked == []
