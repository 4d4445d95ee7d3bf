"""The benchmark of exchanges, with small payloads and without the other projects."""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from farandole.testnet.bench.exchange import PATHS, Averaging, ExchangeFigures, measure
from farandole.testnet.bench.mesh import OURS
from farandole.testnet.bench.process import (
    BenchError,
    obtain_python,
    open_worker,
    worker_command,
)
from farandole.testnet.bench.report import open_bench


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of a small benchmark."""
    folder = tmp_path_factory.mktemp("bench")
    with open_bench("exchange", folder, repeats=1) as bench:
        figures = measure(
            bench,
            sizes_mb=[1, 2],
            repeats=1,
            vector_mb=2,
            loop_mb=4,
            mesh_requests=4,
        )
        bench.publish(figures.report(bench.setting))
    result: dict[str, Any] = json.loads((folder / "exchange.json").read_text())
    return result


def test_each_path_is_measured_with_each_size(document: dict[str, Any]) -> None:
    results = document["one_way"]
    assert [(result["size_mb"], result["path"]) for result in results] == list(product((1, 2), PATHS))
    for result in results:
        assert result["mb_s"] > 0
        assert (result["of_raw"] == 1) == (result["path"] == "raw end")


def test_both_partners_hold_the_mean(document: dict[str, Any]) -> None:
    full, small = document["averagings"]
    assert (full["codec"], small["codec"]) == ("fp32", "int8")
    assert full["payload_mb"] == 2
    assert small["payload_mb"] == pytest.approx(2 * 8.125 / 32, rel=1e-3)
    assert full["rms_error"] < 1e-6 < small["rms_error"] < 0.01


def test_the_loop_is_watched_and_programs_use_the_mesh_of_two_daemons(document: dict[str, Any]) -> None:
    loop = document["loop"]
    assert loop["moved_mb"] == 4
    assert 0 <= loop["p50_ms"] <= loop["p99_ms"] <= loop["max_ms"]
    (ours,) = document["mesh"]
    assert ours["who"] == OURS
    assert min(ours["call"], ours["push"], ours["fetch"]) > 0
    claims = [claim["claim"] for claim in document["claims"]]
    assert "least share of a raw socket's rate on the bulk channel, from 2 MB" in claims
    assert document["setting"]["repeats"] == 1
    assert {"command", "date", "cores", "Python", "torch"} <= document["setting"].keys()
    assert document["tables"][-1]["rows"][1].startswith(f"{OURS} | ")


def test_how_others_do_stands_beside_ours() -> None:
    def averaging(who: str, exchange_s: float) -> Averaging:
        return Averaging(who, "fp32", 100.0, 0.1, exchange_s, 0.2, 0.0, 1.0)

    exchange, whole, *_ = ExchangeFigures(100, averagings=[averaging(OURS, 0.2), averaging("hivemind", 0.9)]).claims()
    assert (exchange.ours, exchange.theirs) == ("0.200", "0.900")
    assert (whole.ours, whole.theirs) == ("0.500", "1.200")


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = worker_command("no such part")
    with open_worker("broken", command, log) as worker, pytest.raises(BenchError, match="broken"):
        worker.ask("open", address=None)
    assert "no such part" in log.read_text()


def test_a_project_that_cannot_be_installed_is_a_problem_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(BenchError, match="lattica could not be installed: "):
        obtain_python("lattica", tmp_path, lambda _: None)
    assert not (tmp_path / "lattica" / "installed").exists()


DEAF = [sys.executable, "-c", "import time; time.sleep(1_000)"]


def test_an_interrupted_benchmark_kills_a_process_that_does_not_listen(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_worker("deaf", DEAF, tmp_path / "log") as worker:
        raise KeyboardInterrupt

    assert worker._process.returncode == -signal.SIGKILL


def test_what_a_process_has_started_is_killed_with_it(tmp_path: Path) -> None:
    """The child holds the other end of a pipe, which ends when both are gone."""
    reader, writer = os.pipe()
    starts_a_child = "import subprocess, sys; subprocess.Popen(sys.argv[1:-2], pass_fds=[int(sys.argv[-1])]).wait()"
    command = [sys.executable, "-c", starts_a_child, *DEAF]
    with open_worker("parent", command, tmp_path / "log", [writer]) as worker, open(reader, "rb") as pipe:
        os.close(writer)
        worker.kill()
        assert pipe.read() == b""
