"""Checks that need no network: the node's folder and key, the disk, ports, PyTorch and its device, a run's inputs."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec
import trio

from farandole.protocol.planning.needs import Needs
from farandole.protocol.run.manifest import Manifest
from farandole.training.base.errors import how_to_add
from farandole.training.base.host_memory import available_bytes, total_bytes

from ...base.figures import size
from ...base.identity import KEY_BYTES, IdentityInUseError, locked
from ...base.requirements import MemoryTooSmallError, line_shortfall, memory_needed, memory_shortfall
from ...base.settings import NodeSettings
from ...base.system.files import others_may
from ...base.system.processes import has_nvidia_driver
from ...base.system.sockets import NO_IPV6
from ...store.disk_space import used_bytes
from .causes import Finding, found

# Size of the test file: more than a file system reserves for its own small needs.
PROBE_BYTES: Final = 1 << 20
# While no run is known: a run state, two log files (`farandole.node.base.logs`), a checkpoint of the smallest model.
MIN_FREE_BYTES: Final = 256 << 20
# While no run is known: the needs of a model of 125 million parameters, which is a likely one.
GOOD_FREE_BYTES: Final = 10 << 30
# PyTorch is a gigabyte, which a slow disk takes long to read.
TORCH_TIMEOUT: Final = 60.0
_STREAMS_NEED: Final = "datasets"
_LISTEN: Final = re.compile(r"/ip[46]/([^/]+)/tcp/(\d{1,5})")


def check_home(home: Path) -> Finding:
    """Check whether the node's folder can be used, or made."""
    try:
        if not home.exists():
            above = _nearest_folder(home)
            is_fine = os.access(above, os.W_OK | os.X_OK)
            return found("home-missing", home=home) if is_fine else found("home-unwritable", home=home, why="denied")
        if not home.is_dir():
            return found("home-unwritable", home=home, why="not a folder")
        _write_to(home, b".")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return found("home-fine", home=home)  # the matter of `check_disk`
        return found("home-unwritable", home=home, why=error.strerror)
    return found("home-fine", home=home)


def check_key(key: Path) -> Finding:
    """Check whether the key file exists, is complete, and is private to its owner."""
    try:
        mode = others_may(key)
        num_bytes = len(key.read_bytes())
    except FileNotFoundError:
        return found("key-missing", key=key)
    except OSError as error:
        return found("key-unreadable", key=key, why=error.strerror)
    if num_bytes != KEY_BYTES:
        return found("key-broken", key=key, size=num_bytes, wanted=KEY_BYTES)
    if mode:
        return found("key-readable-by-others", key=key, mode=f"{mode:o}")
    return found("key-fine", key=key)


def is_node_running(lock: Path) -> bool:
    """Return whether a node runs with this folder's key."""
    try:
        if lock.exists():
            with locked(lock):
                return False
    except IdentityInUseError:
        return True
    except (OSError, ValueError):
        return False
    return False


def check_disk(home: Path, needs: Needs | None = None) -> Finding:
    """Check for disk space by writing: the system's figures omit quotas and reserved blocks.

    ``needs``: the run's, if it is known. Files that the folder already has are subtracted.
    """
    folder = _nearest_folder(home)
    free = shutil.disk_usage(folder).free
    least, good = MIN_FREE_BYTES, GOOD_FREE_BYTES
    if needs is not None:
        taken = used_bytes(home)
        least, good = (max(PROBE_BYTES, needed - taken) for needed in (needs.least_disk_bytes, needs.disk_bytes))
    cause = "disk-nearly-full" if free < least else "disk-small" if free < good else "disk-fine"
    if needs is not None and cause != "disk-fine":
        cause += "-for-run"
    try:
        if folder == home:
            _write_to(home, bytes(PROBE_BYTES))
    except OSError as error:
        cause = "disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else cause
    cause = "disk-full" if free < PROBE_BYTES else cause
    return found(cause, home=home, free=size(free), least=size(least), good=size(good))


def check_memory(manifest: Manifest | None, settings: NodeSettings, *, is_running: bool) -> Finding:
    """Check whether the run's model fits in memory; ``is_running``: a node already holds it."""
    if manifest is None:
        return found("memory-untold")
    needed = memory_needed(manifest, settings)
    if is_running:
        return found("memory-in-use", needed=size(needed.host))
    available = available_bytes()
    try:
        words = memory_shortfall(needed, total_bytes(), available)
    except MemoryTooSmallError as error:
        return found("memory-too-little", why=error)
    if words:
        return found("memory-short", why=words)
    return found("memory-fine", needed=size(needed.host), free="unknown" if available is None else size(available))


