"""Benchmarks, small or from given figures; `tests/documents/test_long.py` measures more."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from farandole.node.status.round_log import RoundRecord
from farandole.protocol.run.models import num_parameters, preset
from farandole.testnet.bench import exchange, hostile, join, nat, report, save
from farandole.testnet.bench.hostile import FloodResult
from farandole.testnet.bench.nat import ALL_PAIRS, PairResult, measure_pair
from farandole.testnet.bench.process import BenchError, open_worker, open_workers, worker_command
from farandole.testnet.bench.report import PAGE, RESULTS, Claim, KeptResult, open_bench, page
from farandole.testnet.bench.stages import Turn, claims_of, turn_of, wrong
from farandole.testnet.bench.trainer import rate_of
from farandole.testnet.bench.worker.stages import Task


def test_each_part_is_measured_and_each_has_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the mesh of two daemons, which `tests/documents/test_long.py` measures."""
    costs = {exchange.OURS: {"call": 0.001, "push": 0.5, "fetch": 1.0}}
    monkeypatch.setattr("farandole.testnet.bench.exchange.measure_mesh", lambda *_: costs)
    with open_bench("exchange", tmp_path, repeats=1) as bench:
        figures = exchange.measure(bench, sizes_mb=[1, 2], repeats=1, vector_mb=2)
        bench.publish([*exchange.claims_of(figures, 2)], figures)
    document: dict[str, Any] = json.loads((tmp_path / "exchange.json").read_text())
    assert document["sizes"].keys() == {"1", "2"}
    for size in document["sizes"].values():
        assert min(size["mb_s"], size["of_raw"]) > 0
        assert 0 <= size["p50"] <= size["p99"] <= size["most_ms"]
    full, small = (document["averagings"][f"{exchange.OURS}, {codec}"] for codec in ("fp32", "int8"))
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


def test_what_strangers_cost_is_claimed_and_limited(tmp_path: Path) -> None:
    row = FloodResult("garbage", 3.0, {"descriptors": 1, "tasks": 0}, dials=10, dial_max=0.5)
    with open_bench("hostile", tmp_path) as bench:
        hostile.publish(bench, [row])
        claims = json.loads((tmp_path / "hostile.json").read_text())["claims"]
        assert [claim["ours"] for claim in claims] == ["0.50", "0", "3", "1"]
        bad = replace(row, over_mb=65.0, left_over={"tasks": 7}, dial_max=2.5, failures=["1 s: refused"])
        with pytest.raises(BenchError, match="honest dials that failed, of 21: 1, not at most 0; garbage: memory"):
            hostile.publish(bench, [row, bad])
    assert len(json.loads((tmp_path / "hostile.json").read_text())["misses"]) == 4


def test_a_newcomer_joins_from_two_and_from_one(tmp_path: Path) -> None:
    with open_bench("join", tmp_path) as bench:
        figures = join.measure(bench, size_mb=32, repeats=1, with_link=False)
        bench.publish(join.claims_of(figures), figures)
    assert {"two_donors_s", "one_donor_s"} <= figures.keys()
    assert "hivemind_s" not in figures
    assert json.loads((tmp_path / "join.json").read_text())["size_mb"] == 32
    assert not list(tmp_path.glob("*.safetensors*"))


@pytest.mark.soak
@pytest.mark.usefixtures("networks")
def test_on_a_slow_line_a_newcomer_uses_it_and_the_others_rounds_hardly_notice(tmp_path: Path) -> None:
    with open_bench("join", tmp_path) as bench:
        figures = join.measure(bench, size_mb=40, repeats=1)
    assert figures["link_over_ideal"] <= 1.5
    assert figures["rounds_slower"] <= 0.05


def test_what_does_not_hold_is_said(tmp_path: Path) -> None:
    good = PairResult("firewall", "carrier", "punched", "punched", 12.0, 12.2, "bulk", 0.4)
    late = PairResult("firewall", "carrier", "punched", "relayed", 31.0, None, "relayed stream", 5.4)
    none = PairResult("open", "open", "direct", failure="no exchange")
    with open_bench("nat", tmp_path) as bench, pytest.raises(BenchError):
        nat.publish(bench, [good, late, none])
    document = json.loads((tmp_path / "nat.json").read_text())
    assert document["misses"] == [
        "firewall / carrier: connected only after 31 s",
        "firewall / carrier: relayed, where plain sockets get through",
        "open / open: not connected",
        "open / open: no exchange",
    ]
    assert [claim["ours"] for claim in document["claims"]] == ["1", "31.0", "1", "2"]
    assert document["tables"][0]["rows"][1] == "firewall / carrier | punched | punched | 12.0 | 12.2 | bulk | 0.4"


@pytest.mark.soak
@pytest.mark.usefixtures("full_networks")
def test_all_pairs_connect_and_exchange(tmp_path: Path) -> None:
    for pair in ALL_PAIRS:
        row = measure_pair(pair, tmp_path / "play")
        assert row.failure == "", row.name
        assert (row.path == "relayed") == (row.theory == "relayed"), row.name
        assert (row.way == "relayed stream") == (row.theory == "relayed"), row.name


def rounds(*seconds: float, held: float = 0.0, write: float = 1.0) -> list[dict[str, float]]:
    return [{"seconds": each, "held_seconds": held, "write_seconds": write, "size": 100_000_000} for each in seconds]


