import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from farandole.testnet import cli
from farandole.testnet.methods import compare
from farandole.testnet.methods.baselines import Method, methods
from farandole.testnet.methods.compare import (
    PIECE_BYTES,
    TUNING_SEED,
    VALIDATION_WINDOWS,
    MethodComparison,
    Result,
    best_of,
    choose_methods,
    interval_of,
    mixed,
    result_grid,
    run_compare,
    texts_by_kind,
    windows_held_out,
)
from farandole.training.base.errors import DataError


@pytest.fixture
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read an eighth of the text."""
    monkeypatch.setattr(compare, "KIND_BYTES", 1 << 19)


@pytest.mark.usefixtures("little_text")
def test_a_comparison_prints_and_writes_each_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "compare.json"
    comparison = MethodComparison(nodes=2, steps=2, seeds=1, interval=1, words=["DiLoCo, alpha", "nobody"])
    results = run_compare(comparison, out)
    document = json.loads(out.read_text())
    assert [result.method for result in results] == ["DiLoCo, alpha 0.5", "nobody averages"]
    # The file has them in the order in which they were ready.
    assert sorted(result["method"] for result in document["results"]) == [result.method for result in results]
    assert all(0 < result["loss"] < 7 for result in document["results"])
    assert document["settings"]["nodes"] == len(document["settings"]["kinds"]) == 2
    assert {document["settings"][name] for name in ("steps", "interval")} == {2, 1}
    assert "DiLoCo" in capsys.readouterr().out


@pytest.mark.usefixtures("little_text")
def test_what_a_file_has_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "compare.json"
    run_compare(MethodComparison(nodes=2, steps=1, seeds=1, words=["DiLoCo, alpha", "nobody"]), out)
    document = json.loads(out.read_text())
    document["results"][0]["loss"] = 0.5
    out.write_text(json.dumps(document))
    name = document["results"][0]["method"]
    capsys.readouterr()

    results = run_compare(MethodComparison(nodes=2, steps=1, seeds=2, words=[name]), out)

    assert [result.loss == 0.5 for result in results] == [True, False]
    assert "1 of 1 plays" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["results"]) == 3, "other methods' results stay"


@pytest.mark.parametrize(
    ("content", "says"), [("{}", "no file of a comparison"), (None, "other steps: name another folder with --out")]
)
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, content: str | None, says: str) -> None:
    out = tmp_path / "compare.json"
    if content is None:
        run_compare(MethodComparison(nodes=2, steps=1, seeds=1, words=["nobody"]), out)
        content = out.read_text()
    out.write_text(content)
    with pytest.raises(DataError, match=says):
        run_compare(MethodComparison(nodes=2, steps=2, seeds=1, words=["nobody"]), out)
    assert out.read_text() == content


def test_the_command_lists_the_methods_and_refuses_a_name_that_is_none() -> None:
    listed = CliRunner().invoke(cli.testnet_app, ["compare", "--methods", "list"])
    assert listed.exit_code == 0
    assert listed.output.splitlines() == [method.name for method in methods()]
    refused = CliRunner().invoke(cli.testnet_app, ["compare", "--methods", "magic"])
    assert "--methods list" in str(refused.exception)


def test_some_methods_are_chosen_by_words_of_their_names() -> None:
    assert [method.name for method in choose_methods(["DiLoCo", "nobody"])] == ["DiLoCo", "nobody averages"]
    assert {method.late for method in choose_methods(["late"], interval=5)} == {3, 5}
    assert len(choose_methods([])) == len(methods())


def test_a_search_spends_the_same_bytes_in_many_ways_and_comes_by_its_name_alone() -> None:
    tried = choose_methods(["search"], interval=12)
    assert len({method.name for method in tried}) == len(tried) > 60
    assert all(0.8 < method.ring_traffic(8, 0.8) / (4 / 12) < 1.2 for method in tried)
    assert {method.late for method in tried} == {0, 1, 2}
    assert not any(method.name.startswith("search") for method in choose_methods(["Muon 0.9"]))


def random_text(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).integers(97, 123, size, dtype=np.uint8).tobytes()


def result(method: str, seed: int, loss: float, rate: float = 1.0) -> Result:
    return Result(method, seed, rate, loss, merged_loss=loss, spread=0.0, seconds=1.0)


def test_each_method_gets_the_rate_that_is_best_for_it() -> None:
    tried = [Method(name, "pairs", rate=rate) for name in "ab" for rate in (0.5, 1.0, 2.0)]
    losses = {"a": (3.0, 2.0, 2.5), "b": (3.0, 2.0, 1.5)}
    results = [
        result(method.name, TUNING_SEED, losses[method.name][number % 3], method.rate)
        for number, method in enumerate(tried)
    ]

    assert [(method.name, method.rate) for method in best_of(tried, results)] == [("a", 1.0), ("b", 2.0)]


def test_losses_are_compared_seed_by_seed() -> None:
    chosen = [Method("base", "all"), Method("other", "pairs"), Method("third", "pairs")]
    results = [result("base", seed, 2.0 + seed) for seed in range(3)]
    results += [result("other", seed, 1.9 + seed + 0.01 * (seed - 1)) for seed in range(3)]
    results += [result("third", 7, 1.0)]

    rows = {row[0]: (row[6], row[8]) for row in result_grid(results, chosen, MethodComparison(baseline="base")).rows}

    difference = "-0.100 [-0.125, -0.075]"
    assert rows == {"base": ("", ""), "other": (difference, difference), "third": ("", "")}
    assert interval_of([0.5]) == "+0.500"


def test_methods_of_one_traffic_are_seen_to_have_it() -> None:
    by_name = {method.name: method for method in methods(interval=12)}
    traffic = {name: method.traffic(0.8) for name, method in by_name.items()}

    assert traffic["synchronous data parallel"] == 4
    assert traffic["DiLoCo"] == traffic["NoLoCo, Nesterov, fp32"] == 4 / 12
    assert traffic["mean of all, int8, four times as often"] == pytest.approx(4 / 12, rel=0.02)
    assert traffic["nobody averages"] == 0
    assert by_name["DiLoCo"].ring_traffic(8) == pytest.approx(4 / 12 * 1.75)
    assert by_name["NoLoCo, Nesterov, fp32"].ring_traffic(8) == 4 / 12
    # int8 to one partner, and four fifths of it in int4 to two: 1.016 and 0.8 x 2 x 0.5625 bytes every 6 steps.
    assert traffic["NoLoCo, int8, 8 fragments, twice as often, momentum, Muon 0.9"] == pytest.approx(0.319, abs=1e-3)
    assert traffic["MuLoCo, alpha 0.9, 2 bits with error feedback, Muon 0.9"] == pytest.approx(0.0089, abs=1e-4)


def test_kinds_of_text_are_apart_and_a_tenth_is_held_out() -> None:
    texts = texts_by_kind(3)

    for text in texts.values():
        assert 0.05 < len(text.held_out) / len(text.training) < 0.2
        assert text.training[:].dtype == np.uint8
    assert len({bytes(text.training[:200]) for text in texts.values()}) == 3


def test_no_window_that_is_evaluated_on_is_in_any_training_text() -> None:
    """Of whole pieces of this text, some have such windows: licences, and lines that every file has."""
    texts, context = texts_by_kind(3), 32
    training = b"\0".join(text.training[:].tobytes() for text in texts.values())

    windows = windows_held_out(texts, context)

    assert [each.shape for each in windows] == [(VALIDATION_WINDOWS, context + 1)] * 3
    held_out = [text.held_out[:].tobytes() for text in texts.values()]
    for each, own in zip(windows, held_out, strict=True):
        assert all(row.astype(np.uint8).tobytes() in own for row in each)
        assert not any(row.astype(np.uint8).tobytes() in training for row in each)
    places = range(0, len(held_out[0]) - context, 97)
    assert any(held_out[0][place : place + context + 1] in training for place in places)


def test_text_that_several_kinds_have_is_of_one(tmp_path: Path) -> None:
    shared, own = (random_text(seed, 40 * PIECE_BYTES) for seed in (0, 1))
    for name, content in (("a", shared + own), ("b", shared * 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_bytes(content)

    texts = texts_by_kind(2, tmp_path)

    sizes = {name: len(text.training) + len(text.held_out) for name, text in texts.items()}
    assert sizes["a"] == pytest.approx(80 * PIECE_BYTES, rel=0.01)
    assert sizes["b"] == 0


@pytest.mark.parametrize(("pieces", "says"), [(1, "no text of a is held out"), (200, "too little held-out text of a")])
def test_too_little_new_text_to_evaluate_on_is_said(tmp_path: Path, pieces: int, says: str) -> None:
    alike = [b"%06d" % number + b"word " * 818 for number in range(pieces)]  # but for six bytes of 4,096
    for name, content in (("a", b"".join(alike)), ("b", random_text(0, 90 * PIECE_BYTES))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_bytes(content)
    with pytest.raises(DataError, match=says):
        windows_held_out(texts_by_kind(2, tmp_path), 32)


def test_mixed_text_is_all_kinds_for_training_and_each_kind_for_measuring() -> None:
    kinds = texts_by_kind(3)
    texts = mixed(kinds)
    whole = np.concatenate([text.training[:] for text in kinds.values()])
    for name, text in texts.items():
        assert np.array_equal(text.training[:], whole)
        assert text.held_out is kinds[name].held_out


def test_kinds_of_text_are_a_folders_subfolders(tmp_path: Path) -> None:
    for name, size in (("small", 10), ("large", 300), ("middle", 200)):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "text.txt").write_text(name[0] * size)

    texts = texts_by_kind(2, tmp_path)

    assert {name: bytes(text.training[:1]) for name, text in texts.items()} == {"large": b"l", "middle": b"m"}
    with pytest.raises(DataError, match="3 kinds of text, too few for 4 nodes"):
        texts_by_kind(4, tmp_path)