def _nearest_folder(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def _write_to(home: Path, data: bytes) -> None:
    """Write a file of its own, as several checks do this at once, and remove it. Raises `OSError`."""
    with tempfile.NamedTemporaryFile(prefix="doctor.", suffix=".probe", dir=home) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


async def check_ports(listen: Sequence[str], kept: Mapping[str, int], *, is_running: bool) -> list[Finding]:
    """Check whether each address can be listened on.

    ``kept``: multiaddr with port 0 -> the port on which the node listened there before. ``is_running``: this folder's
    node may already listen.
    """
    findings = []
    for address in listen:
        port = kept.get(address)
        place = address if port is None else f"{address.removesuffix('0')}{port}"
        finding = await _check_port(place, is_running=is_running)
        is_lost = port is not None and finding.cause == "port-taken"
        findings.append(found("port-kept-taken", port=port) if is_lost else finding)
    return findings


async def _check_port(address: str, *, is_running: bool) -> Finding:
    match = _LISTEN.fullmatch(address)
    if match is None or int(match[2]) > 65_535:
        return found("port-no-address", address=address)
    try:
        for listener in await trio.open_tcp_listeners(int(match[2]), host=match[1]):
            await listener.aclose()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return found("port-ours" if is_running else "port-taken", address=address)
        if error.errno == errno.EACCES:
            return found("port-forbidden", address=address)
        if match[1] == "::" and error.errno in NO_IPV6:
            return found("port-no-ipv6", address=address)
        return found("port-unusable", address=address, why=error.strerror or error)
    return found("port-fine", address=address)


class TorchReport(msgspec.Struct, frozen=True):
    """The output of `farandole.node.app.doctor.torch_probe`."""

    version: str
    device: str = ""
    error: str = ""


async def check_torch(device: str) -> Finding:
    """Check PyTorch and the device in a process of its own, like the trainer's, so that this one needs no torch."""
    command = [sys.executable, "-P", "-m", "farandole.node.app.doctor.torch_probe", device]
    try:
        with trio.fail_after(TORCH_TIMEOUT):
            done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    except trio.TooSlowError:
        return found("torch-slow", seconds=TORCH_TIMEOUT)
    return judge_torch(done, has_nvidia=has_nvidia_driver())


def judge_torch(done: subprocess.CompletedProcess[bytes], *, has_nvidia: bool) -> Finding:
    """Judge PyTorch by the output of the finished probe process."""
    try:
        report = msgspec.json.decode(done.stdout, type=TorchReport)
    except msgspec.MsgspecError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return found("torch-broken", why=lines[-1] if lines else f"exit status {done.returncode}")
    if report.error:
        return found("device-missing", version=report.version, why=report.error)
    if has_nvidia and report.device.startswith("CPU"):
        return found("gpu-unused", version=report.version, device=report.device)
    return found("torch-fine", version=report.version, device=report.device)


def check_data(paths: Sequence[Path], streams: Sequence[str] = ()) -> list[Finding]:
    """Check whether files and folders of text can be read, and streams be opened, as far as this machine can know."""
    if paths and streams:
        return [found("data-two-kinds")]
    return [*map(_check_data, paths), *map(_check_stream, streams)] or [found("data-none")]


def _check_data(path: Path) -> Finding:
    try:
        if path.is_dir():
            is_fine = os.access(path, os.R_OK | os.X_OK) and any(names for _, _, names in os.walk(path))
            return found("data-fine" if is_fine else "data-empty", path=path)
        with path.open("rb") as file:
            return found("data-fine" if file.read(1) else "data-empty", path=path)
    except OSError as error:
        return found("data-unreadable", path=path, why=error.strerror)


def _check_stream(name: str) -> Finding:
    from farandole.training.data.streaming import is_data_set  # imports numpy, which the doctor does not need

    if not is_data_set(name):
        return found("data-no-stream", name=name)
    if find_spec(_STREAMS_NEED) is None:
        return found("data-no-package", name=name, package=_STREAMS_NEED, command=how_to_add("data"))
    return found("data-stream", name=name)


def check_needs(manifest: Manifest, settings: NodeSettings) -> list[Finding]:
    """Return a finding for each input that the run requires of every node and the settings lack.

    Reads the tokenizer's file.
    """
    needs: list[Finding] = []
    if manifest.data.source == "text" and not (settings.data or settings.stream):
        needs.append(found("run-needs-text"))
    if manifest.tokenizer.kind == "tokenizers":
        path, sha256 = settings.tokenizer, manifest.tokenizer.sha256
        if path is None:
            needs.append(found("run-needs-tokenizer", sha256=sha256))
        else:
            try:
                if (digest := hashlib.sha256(path.read_bytes()).hexdigest()) != sha256:
                    needs.append(found("run-tokenizer-other", path=path, digest=digest, sha256=sha256))
            except OSError as error:
                needs.append(found("run-tokenizer-unreadable", path=path, why=error.strerror))
    own = manifest.model.own
    if own is not None and own.function not in settings.allow_model:
        needs.append(found("run-needs-model", function=own.function, package=own.package or "no package that it names"))
    if words := line_shortfall(manifest, settings.upload_mbit, settings.download_mbit):
        needs.append(found("run-needs-line", why=words))
    return needs
