"""Checks that need no network: the node's folder and key, the disk, ports, PyTorch and its device, what a run needs.

`farandole doctor` reports them all. `farandole join` makes those of the trainer before any weights are downloaded: with
a wrong device or without the run's text, a node would join, and end when its trainer starts.
"""

from __future__ import annotations

import errno
import hashlib
import math
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

from farandole.protocol.planning.needs import Memory, Needs, needs_of, needs_of_stage
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.own_model import ADAPTERS, OwnModel
from farandole.training.base.errors import TrainingError, how_to_add
from farandole.training.base.host_memory import available_bytes, total_bytes
from farandole.training.model.base_folder import require_base
from farandole.training.model.own_function import is_allowed

from ..base.causes import Finding, found
from ..base.figures import BYTES_PER_MBIT, mbit, size
from ..base.identity import KEY_BYTES
from ..base.requirements import exchange_line
from ..base.settings import NodeSettings
from ..base.system.files import others_may
from ..base.system.processes import has_nvidia_driver
from ..base.system.sockets import NO_IPV6
from ..store.disk_space import used_bytes

# Size of the test file: more than a file system reserves for its own small needs.
PROBE_BYTES: Final = 1 << 20
# While no run is known: a run state, two log files (`farandole.node.base.logs`), a checkpoint of the smallest model.
MIN_FREE_BYTES: Final = 256 << 20
# While no run is known: the needs of a model of 125 million parameters, which is a likely one.
GOOD_FREE_BYTES: Final = 10 << 30
# PyTorch is a gigabyte, which a slow disk takes long to read.
TORCH_TIMEOUT: Final = 60.0
# Share of a trainer's computed memory that must be there at least: the computation is not more accurate than this.
LEAST_SHARE: Final = 0.9
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
    try:
        if folder == home:
            _write_to(home, bytes(PROBE_BYTES))
    except OSError as error:
        cause = "disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else cause
    cause = "disk-full" if free < PROBE_BYTES else cause
    return found(cause, home=home, free=size(free), least=size(least), good=size(good))


def check_memory(manifest: Manifest | None, settings: NodeSettings, *, is_running: bool) -> Finding:
    """Check whether the run's model fits in memory; ``is_running``: a node already holds it.

    The kernel kills a trainer with too little again and again, without a message.
    """
    if manifest is None:
        return found("memory-untold")
    needed = memory_needed(manifest, settings)
    total, available = total_bytes(), available_bytes()
    cause = "memory-fine"
    if is_running:
        cause = "memory-in-use"
    elif total is not None and total < LEAST_SHARE * needed.host:
        cause = "memory-too-little"
    elif available is not None and available < needed.host:
        cause = "memory-short"
    has, free = ("unknown" if memory is None else size(memory) for memory in (total, available))
    gpu = "" if needed.device else " or a GPU"
    return found(cause, needed=size(needed.host), free=free, total=has, gpu=gpu)


def memory_needed(manifest: Manifest, settings: NodeSettings) -> Memory:
    """Estimate a trainer's memory here without torch; for the smallest stage if the node chooses its stage.

    A base model comes to the host's memory first, in a run that has one.
    """
    device, stage = settings.device, settings.stage
    model = manifest.model
    stages = range(model.num_stages) if stage is None or stage >= model.num_stages else [stage]
    has_gpu = device.startswith("cuda") or (device == "auto" and has_nvidia_driver())
    needs = (needs_of_stage(manifest, each, recomputes=settings.recompute) for each in stages)
    memories = (each.memory(has_gpu=has_gpu, is_lean=settings.lean) for each in needs)
    needed = min(memories, key=lambda memory: memory.host)
    if settings.base is None or model.own is None or model.own.function != ADAPTERS:
        return needed
    base = sum(path.stat().st_size for path in settings.base.glob("*.safetensors"))
    return Memory(needed.host + base, needed.device + base if has_gpu else 0)


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
        cause, why = "port-no-address", ""
        match = _LISTEN.fullmatch(place)
        if match is not None and int(match[2]) <= 65_535:
            cause = "port-fine"
            try:
                for listener in await trio.open_tcp_listeners(int(match[2]), host=match[1]):
                    await listener.aclose()
            except OSError as error:
                why = error.strerror or str(error)
                if error.errno == errno.EADDRINUSE:
                    cause = "port-ours" if is_running else "port-taken" if port is None else "port-kept-taken"
                elif match[1] == "::" and error.errno in NO_IPV6:
                    cause = "port-no-ipv6"
                else:
                    cause = "port-unusable"
        findings.append(found(cause, address=place, port=port, why=why))
    return findings


def check_torch_is_there() -> list[Finding]:
    """Return a finding if PyTorch is not installed, without importing it, which takes seconds."""
    is_there = find_spec("torch") is not None
    return [] if is_there else [found("torch-broken", why="it is not installed", python=sys.executable)]


async def check_torch(device: str) -> Finding:
    """Check PyTorch and the device in a process of its own, like the trainer's, so that this one needs no torch."""
    command = [sys.executable, "-P", "-m", "farandole.training.base.device", device]
    try:
        with trio.fail_after(TORCH_TIMEOUT):
            done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    except trio.TooSlowError:
        return found("torch-slow", seconds=TORCH_TIMEOUT)
    return judge_torch(done, has_nvidia=has_nvidia_driver())


