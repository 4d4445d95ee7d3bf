"""Rows of mistakes in users' loops, against real nodes: each is an error that says what to do, or works."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole.node.own_loop import attachment
from farandole.node.own_loop.child_node import run_of_node
from farandole.node.own_loop.noloco import MAX_STEPS_OF_OTHERS, NoLoCo
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.wire.identity import peer_id_of
from farandole.training.base.errors import TrainingError

STEPS = 3  # of a round


class Scaled(nn.Linear):
    """A layer with a parameter of no dimensions, as CLIP has one."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def loss(self) -> Tensor:
        """Return a loss that each parameter has a part in."""
        loss: Tensor = (self(torch.ones(1, 3)) * self.scale).square().sum()
        return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def take_steps(model: Scaled, optimizer: torch.optim.Optimizer, number: int) -> None:
    for _ in range(number):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()


@pytest.fixture(scope="module", autouse=True)
def _on_loopback() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARANDOLE_LISTEN", "/ip4/127.0.0.1/tcp/0")
        patch.setenv("FARANDOLE_MDNS", "false")
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rounds = {"inner_steps": STEPS, "round_seconds": 0, "exchange_seconds": 30}
    return farandole.create_run(Scaled(), tmp_path_factory.mktemp("runs") / "run", rounds=rounds)


@pytest.fixture(scope="module")
def loop(run: Path) -> Iterator[tuple[Scaled, torch.optim.Optimizer, NoLoCo]]:
    """Yield a loop in its block."""
    model = Scaled()
    with torch.no_grad():
        model.scale.fill_(7.0)
    with farandole.NoLoCo(model, optimizer := optimizer_of(model), run) as joined:
        assert model.scale == 2.0, "the run's, which has no dimensions"
        take_steps(model, optimizer, 3 * STEPS)
        assert joined.round >= 1
        yield model, optimizer, joined


Entered = tuple[Scaled, torch.optim.Optimizer, NoLoCo]


def test_a_block_is_entered_once(loop: Entered) -> None:
    model, optimizer, joined = loop
    with pytest.raises(farandole.NodeError, match="make another one"), joined:
        pass
    take_steps(model, optimizer, STEPS)
    assert len(joined.members) == 1, "its node is still there"


def test_a_second_program_on_the_folder_ends_no_node_but_its_own(loop: Entered, run: Path) -> None:
    """It may be a notebook beside a script, or a data loader's worker that runs the script again."""
    model, optimizer, joined = loop
    other = Scaled()
    second = farandole.NoLoCo(other, optimizer_of(other), run)
    with pytest.raises(farandole.NodeError, match=r"another loop .* NoLoCo\(options=\['--home'"), second:
        pass
    before = joined.round
    take_steps(model, optimizer, 2 * STEPS)
    assert joined.round > before
    assert not joined.is_over


def test_a_process_that_the_loop_has_forked_cannot_step(loop: Entered) -> None:
    model, optimizer, _ = loop
    if (child := os.fork()) == 0:
        try:
            optimizer.step()
        except farandole.NodeError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    take_steps(model, optimizer, STEPS)


def test_a_loop_that_goes_on_with_another_optimizer_is_told_so(loop: Entered) -> None:
    model, optimizer, _ = loop
    apart, others = Scaled(), optimizer_of(model)
    take_steps(apart, optimizer_of(apart), 2 * MAX_STEPS_OF_OTHERS)  # another model is no matter of the run's
    for _ in range(2):  # nor is one of several optimizers that take turns
        take_steps(model, others, MAX_STEPS_OF_OTHERS - 1)
        take_steps(model, optimizer, 1)
    with pytest.raises(TrainingError, match="another optimizer trains the model"):
        take_steps(model, others, MAX_STEPS_OF_OTHERS)


def test_an_optimizer_that_steps_during_the_backward_pass_is_refused(loop: Entered) -> None:
    model, optimizer, joined = loop
    hook = model.scale.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    with pytest.raises(TrainingError, match="steps during the backward pass"):
        model.loss().backward()
    hook.remove()
    before = joined.round
    take_steps(model, optimizer, 2 * STEPS)
    assert joined.round > before


def test_replaced_parameters_end_the_loop(tmp_path: Path) -> None:
    """The optimizer, and the run, would go on with what the model has no more. Outside of the block nobody is there."""
    model = Scaled()
    loop = farandole.NoLoCo(
        model,
        optimizer := optimizer_of(model),
        farandole.create_run(model, tmp_path / "run", rounds={"inner_steps": STEPS, "round_seconds": 0}),
    )
    assert (loop.members, loop.partner) == ([], "")
    with pytest.raises(TrainingError, match="parameters were replaced"), loop:
        assert len(loop.members) == 1
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        take_steps(model, optimizer, 2 * STEPS)
    assert (loop.members, loop.partner) == ([], "")


def test_lbfgs_forgets_its_steps_at_an_outer_step(tmp_path: Path) -> None:
    model = Scaled()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model.loss()
        loss.backward()
        return loss.item()

    memory = list[int]()
    run = farandole.create_run(model, tmp_path / "run", rounds={"inner_steps": STEPS, "round_seconds": 0})
    with farandole.NoLoCo(model, optimizer, run) as joined:
        while joined.round < 2:
            memory.append(len(optimizer.state))
            optimizer.step(closure)
    assert 0 in memory[1:], "after the first outer step"
    assert 1 in memory


def test_a_run_that_averages_momenta_takes_them_from_the_loops_optimizers(tmp_path: Path) -> None:
    model = Scaled()
    rounds, outer = {"inner_steps": STEPS, "round_seconds": 0}, {"codec": "int8", "momentum_codec": "int4"}
    run = farandole.create_run(model, tmp_path / "run", rounds=rounds, outer=outer)
    muon, others = torch.optim.Muon([model.weight]), torch.optim.SGD([model.bias, model.scale], lr=0.01)
    with farandole.NoLoCo(model, others, run) as joined:
        while joined.round < 2:
            model.zero_grad()
            model.loss().backward()
            muon.step()
            others.step()
    loop = farandole.NoLoCo(model, optimizer := optimizer_of(model), run)
    with pytest.raises(TrainingError, match="SGD keeps none"), loop:
        take_steps(model, optimizer, 2 * STEPS)


def test_a_node_that_cannot_join_is_given_up_and_its_warnings_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only member is gone. The warning is another one's, which comes sooner than the one that says so."""
    monkeypatch.setattr(attachment, "LOOK_SECONDS", 0.2)
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no nvidia-smi
    invite = encode_invite(Invite(bytes(32), (f"/ip4/127.0.0.1/tcp/9/p2p/{peer_id_of(bytes(32))}",)))
    model, home = Scaled(), tmp_path / "home"
    options = ["--only-when-idle", "--home", str(home)]
    loop = farandole.NoLoCo(model, optimizer_of(model), invite, timeout=4.0, options=options)
    with pytest.raises(farandole.NodeError, match=r"within 4 s \(NoLoCo's timeout\): no known address answers"), loop:
        pass
    assert "the node warns: who else uses the GPU is not seen" in caplog.text
    assert not run_of_node(home)


def test_a_misspelt_name_is_an_error_for_type_checkers_too() -> None:
    with pytest.raises(AttributeError, match="NoLoco"):
        farandole.NoLoco  # type: ignore[attr-defined]  # noqa: B018 - mypy finds this comment superfluous otherwise
    asked = subprocess.run(
        [sys.executable, "-c", "import farandole; print(farandole.__version__)"], capture_output=True, text=True
    )
    assert asked.stdout.strip() == farandole.__version__
