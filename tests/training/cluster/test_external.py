"""A user's loop and the engine that follows it; `test_mixed_runs` compares what both engines send."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import distributed, nn

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.rules import DEFAULT_SCREENING, NoLoCoConfig, ScreeningRules
from farandole.training.base.errors import DataError, DivergedError
from farandole.training.cluster.external import ExternalEngine, Loop, LoopEnded, Turns, matching_parameters
from farandole.training.cluster.ranks import parameters_of, restarts_meet_the_dead

from ...patience import PATIENCE
from ...tolerance import TOLERANT
from ..conftest import RUN_ID, sent, weights_of
from ..ranks_program import manifest_of


def manifest_for(module: nn.Module, screening: ScreeningRules = TOLERANT, **outer: Any) -> Manifest:
    return replace(manifest_of(module, NoLoCoConfig(**outer)), screening=screening)


class Script:
    """A user's loop in a thread of its own, and the engine that follows it."""

    def __init__(
        self, module: nn.Module, step: Callable[[int], object], manifest: Manifest | None = None, **settings: Any
    ) -> None:
        self.turns = Turns()
        self.module = module
        manifest = manifest_for(module) if manifest is None else manifest
        self.engine = ExternalEngine(Loop(module, **settings), manifest, self.turns, run_id=RUN_ID)
        self.failure: BaseException | None = None
        self._step = step
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.turns.wait()
            for number in itertools.count():
                if self._is_over.is_set():
                    break
                self._step(number)
                self.turns.step_taken()
        except BaseException as error:
            self.failure = error
        finally:
            self.turns.leave()

    def take_steps(self, count: int) -> None:
        until = self.engine.totals.steps + count
        self.engine.inner_steps(lambda: self.engine.totals.steps == until)

    def end(self) -> None:
        self._is_over.set()
        self.turns.end()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@pytest.fixture
def scripts() -> Iterator[list[Script]]:
    made: list[Script] = []
    yield made
    for script in made:
        script.end()


def test_bf16_parameters_lose_nothing_of_the_outer_steps(scripts: list[Script]) -> None:
    """An outer step that is smaller than what bf16 can show adds up all the same, over rounds without inner steps."""
    script = linear_script(scripts, torch.bfloat16)
    engine = script.engine
    addresses = [parameter.data_ptr() for parameter in script.module.parameters()]
    start = engine.round_end.outer.slow.clone()
    partner = start + 1e-4
    for _ in range(10):
        sent(engine)
        engine.round_end.apply(partner.numpy().tobytes())
    moved = engine.round_end.outer.slow.clone() - start
    torch.testing.assert_close(moved, torch.full_like(moved, float(moved.median())), rtol=0, atol=1e-5)
    assert 5e-5 < float(moved.mean()) < 2e-4
    rounded = engine.round_end.outer.slow.clone().bfloat16()
    assert torch.equal(weights_of(script.module), rounded)
    assert [parameter.data_ptr() for parameter in script.module.parameters()] == addresses, "changed in place"


def linear_script(scripts: list[Script], dtype: torch.dtype = torch.float32, **settings: Any) -> Script:
    module = nn.Linear(3, 2).to(dtype)

    def step(number: int) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1.0)

    scripts.append(Script(module, step, **settings))
    return scripts[-1]


def test_the_loop_moves_only_in_its_turn(scripts: list[Script]) -> None:
    script = linear_script(scripts)
    before = weights_of(script.module)
    asked: list[float] = []

    def until() -> bool:
        asked.append(float((weights_of(script.module) - before).mean()))
        return len(asked) == 4

    script.engine.inner_steps(until)
    assert asked == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert script.engine.totals.steps == 3
    assert float((weights_of(script.module) - before).mean()) == pytest.approx(3.0)


def test_a_loop_that_is_over_still_gets_its_outer_step(scripts: list[Script]) -> None:
    script = linear_script(scripts)
    engine = script.engine
    script.take_steps(1)
    sent(script.engine)
    script.turns.leave()
    asked: list[bool] = []

    def until() -> bool:
        asked.append(engine.is_idle)
        if len(asked) == 2:
            engine.round_end.apply(None)
        return False

    with pytest.raises(LoopEnded):
        engine.inner_steps(until)
    assert asked == [True, True]
    assert engine.totals.round == 1


def test_what_ends_the_engine_is_raised_in_the_users_loop(scripts: list[Script]) -> None:
    script = linear_script(scripts)
    script.take_steps(1)
    with torch.no_grad():
        script.module.get_parameter("bias").fill_(float("nan"))
    with pytest.raises(DivergedError) as raised:
        sent(script.engine)
    script.turns.end(raised.value)
    script.end()
    assert script.failure is raised.value


def test_the_losses_that_a_loop_reports_are_shown_by_round_and_without_evaluate_no_other_is_known(
    scripts: list[Script],
) -> None:
    script = linear_script(scripts)
    engine = script.engine
    assert engine.bits_per_byte(1.0, 1) is None
    with pytest.raises(DataError, match="no held-out loss"):
        engine.evaluate(1)
    script.take_steps(1)
    assert script.engine.mean_loss() is None
    script.engine.note_loss(2.0)
    script.engine.note_loss(3.0)
    assert script.engine.mean_loss() == 2.5
    script.take_steps(1)
    assert script.engine.mean_loss() is None