def judge_torch(done: subprocess.CompletedProcess[bytes], *, has_nvidia: bool) -> Finding:
    """Judge PyTorch by the output of the finished probe process."""
    try:
        report = msgspec.json.decode(done.stdout, type=dict[str, str])
    except msgspec.MsgspecError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return found(
            "torch-broken", why=lines[-1] if lines else f"exit status {done.returncode}", python=sys.executable
        )
    version, device = report["version"], report.get("device", "")
    if not device:
        return found("device-missing", version=version, why=report["error"])
    is_unused = has_nvidia and device.startswith("CPU")
    return found("gpu-unused" if is_unused else "torch-fine", version=version, device=device)


def check_data(paths: Sequence[Path], streams: Sequence[str] = ()) -> list[Finding]:
    """Check whether files and folders of text can be read, and streams be opened, as far as this machine can know."""
    if paths and streams:
        return [found("data-two-kinds")]
    findings = [_check_data(path) for path in paths]
    for name in streams:
        from farandole.training.data.streaming import is_data_set  # imports numpy, which the doctor does not need

        if not is_data_set(name):
            findings.append(found("data-no-stream", name=name))
        elif find_spec(_STREAMS_NEED) is None:
            package = found("data-no-package", name=name, package=_STREAMS_NEED, command=how_to_add("data"))
            findings.append(package)
        else:
            findings.append(found("data-stream", name=name))
    return findings or [found("data-none")]


def _check_data(path: Path) -> Finding:
    try:
        if path.is_dir():
            is_fine = os.access(path, os.R_OK | os.X_OK) and any(names for _, _, names in os.walk(path))
            return found("data-fine" if is_fine else "data-empty", path=path)
        if path.suffix == ".parquet" and find_spec("pyarrow") is None:
            return found("data-no-package", name=path, package="pyarrow", command=how_to_add("data"))
        with path.open("rb") as file:
            return found("data-fine" if file.read(1) else "data-empty", path=path)
    except OSError as error:
        return found("data-unreadable", path=path, why=error.strerror)


def check_needs(manifest: Manifest, settings: NodeSettings) -> list[Finding]:
    """Return a finding for each thing that the run requires of a node that trains, and this one lacks.

    Reads the tokenizer's file, and a base model's weights.
    """
    needs: list[Finding] = []
    if manifest.data.source == "text" and not (settings.data or settings.stream):
        needs.append(found("run-needs-text"))
    own = manifest.model.own
    if own is not None and own.function == ADAPTERS:
        needs += _check_base(own, settings)
    elif own is not None and not is_allowed(own.function, settings.allow_model):
        needs.append(found("run-needs-model", function=own.function, package=own.package or "no package that it names"))
    if manifest.tokenizer.kind == "tokenizers":
        path, sha256, why = settings.tokenizer, manifest.tokenizer.sha256, ""
        if path is None:
            needs.append(found("run-needs-tokenizer", sha256=sha256))
        else:
            try:
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                why = "" if digest == sha256 else f"has SHA-256 {digest}"
            except OSError as error:
                why = f"cannot be read ({error.strerror})"
        if why:
            needs.append(found("run-tokenizer-other", path=path, why=why, sha256=sha256))
        needs += _check_package("tokenizer", "tokenizers", "tokenizers")
    if manifest.model.hf is not None:
        needs += _check_package("model", "transformers", "hf")
    return needs


def _check_base(own: OwnModel, settings: NodeSettings) -> list[Finding]:
    """Return what keeps this machine from training adapters of a base model."""
    if settings.base is None:
        return [found("run-needs-base", why="")]
    try:
        require_base(settings.base, str(own.config["base"]))
    except (TrainingError, KeyError) as error:
        return [found("run-needs-base", why=f": {error}")]
    return _check_package("adapters", "peft", "lora")


def _check_package(what: str, package: str, extra: str) -> list[Finding]:
    if find_spec(package) is not None:
        return []
    return [found("run-needs-package", what=what, package=package, command=how_to_add(extra))]


def check_line(manifest: Manifest, upload_mbit: float, download_mbit: float) -> list[Finding]:
    """Return a finding if the bandwidth caps are too low for a run. 0: no cap."""
    needs = needs_of(manifest)
    caps = zip(("--upload-mbit", "--download-mbit"), (upload_mbit, download_mbit), strict=True)
    low = {flag: cap for flag, cap in caps if cap and cap * BYTES_PER_MBIT < needs.rate}
    if not low:
        return []
    rate = min(low.values()) * BYTES_PER_MBIT
    has_chances = rate >= needs.least_rate
    return [
        found(
            "run-needs-line",
            rate=mbit(needs.rate),
            caps=" and ".join(f"{flag} {cap:g}" for flag, cap in low.items()),
            exchange=exchange_line(needs, manifest, rate),
            chances="only exchanges whose partner is ready early are over in time"
            if has_chances
            else "no exchange can be over in time",
            flags=" and ".join(low),
            least=math.ceil(needs.rate / BYTES_PER_MBIT),
        )
    ]


def check_run(manifest: Manifest, settings: NodeSettings) -> list[Finding]:
    """Compare a run with the settings of a node: what it lacks, and the caps of its line.

    A loop of the user's own brings what it needs.
    """
    needs = check_needs(manifest, settings) if settings.trainer == "own" else []
    return [*needs, *check_line(manifest, settings.upload_mbit, settings.download_mbit)]
