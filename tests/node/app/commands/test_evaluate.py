"""``farandole eval`` as users type it: tasks of lm-evaluation-harness, from files here, on models that have trained."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec import to_builtins

from farandole.node.base.exits import Exit
from farandole.node.base.release import VERSION
from farandole.node.base.settings import NodeSettings
from farandole.node.inspect.whole_model import open_whole_model
from farandole.node.state.store import open_store
from farandole.node.store.consolidated.folder import read_folder
from farandole.node.store.consolidated.hf_export import export_hf
from farandole.training.base.errors import how_to_add
from farandole.training.engine.learner import Learner

from ....patience import PATIENCE
from ....task_files import CHOICES, PROMPTS, TEXTS, write_tasks
from ....tokenizer_files import write_bpe
from ...store.consolidated.runs import MODELS, manifest_for, trained
from .conftest import Run
from .models import folder_of, node_of

if TYPE_CHECKING:
    from farandole.training.evaluation.harness import HarnessModel

CONTEXT = 16


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_tasks(tmp_path / "tasks")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return folder


@pytest.fixture
def learner() -> Learner:
    return trained(manifest_for({**MODELS["own"], "num_stages": 2}), b"a" * 32, steps=20, rounds=1)


@pytest.fixture
def model(learner: Learner, tmp_path: Path) -> Path:
    return folder_of(learner, manifest_for({**MODELS["own"], "num_stages": 2}), tmp_path / "model")


@torch.no_grad()
def nats_of(learner: Learner, document: str) -> float:
    """Log-likelihood of a document of bytes, each byte after all of the 16 before it that its window has."""
    tokens, total = [0, *document.encode()], 0.0
    for first in range(1, len(tokens), CONTEXT):
        end = min(first + CONTEXT, len(tokens))
        begin = max(0, end - 1 - CONTEXT)
        chances = learner.module(torch.tensor([tokens[begin : end - 1]]))[0].double().log_softmax(dim=-1)
        total += sum(float(chances[at - 1 - begin, tokens[at]]) for at in range(first, end))
    return total


@torch.no_grad()
def nats_after(learner: Learner, context: str, continuation: str) -> float:
    """Log-likelihood of a continuation that fits into the model's context."""
    tokens = [*context.encode(), *continuation.encode()][-CONTEXT - 1 :]
    chances = learner.module(torch.tensor([tokens[:-1]]))[0].double().log_softmax(dim=-1)
    first = len(tokens) - len(continuation.encode())
    return sum(float(chances[at - 1, tokens[at]]) for at in range(first, len(tokens)))


def figures_of(told: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["task"], each["metric"]): each for each in json.loads(told)["results"]}


def test_figures_are_those_of_the_models_own_chances(run: Run, model: Path, learner: Learner, tasks: Path) -> None:
    arguments = ("eval", model, "--tasks", "tiny_choice, tiny_text", "--include", tasks, "--batch-size", 3, "--json")
    code, told, says = run(*arguments)
    assert code == Exit.OK, says
    found = figures_of(told)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    bits = -sum(nats_of(learner, text) for text in TEXTS) / num_bytes / math.log(2)
    assert found["tiny_text", "bits_per_byte"]["value"] == pytest.approx(bits, rel=1e-5)
    assert found["tiny_text", "byte_perplexity"]["value"] == pytest.approx(2**bits, rel=1e-4)
    assert found["tiny_text", "bits_per_byte"]["higher_is_better"] is False
    right = []
    for each in CHOICES:
        chances = [nats_after(learner, each["question"], f" {choice}") for choice in each["choices"]]
        right.append(max(range(3), key=chances.__getitem__) == each["answer"])
    assert found["tiny_choice", "acc"]["value"] == pytest.approx(sum(right) / len(right))
    assert found["tiny_choice", "acc"]["stderr"] is not None
    assert found["tiny_choice", "acc"]["documents"] == len(CHOICES)
    assert json.loads(told)["run_id"] == read_folder(model).index.run_id.hex()