def test_evaluate_runs_in_the_users_thread_on_the_weights_that_are_judged(scripts: list[Script]) -> None:
    threads: list[threading.Thread] = []

    def evaluate() -> float:
        threads.append(threading.current_thread())
        return float(weights_of(script.module).abs().mean())

    script = linear_script(scripts, evaluate=evaluate, manifest=manifest_for(nn.Linear(3, 2), DEFAULT_SCREENING))
    script.take_steps(1)
    before = weights_of(script.module)
    assert script.engine.evaluate(2) == pytest.approx(float(before.abs().mean()))
    sent(script.engine)
    zeros = torch.zeros_like(before)
    script.engine.round_end.screen(zeros.numpy().tobytes())
    assert torch.equal(weights_of(script.module), before)
    assert set(threads) == {script._thread}
    assert script.engine.tokens_per_byte(2) is None


def test_the_loss_of_a_pair_is_shown_in_bits_per_byte_too(scripts: list[Script]) -> None:
    script = linear_script(scripts, evaluate=lambda: (2.0, 0.25))
    assert (script.engine.evaluate(1), script.engine.tokens_per_byte(1)) == (2.0, 0.25)


@pytest.mark.parametrize("returned", [float("nan"), "much", (1.0, 0.0), (1.0, 2.0, 3.0), ValueError("no text")])
def test_an_evaluate_that_fails_costs_the_loss_alone(scripts: list[Script], returned: object) -> None:
    def evaluate() -> float:
        if isinstance(returned, Exception):
            raise returned
        return returned  # type: ignore[return-value] # what a user might get wrong

    script = linear_script(scripts, evaluate=evaluate)
    with pytest.raises(DataError, match="evaluate"):
        script.engine.evaluate(1)
    script.take_steps(1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.body.bias.requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0))


def test_tied_parameters_come_once_frozen_ones_if_the_run_names_them_and_in_its_order() -> None:
    module = Tied()
    assert list(parameters_of(module)) == ["embedding.weight", "body.weight"]
    assert list(parameters_of(module, with_frozen=True)) == ["embedding.weight", "body.weight", "body.bias"]
    compiled = nn.ModuleDict({"_orig_mod": module})  # what torch.compile returns has these names
    assert parameters_of(compiled) == parameters_of(module)
    shapes = {"body.bias": (4,), "body.weight": (4, 4), "embedding.weight": (5, 4)}
    assert list(matching_parameters(Tied(), shapes)) == list(shapes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what its wrapper imports
def test_a_module_in_distributed_data_parallel_has_its_own_names(tmp_path: Path) -> None:
    module = Tied()
    del module.empty  # it takes no part in a gradient
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(module)
        assert next(name for name, _ in wrapped.named_parameters()).startswith("module.")
        compiled: Any = torch.compile
        for each in (wrapped, compiled(wrapped), nn.parallel.DistributedDataParallel(compiled(module))):
            assert parameters_of(each) == parameters_of(module)
    finally:
        distributed.destroy_process_group()


# Ranks


def play(kind: str, num_ranks: int, folder: Path, judges: str = "") -> list[list[list[str]]]:
    """The words of the lines that each rank prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.ranks_program", kind, judges]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), str(folder / "meeting")],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[3],
        )
        for rank in range(num_ranks)
    ]
    try:
        with ThreadPoolExecutor(num_ranks) as threads:  # all at once: one that is dead and not awaited seems alive
            printed = list(threads.map(lambda rank: rank.communicate(timeout=PATIENCE)[0], ranks))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [[line.split() for line in each.splitlines()] for each in printed]


@cache
def of_one_process(judges: str) -> list[list[str]]:
    [printed] = play("plain", 1, Path(), judges)
    return printed


@pytest.mark.parametrize(
    ("kind", "num_ranks", "judges"),
    [*[("fsdp", 1, ""), ("fsdp", 3, "losses"), ("replicated", 2, "")], *[("hsdp", 4, ""), ("both", 4, "losses")]],
)
def test_however_a_model_is_cut_its_member_sends_judges_and_learns_the_same_bits(
    kind: str, num_ranks: int, judges: str, tmp_path: Path
) -> None:
    """fp32, int8, fragments of int4, bf16, momenta; for weights in fp32 and in bf16."""
    [[leader, judged], *others] = play(kind, num_ranks, tmp_path, judges)
    [expected, expected_judged] = of_one_process(judges)
    assert leader == expected
    assert judged == expected_judged
    assert (int(judged[0]) > 0) == (judges == "losses")
    assert judges or any(0.0 < float(clip) < 1.0 for clip in judged)
    num_cases = len(expected) // 2
    parameters = [expected[num_cases - 1], expected[-1]]
    assert [hashes for hashes, *_ in others] == [parameters] * (num_ranks - 1)


@pytest.mark.parametrize(
    ("environment", "meet"),
    [
        ({}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
    ],
)
def test_a_torchrun_whose_restarts_would_fail_is_recognized(environment: dict[str, str], meet: bool) -> None:
    assert restarts_meet_the_dead(environment) == meet
