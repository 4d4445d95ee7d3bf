"""The benchmark of exchanges, with small payloads and without the other projects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farandole.testnet.bench import peer
from farandole.testnet.bench.environments import REQUIREMENTS, obtain_python
from farandole.testnet.bench.exchange import ExchangeFigures, measure, run
from farandole.testnet.bench.pair import ROUNDS, Averaging
from farandole.testnet.bench.peer import class_of
from farandole.testnet.bench.process import BenchError, open_payload, open_worker, worker_command
from farandole.testnet.bench.report import open_bench
from farandole.testnet.report.section import SectionError

HEADLINES = (
    "bulk_over_raw",
    "pair_100mb_s",
    "pair_100mb_s_hivemind",
    "pair_100mb_s_lattica",
    "peak_mb_over_payload",
    "loop_lag_p99_ms",
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of a small benchmark."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "FIGURES.md").write_text("Prose.\n\n<!-- begin exchange -->\n<!-- end exchange -->\n")
    with open_bench("exchange", folder, folder / "FIGURES.md", repeats=1) as bench:
        figures = measure(
            bench,
            sizes_mb=[1, 2],
            repeats=1,
            vector_mb=2,
            loop_mb=4,
            paths=["raw", "bulk"],
            ways=[("fp32", "new channel"), ("int8", "stream")],
            rounds=[*ROUNDS[::3], ("bf16", "kept channel")],
        )
        bench.publish(figures.report(bench.setting))
    return folder


@pytest.fixture
def document(out: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((out / "exchange.json").read_text())
    return result


def test_the_headlines_are_there_and_those_of_others_unknown(document: dict[str, Any]) -> None:
    assert set(HEADLINES) <= set(document)
    assert document["pair_100mb_s_hivemind"] is document["pair_100mb_s_lattica"] is None
    assert document["bulk_over_raw"] > 0
    assert document["guard_over_none"] > 0
    assert document["pair_100mb_s"] > 0
    assert document["pair_100mb_in_all_s"] > 0
    assert document["loop_lag_p99_ms"] >= document["loop"]["p50_ms"]


def test_each_path_is_measured_with_each_size(document: dict[str, Any]) -> None:
    results = document["one_way"]
    assert {(result["path"], result["size_mb"]) for result in results} == {
        (path, size) for path in ("raw", "bulk") for size in (1, 2)
    }
    for result in results:
        assert result["mb_s"] > 0
        assert all(seconds > 0 for seconds in result["seconds"])
        assert (result["of_raw"] == 1) == (result["path"] == "raw")


def test_both_partners_hold_the_mean(document: dict[str, Any]) -> None:
    full, small, full_round, _, half_round = document["pair"]
    assert (full["how"], small["how"]) == ("fp32, new channel", "int8, stream")
    for taken, codec, bound in ((full_round, "fp32, new", 1e-6), (half_round, "bf16, kept", 0.01)):
        assert taken["how"] == f"{codec} channel, as a round"
        assert taken["has_averaged"]
        assert taken["rms_error"] < bound
        assert taken["total_s"] == taken["exchange_s"] + taken["finish_s"]
    assert full["payload_mb"] == 2
    assert small["payload_mb"] == pytest.approx(2 * 8.125 / 32, rel=1e-3)
    assert full["rms_error"] < 1e-6 < small["rms_error"] < 0.01
    assert full["has_averaged"]


def test_the_loop_is_watched_and_answers_meanwhile(document: dict[str, Any]) -> None:
    loop = document["loop"]
    assert loop["moved_mb"] == 4
    assert 0 <= loop["idle_p50_ms"] <= loop["idle_p99_ms"] <= loop["idle_max_ms"]
    assert 0 < loop["status_p50_ms"] <= loop["status_max_ms"]


def test_a_document_gets_tables_words_and_where_they_come_from(out: Path) -> None:
    section = (out / "exchange.md").read_text()
    assert "| our bulk channel (AES-256-GCM records, hashed on arrival) |" in section
    assert "| farandole, fp32, new channel | 2.0 |" in section
    assert "| at rest |" in section
    assert "From 2 MB on the bulk channel has at least" in section
    assert "repeats 1" in section
    expected = f"Prose.\n\n<!-- begin exchange -->\n\n{section}\n<!-- end exchange -->\n"
    assert (out / "FIGURES.md").read_text() == expected


def test_how_others_do_is_said_in_words() -> None:
    def averaging(who: str, how: str, exchange_s: float) -> Averaging:
        return Averaging(who, how, 100.0, 0.1, exchange_s, 0.2, 0.0, 1.0)

    ours = averaging("farandole", "fp32, new channel", 0.2)
    as_a_round = averaging("farandole", "fp32, new channel, as a round", 0.3)
    report = ExchangeFigures(100, averagings=[ours, as_a_round, averaging("hivemind", "fp32", 0.9)])

    assert report.summary() == (
        "The exchange of fp32 is 4.5 times as fast as hivemind's, from vector to mean 2.4 times; a whole round of "
        "ours, outer step included, takes 0.50 of the time of its averaging. "
        "Over its idle self and the payload a mesh process needs at most 1 MB."
    )


def test_a_document_without_the_section_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    document = tmp_path / "FIGURES.md"
    document.write_text("Prose.\n")

    with pytest.raises(SectionError, match="<!-- begin exchange -->"):
        run(tmp_path / "out", write=document)

    assert not (tmp_path / "out").exists()


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open_payload("outgoing", 10) as outgoing, open_payload("incoming", 10) as incoming:
        descriptors = [outgoing.descriptor, incoming.descriptor]
        with (
            open_worker("broken", worker_command("no such kind"), log, descriptors) as worker,
            pytest.raises(BenchError, match="broken"),
        ):
            worker.ask("open", address=None)
    assert "no such kind" in log.read_text()


def test_a_payload_knows_what_has_arrived() -> None:
    size = 100_000
    with open_payload("outgoing", size) as outgoing, open_payload("incoming", size) as incoming:
        outgoing.fill()
        assert not incoming.equals(outgoing, size)
        incoming.memory[:] = outgoing.memory
        assert incoming.equals(outgoing, size)
        incoming.spoil(size)
        assert not incoming.equals(outgoing, size)


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_a_project_has_a_peer_where_its_process_looks(name: str) -> None:
    """The projects cannot be imported here: each has its own environment."""
    assert f"\nclass {class_of(name)}:\n" in Path(peer.__file__).with_name(f"{name}.py").read_text()


def test_a_project_that_cannot_be_installed_is_a_problem_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(BenchError, match="lattica could not be installed: "):
        obtain_python("lattica", tmp_path, lambda _: None)
    assert not (tmp_path / "lattica" / "installed").exists()
