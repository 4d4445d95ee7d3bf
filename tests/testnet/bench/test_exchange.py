"""The benchmark of exchanges, with small payloads and without the other projects."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.testnet.bench.exchange import OURS, claims_of, measure
from farandole.testnet.bench.process import BenchError, open_worker, worker_command
from farandole.testnet.bench.report import open_bench


def test_each_part_is_measured_and_each_has_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the mesh of two daemons, which `tests/documents/test_long.py` measures."""
    costs = {OURS: {"call": 0.001, "push": 0.5, "fetch": 1.0}}
    monkeypatch.setattr("farandole.testnet.bench.exchange.measure_mesh", lambda *_: costs)
    with open_bench("exchange", tmp_path, repeats=1) as bench:
        figures = measure(bench, sizes_mb=[1, 2], repeats=1, vector_mb=2)
        bench.publish([*claims_of(figures, 2)], figures)
    document: dict[str, Any] = json.loads((tmp_path / "exchange.json").read_text())
    assert document["sizes"].keys() == {"1", "2"}
    for size in document["sizes"].values():
        assert min(size["mb_s"], size["of_raw"]) > 0
        assert 0 <= size["p50"] <= size["p99"] <= size["most_ms"]
    full, small = (document["averagings"][f"{OURS}, {codec}"] for codec in ("fp32", "int8"))
    assert (full["payload_mb"], small["payload_mb"]) == (2, pytest.approx(2 * 8.125 / 32, rel=1e-3))
    assert full["most_error"] < 1e-6 < small["most_error"] < 0.01, "both partners hold the mean"
    claims = [claim["claim"] for claim in document["claims"]]
    assert "least share of a raw socket's rate on the bulk channel, from 1 MB" in claims
    assert document["setting"]["repeats"] == 1
    assert {"command", "date", "cores", "Python", "torch"} <= document["setting"].keys()


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = worker_command("nothing")
    with open_worker("broken", command, log) as worker, pytest.raises(BenchError, match="broken"):
        worker.ask("listen")
    assert "farandole.testnet.bench.worker.nothing" in log.read_text()


DEAF = [sys.executable, "-c", "import time; time.sleep(1_000)"]


def test_an_interrupted_benchmark_kills_a_process_that_does_not_listen(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_worker("deaf", DEAF, tmp_path / "log") as worker:
        raise KeyboardInterrupt

    assert worker._process.returncode == -signal.SIGKILL


def test_what_a_process_has_started_is_killed_with_it(tmp_path: Path) -> None:
    """The child holds the other end of the socket, which ends when both are gone."""
    starts_a_child = "import subprocess, sys; subprocess.Popen(sys.argv[1:-1], pass_fds=[int(sys.argv[-1])]).wait()"
    with open_worker("parent", [sys.executable, "-c", starts_a_child, *DEAF], tmp_path / "log") as worker:
        worker.kill()
        with pytest.raises(BenchError, match="has ended"):
            worker.get()
