"""A user's loop and the engine that follows it: the local engine is the oracle, bit for bit."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from farandole.protocol.run.manifest import InnerConfig, Manifest, ModelConfig
from farandole.protocol.run.own_model import ExternalModel
from farandole.protocol.run.rules import DEFAULT_SCREENING, NoLoCoConfig, ScreeningRules
from farandole.training.base.errors import DataError, DivergedError
from farandole.training.cluster.external import ExternalEngine, Loop, LoopEnded, Turns, matching_parameters
from farandole.training.cluster.ranks import parameters_of
from farandole.training.data.dataset import Sampler, Text
from farandole.training.inner.optimizer import adamw_
from farandole.training.model.model import build_model, language_loss

from ...patience import PATIENCE
from ...tolerance import TOLERANT
from ..conftest import ALICE, BOB, RUN_ID, MakeReplica, sent, train, weights_of

PLAIN = InnerConfig(
    learning_rate=3e-3, warmup_steps=0, total_steps=1, min_learning_rate_ratio=1.0, clip=0.0, batch_size=4
)


def manifest_for(module: nn.Module, screening: ScreeningRules = TOLERANT, **outer: Any) -> Manifest:
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters_of(module).items()}
    model = ModelConfig(1, 0, 0, 0, 0, 0, external=ExternalModel(shapes))
    return Manifest(name="a run", model=model, outer=NoLoCoConfig(**outer), screening=screening)


class PlainAdam(torch.optim.Optimizer):
    """farandole's own AdamW, parameter by parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override] # no test gives it a closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                mean, square = (state.setdefault(name, torch.zeros_like(parameter)) for name in ("mean", "square"))
                adamw_(parameter, parameter.grad, mean, square, self._steps, PLAIN.learning_rate, PLAIN)
        self._steps += 1


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


@pytest.fixture
def language_script(model: ModelConfig, text: Text, scripts: list[Script]) -> Callable[..., Script]:
    """The loop of a learner, as a user would write it."""

    def make(author: bytes = ALICE, dtype: torch.dtype = torch.float32, **outer: Any) -> Script:
        module = build_model(model, 7).to(dtype)
        sampler = Sampler(text, run_id=RUN_ID, author=author, batch_size=PLAIN.batch_size, context=model.context)
        optimizer = PlainAdam(module.parameters())

        def step(number: int) -> None:
            optimizer.zero_grad()
            language_loss(module, torch.as_tensor(sampler.batch(number))).backward()
            optimizer.step()

        scripts.append(Script(module, step, manifest_for(module, **outer), tokens_per_step=4 * model.context))
        return scripts[-1]

    return make


@pytest.mark.parametrize("outer", [{}, {"codec": "int8"}, {"codec": "int4"}, {"codec": "topk"}, {"fragments": 3}])
@pytest.mark.parametrize("late_steps", [0, 2])
def test_a_users_loop_exchanges_what_the_local_engine_does_bit_for_bit(
    make_replica: MakeReplica, language_script: Callable[..., Script], outer: dict[str, Any], late_steps: int
) -> None:
    scripts = language_script(ALICE, **outer), language_script(BOB, **outer)
    learners = [make_replica(author, inner_settings=PLAIN, **outer) for author in (ALICE, BOB)]
    for fragment in (0, 1, 0) if outer.get("fragments") else (0, 0, 0):
        for script, oracle in zip(scripts, learners, strict=True):
            script.take_steps(3)
            train(oracle, 3)
            assert torch.equal(weights_of(script.module), oracle.round_end.fast_weights())
        expected = [sent(oracle, fragment) for oracle in learners]
        assert [sent(script.engine, fragment) for script in scripts] == expected
        for script, oracle, partner, own_first in zip(scripts, learners, expected[::-1], (True, False), strict=True):
            if late_steps:
                script.take_steps(late_steps)
                train(oracle, late_steps)
            assert script.engine.round_end.apply(partner, own_first=own_first) == late_steps
            assert oracle.round_end.apply(partner, own_first=own_first) == late_steps
            assert torch.equal(script.engine.round_end.slow_weights(), oracle.round_end.slow_weights())
            assert torch.equal(weights_of(script.module), oracle.round_end.fast_weights())
            done = [(of.totals.round, of.totals.steps, of.totals.tokens) for of in (script.engine, oracle)]
            assert done[0] == done[1]


def test_bf16_parameters_lose_nothing_of_the_outer_steps(language_script: Callable[..., Script]) -> None:
    """An outer step that is smaller than what bf16 can show adds up all the same, over rounds without inner steps."""
    script = language_script(dtype=torch.bfloat16)
    engine = script.engine
    addresses = [parameter.data_ptr() for parameter in script.module.parameters()]
    start = engine.round_end.slow_weights()
    partner = start + 1e-4
    for _ in range(10):
        sent(engine)
        engine.round_end.apply(partner.numpy().tobytes())
    moved = engine.round_end.slow_weights() - start
    torch.testing.assert_close(moved, torch.full_like(moved, float(moved.median())), rtol=0, atol=1e-5)
    assert 5e-5 < float(moved.mean()) < 2e-4
    rounded = engine.round_end.slow_weights().bfloat16()
    assert torch.equal(weights_of(script.module), rounded)
    assert [parameter.data_ptr() for parameter in script.module.parameters()] == addresses, "changed in place"


def test_vectors_are_fp32_whatever_dtype_a_users_script_makes_tensors_of() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = nn.Linear(3, 2)
        engine = ExternalEngine(Loop(module), manifest_for(module), Turns(), run_id=RUN_ID)
    finally:
        torch.set_default_dtype(before)
    moved = engine.round_end.slow_weights() + 2.0**-12
    assert module.weight.dtype == torch.bfloat16
    sent(engine)
    engine.round_end.apply(moved.numpy().tobytes())
    assert {tensor.dtype for tensor in engine.checkpoint.tensors().values()} == {torch.float32}
    assert torch.equal(engine.round_end.fast_weights(), engine.round_end.slow_weights()), (
        "with what rounding has dropped"
    )


def linear_script(scripts: list[Script], **settings: Any) -> Script:
    module = nn.Linear(3, 2)

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


def test_without_evaluate_and_tokens_per_byte_neither_loss_is_known(scripts: list[Script]) -> None:
    engine = linear_script(scripts).engine
    assert engine.bits_per_byte(1.0, 1) is None
    with pytest.raises(DataError, match="no held-out loss"):
        engine.evaluate(1)


def test_the_losses_that_a_loop_reports_are_shown_by_round(scripts: list[Script]) -> None:
    script = linear_script(scripts)
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


@pytest.mark.parametrize("returned", [float("nan"), "much", ValueError("no text")])
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


def test_tied_parameters_come_once_and_frozen_ones_if_asked_for() -> None:
    module = Tied()
    assert list(parameters_of(module)) == ["embedding.weight", "body.weight"]
    assert list(parameters_of(module, with_frozen=True)) == ["embedding.weight", "body.weight", "body.bias"]
    compiled = nn.ModuleDict({"_orig_mod": module})  # what torch.compile returns has these names
    assert parameters_of(compiled) == parameters_of(module)


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


def test_the_runs_order_counts_and_frozen_parameters_are_shared_where_it_names_them() -> None:
    shapes = {"body.bias": (4,), "body.weight": (4, 4), "embedding.weight": (5, 4)}
    assert list(matching_parameters(Tied(), shapes)) == list(shapes)