def test_a_table_for_people_and_all_results_in_a_file(run: Run, model: Path, tasks: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    arguments = (
        "eval",
        model,
        "--tasks",
        "tiny_answer,tiny_choice,tiny_text",
        "--include",
        tasks,
        "--limit",
        2,
        "--num-fewshot",
        1,
        "--out",
        out,
    )
    code, table, says = run(*arguments)
    assert code == Exit.OK, says
    assert [line.split()[0] for line in table.splitlines()[1:]] == [
        "tiny_answer",
        "tiny_choice",
        "tiny_choice",
        "tiny_text",
        "tiny_text",
        "tiny_text",
    ]
    head, *lines = table.splitlines()
    assert head.split() == ["task", "metric", "shots", "documents", "value", "std.", "error"]
    assert lines[1].split()[:5] == ["tiny_choice", "acc", "↑", "1", "2"]
    assert 'weights of run "a", round 1, 20 inner steps' in says
    assert "only the first 2 documents" in says
    assert "INFO" not in says
    assert "WARNING" not in says
    assert "Traceback" not in says
    results = json.loads(out.read_text())
    facts = results["farandole"]
    assert (facts["version"], facts["round"], facts["inner_steps"]) == (VERSION, 1, 20)
    assert facts["run_id"] == read_folder(model).index.run_id.hex()
    assert results["results"]["tiny_choice"]["acc,none"] == pytest.approx(float(lines[1].split()[5]), abs=1e-4)
    assert results["n-samples"]["tiny_text"] == {"original": len(TEXTS), "effective": 2}
    assert results["config"]["limit"] == 2
    code, _, says = run(*arguments)
    assert code == Exit.BAD_INPUT
    assert "is there already" in says


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("has_tokenizer", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_of_a_hugging_face_folder_the_harness_itself_finds_the_same(
    run: Run, tasks: Path, tmp_path: Path, name: str, has_tokenizer: bool
) -> None:
    """Its model `hf` reads the exported folder with transformers, tokenizer included."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    path, options = None, {}
    if has_tokenizer:
        path, options["tokenizer"] = write_bpe(tmp_path)
    model = {"hf": {**MODELS[name]["hf"], "vocab_size": 300 if has_tokenizer else 256}, "context": 32}
    signed = manifest_for(model, **{key: to_builtins(value) for key, value in options.items()})
    learner = trained(manifest_for(model), b"a" * 32, steps=20, rounds=1)
    learner.run_id = signed.run_id
    pulled, exported = folder_of(learner, signed, tmp_path / "model"), tmp_path / "hf"
    export_hf(read_folder(pulled), exported, path)
    arguments = ("--tasks", "tiny_choice,tiny_text", "--include", tasks, "--json")
    given = ("--tokenizer", path) if path else ()
    code, of_pulled, says = run("eval", pulled, *given, *arguments)
    assert code == Exit.OK, says
    found = figures_of(of_pulled)
    assert found == figures_of(run("eval", exported, *arguments)[1])

    from lm_eval.api.instance import Instance
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    theirs = HFLM(str(exported), device="cpu", dtype="float32", batch_size=2, prefix_token_id=0)
    results = simple_evaluate(
        theirs,
        tasks=["tiny_choice", "tiny_text"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    for (task, metric), figure in found.items():
        assert figure["value"] == pytest.approx(results["results"][task][f"{metric},none"], rel=1e-4), (task, metric)
    pairs = [(each["question"], f" {choice}") for each in CHOICES for choice in each["choices"]]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate([*pairs, ("", "begin")])]
    nats, is_greedy = zip(*opened(exported).loglikelihood(requests), strict=True)
    their_nats, their_is_greedy = zip(*theirs.loglikelihood(requests), strict=True)
    assert nats == pytest.approx(their_nats, rel=1e-4)
    assert is_greedy == their_is_greedy


def opened(folder: Path) -> HarnessModel:
    from farandole.training.evaluation.harness import HarnessModel

    with open_whole_model(NodeSettings(home=folder), folder) as model:
        module, device = model.load("cpu", 0)
        sizes = {"context": model.context, "vocabulary": model.vocabulary, "batch_size": 2}
        return HarnessModel(module, model.tokenizer, device=device, **sizes)


def test_the_answers_are_what_the_model_writes(run: Run, model: Path, tasks: Path) -> None:
    """The right answer to each prompt is what `farandole sample` prints."""
    rows = []
    for each in PROMPTS:
        prompt = each["prompt"][-(CONTEXT - 6) :]  # room for 6 tokens
        sampled = run("sample", model, "--prompt", prompt, "--tokens", 6, "--temperature", 0, "--json")[1]
        rows.append({"prompt": each["prompt"], "answer": json.loads(sampled)["text"].partition("\n")[0]})
    data = tasks / "answer.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = run("eval", model, "--tasks", "tiny_answer", "--include", tasks, "--json")[1]
    assert figures_of(told)["tiny_answer", "exact_match"]["value"] == 1.0
    data.write_text(data.read_text().replace('"answer": "', '"answer": "not '))
    told = run("eval", model, "--tasks", "tiny_answer", "--include", tasks, "--json")[1]
    assert figures_of(told)["tiny_answer", "exact_match"]["value"] == 0.0


async def test_the_newest_weights_of_a_node_that_has_its_store_open(home: Path, run: Run, tasks: Path) -> None:
    learner = await node_of(home, manifest_for(MODELS["own"]), rounds=2)
    async with open_store(home / "store.sqlite"):
        told = run("eval", "--tasks", "tiny_text", "--include", tasks, "--json")[1]
    bits = -sum(nats_of(learner, text) for text in TEXTS) / sum(len(text.encode()) for text in TEXTS) / math.log(2)
    assert figures_of(told)["tiny_text", "bits_per_byte"]["value"] == pytest.approx(bits, rel=1e-5)
    assert json.loads(told)["round"] == 2


def test_without_a_run_it_says_what_to_do_and_needs_no_harness_for_it(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, out, says = run("eval", "--tasks", "hellaswag")
    assert (code, out) == (Exit.BAD_INPUT, "")
    assert "knows no run" in says
    assert "farandole join INVITE" in says
    assert not home.exists()


def test_without_the_harness_it_names_the_extra(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, out, says = run("eval", model, "--tasks", "hellaswag")
    assert (code, out) == (Exit.BAD_INPUT, "")
    assert how_to_add("eval") in says


def test_an_unknown_task_is_compared_with_known_ones(run: Run, model: Path, tasks: Path) -> None:
    code, out, says = run("eval", model, "--tasks", "tiny_*,helaswag", "--include", tasks)
    assert (code, out) == (Exit.BAD_INPUT, "")
    assert "knows no task 'helaswag'" in says
    assert "did you mean hellaswag" in says
    assert f"{tasks} has no such task" in says


def test_data_that_cannot_be_fetched_is_said(
    run: Run, model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tasks / "far.yaml").write_text("task: far\ndataset_path: somebody/something\noutput_type: generate_until\n")
    code, out, says = run("eval", model, "--tasks", "far", "--include", tasks)
    assert (code, out) == (Exit.BAD_INPUT, "")
    assert "somebody/something" in says
    assert "huggingface.co" in says
    assert "Traceback" not in says


def test_a_task_file_that_cannot_be_read_is_said(run: Run, model: Path, tasks: Path) -> None:
    (tasks / "text.yaml").write_text((tasks / "text.yaml").read_text().replace("loglikelihood_rolling", "smell"))
    code, _, says = run("eval", model, "--tasks", "tiny_text", "--include", tasks)
    assert code == Exit.BAD_INPUT
    assert "tiny_text: a task or its data cannot be loaded: " in says


def test_functions_of_a_task_file_run_and_ctrl_c_ends_it_all(tmp_path: Path, model: Path, tasks: Path) -> None:
    """A task may name functions of a file next to it; what they print is no result."""
    (tasks / "asking.py").write_text(
        "import signal\n\n\ndef question(doc):\n    print('asked', flush=True)\n    signal.pause()\n"
    )
    text = (tasks / "choice.yaml").read_text()
    (tasks / "choice.yaml").write_text(text.replace('"{{question}}"', "!function asking.question"))
    arguments = ["--home", str(tmp_path / "home"), str(model), "--tasks", "tiny_choice", "--include", str(tasks)]
    with subprocess.Popen(
        [sys.executable, "-c", "from farandole.node.cli import main; main()", "eval", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "HF_HOME": str(tmp_path / "hf")},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = iter(process.stderr.readline, b"")
        assert any(b"asked" in line for line in lines)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == Exit.INTERRUPTED
    assert out == b""
    assert b"Traceback" not in err


def test_code_that_a_model_writes_is_not_run(run: Run, model: Path, tasks: Path) -> None:
    (tasks / "text.yaml").write_text((tasks / "text.yaml").read_text() + "unsafe_code: true\n")
    code, _, says = run("eval", model, "--tasks", "tiny_text", "--include", tasks)
    assert code == Exit.BAD_INPUT
    assert "marked as unsafe" in says


@pytest.mark.parametrize("options", [("--limit", 0), ("--batch-size", 0), ("--num-fewshot", -1), ("--tasks", " , ")])
def test_bounds_are_kept(run: Run, model: Path, options: tuple[str, Any]) -> None:
    assert run("eval", model, "--tasks", "tiny_text", *options)[0] == Exit.USAGE
    assert run("eval", model)[0] == Exit.USAGE