def test_what_is_lost_is_told_turn_by_turn() -> None:
    """The machine becomes slower by half during the test; each turn has a round of each kind."""
    played = {
        save.NONE: rounds(10.0, 12.0, 15.0),
        save.OURS: rounds(10.1, 12.3, 15.2, held=0.1, write=2.0),
        save.TORCH: rounds(11.0, 13.2, 16.2, held=1.0),
    }
    assert save.lost(played, save.OURS) == pytest.approx(0.2 / 12.0)
    assert save.chance_share(played) == pytest.approx(2.5 / 12.0)
    share, held, rate, chance = save.claims_of(played)
    assert (share.ours, share.theirs) == ("1.7%", "10.0%")
    assert (held.ours, held.theirs) == ("0.100", "1.000")
    assert (rate.ours, rate.theirs) == ("50", "100")
    assert chance.ours == "20.8%"


TINY = {"num_layers": 2, "width": 16, "num_heads": 2, "hidden": 32, "context": 16, "vocabulary": 256}
TASK = Task(num_stages=2, steps=2, model=TINY)


ALONE, PEER = "one process, threads: 1", "torch.distributed.pipelining, GPipe, fp32"
OURS, LOSSY = "farandole, fp32", "farandole, int8"


def test_what_is_timed_begins_when_the_first_is_warm_and_ends_when_the_last_is_done() -> None:
    """A turn has the loss of the one process that knows it."""
    answers: list[dict[str, Any]] = [
        {"stepped_at": [10.0, 11.0, 12.0], "loss": None},
        {"stepped_at": [10.5, 11.5, 14.0], "loss": 5.5},
    ]
    assert turn_of(TASK, answers) == Turn(2 * 16 / 4.0, 5.5)


def test_claims_are_of_medians_compared_with_the_faster_of_torchs_schedules() -> None:
    turns = {
        ALONE: [Turn(10, 5.0)],
        PEER: [Turn(20, 5.0)],
        "torch.distributed.pipelining, 1F1B, fp32": [Turn(21, 5.0)],
        OURS: [Turn(16, 5.0), Turn(19, 5.0), Turn(18, 5.0)],
    }
    (claim,) = claims_of(TASK, turns)
    assert claim.claim.startswith("farandole, fp32: microbatches a second, 0.0 M parameters in 2 stages")
    assert (claim.ours, claim.theirs) == ("18.0", "21.0")


@pytest.mark.parametrize(("loss", "is_wrong"), [(5.0, False), (5.00004, False), (5.0001, True)])
def test_what_travels_in_fp32_must_learn_the_same_in_every_turn(loss: float, is_wrong: bool) -> None:
    turns = {ALONE: [Turn(1, 5.0)], OURS: [Turn(1, 5.0), Turn(1, loss)], LOSSY: [Turn(1, 5.1)]}
    assert [miss.partition(":")[0] for miss in wrong(turns)] == (["farandole, fp32"] if is_wrong else [])


FIELDS: Final[tuple[Any, ...]] = (None, None, "committed", "bob", 0, 0, 0.0, "bulk", 0)


def test_a_rate_is_of_the_rounds_after_the_first_until_one_node_is_done() -> None:
    played = [RoundRecord(10.0 * n, n, 5, 100 * n, 9.0, *FIELDS) for n in range(1, 6)]
    assert rate_of(played, ended_at=45.0) == (200 + 300 + 400) / 30.0
    with pytest.raises(BenchError, match="play more, or longer, rounds"):
        rate_of(played, ended_at=15.0)


def test_a_plain_loop_trains_and_a_trainer_ends_rounds(tmp_path: Path) -> None:
    run = {"name": "plain", "model": "tiny", "inner": {"batch_size": 2}}
    with open_workers("training", ["plain"], tmp_path / "log") as (worker,):
        rate = worker.ask("learn_plainly", run=run, device="cpu", warmup_seconds=0.1, seconds=0.3, author=1)
        end = worker.ask("end_rounds", run=run, device="cpu", path=str(tmp_path / "checkpoint"), turns=1)["seconds"]
    assert rate["tokens_per_second"] > 0
    assert rate["device"].startswith("CPU")
    assert min(end.values()) > 0
    assert end.keys() == {"encode", "decode", "judge", "outer step", "save", "load"}
    size = (tmp_path / "checkpoint").stat().st_size
    assert size > 8 * num_parameters(preset("tiny")), "weights, momentum and the means"


def test_the_page_is_of_the_kept_results() -> None:
    assert PAGE.read_text() == page(), "run: python -m farandole.testnet.bench.report"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_kept_result_has_claims_a_day_and_a_machine(file: Path) -> None:
    result = msgspec.json.decode(file.read_bytes(), type=KeptResult)
    assert result.claims
    assert {"command", "date"} < result.setting.keys()


def test_only_a_result_without_misses_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "PAGE", tmp_path / "PAGE.md")
    (tmp_path / "results").mkdir()
    with open_bench("save", tmp_path / "out", write=True) as bench:
        with pytest.raises(BenchError, match="too slow"):
            bench.publish([Claim("seconds", "1", "2")], {}, misses=["too slow"])
        assert not (tmp_path / "PAGE.md").exists()
        bench.publish([Claim("seconds", "1", "2")], {})
    assert (tmp_path / "PAGE.md").read_text().endswith("| seconds | 1 | 2 |\n")
    assert (tmp_path / "results" / "save.json").exists()
