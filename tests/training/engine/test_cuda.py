"""What needs a CUDA device: skipped without one."""

import contextlib
import logging
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from farandole.protocol.run.manifest import InnerConfig, InnerName, ModelConfig
from farandole.protocol.run.rules import DEFAULT_SCREENING, Codec, NoLoCoConfig
from farandole.protocol.trainer.trainer_messages import TrainerSettings
from farandole.testnet.methods.baselines import Method, Trial
from farandole.testnet.methods.stacked import Stack, train
from farandole.training.base.device import CONTEXT_BYTES, choose_device, is_out_of_memory, limit_memory
from farandole.training.data.dataset import Sampler, Text
from farandole.training.engine.learner import Learner
from farandole.training.model.model import build_model
from farandole.training.outer import codec
from farandole.training.outer.contribution import copier_for
from farandole.training.screening.rule import Encounter

from ..conftest import ALICE, BOB, RUN_ID, MakeReplica, refusal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here")


def test_no_more_memory_is_taken_than_was_allowed() -> None:
    with pytest.raises(RuntimeError) as there_is_none:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(there_is_none.value)
    device = choose_device("cuda")
    try:
        limit_memory(device, CONTEXT_BYTES + 512 * 2**20)
        torch.empty(256 * 2**20, dtype=torch.uint8, device=device.torch_device)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(768 * 2**20, dtype=torch.uint8, device=device.torch_device)
        assert is_out_of_memory(caught.value)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device.torch_device.index)


@pytest.fixture
def make(make_replica: MakeReplica) -> Callable[..., Learner]:
    """Of a run whose outer step is the mean."""

    def make(device: str, author: bytes = ALICE, name: Codec = "fp32", *, is_compiled: bool = False) -> Learner:
        outer = NoLoCoConfig(codec=name, alpha=0.0, beta=1.0, gamma=1.0)
        settings, screening = TrainerSettings(compile=is_compiled), DEFAULT_SCREENING
        return make_replica(author, rule=outer, screening=screening, device=choose_device(device), settings=settings)

    return make


@pytest.mark.parametrize("rel", [1e-4, 3e-2])
def test_a_gpu_masks_documents(model: ModelConfig, rel: float) -> None:
    device = choose_device("cuda")
    module, tokens = build_model(model, 7).to(device.torch_device), torch.tensor([[7, 3, 9, 0, 4, 4, 1, 2]])
    with torch.no_grad(), device.autocast() if rel > 1e-3 else contextlib.nullcontext():
        alone = torch.cat([module(part.to(device.torch_device)) for part in tokens.split((3, 5), dim=1)], dim=1)
        module.separator = 0
        together = module(tokens.to(device.torch_device))
    torch.testing.assert_close(together, alone, rtol=rel, atol=rel)


@pytest.mark.parametrize("name", codec.CODECS)
def test_a_gpu_and_a_cpu_come_to_the_same_mean(
    make: Callable[..., Learner], name: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "_SLICE", 512)
    gpu, cpu = make("cuda", ALICE, name), make("cpu", BOB, name)
    memory = {each: mmap.mmap(-1, each.round_end.contribution_bytes) for each in (gpu, cpu)}
    for each in (gpu, cpu):
        each.round_end.outer.copier.pin(memoryview(memory[each]))
        each.learn()
    sizes = [each.round_end.contribute(memoryview(memory[each]))[0] for each in (gpu, cpu)]
    errors = []
    for each, size in zip((gpu, cpu), sizes, strict=True):
        weights = each.round_end.fast_weights().cpu()
        errors.append(weights - codec.decode(name, memoryview(memory[each])[:size], len(weights)))
    gpu.learn()  # queued behind the exchange, or beside it
    gpu.round_end.take_in(memoryview(memory[cpu])[: sizes[1]], 1_000)
    assert refusal(gpu, memoryview(memory[cpu])[: sizes[1]]) == ""
    assert gpu.round_end.apply(memoryview(memory[cpu])[: sizes[1]], Encounter(b"", 1, 1), own_first=True) == 1
    cpu.round_end.apply(memoryview(memory[gpu])[: sizes[0]], Encounter(b"", 1, 1), own_first=False)

    difference = gpu.round_end.outer.slow.clone().cpu() - cpu.round_end.outer.slow.clone()
    if name == "fp32":
        assert not bool(difference.any())
    else:  # own contributions are exact: the codec's errors are what the means differ by
        torch.testing.assert_close(difference, errors[0] - errors[1], rtol=0, atol=1e-6)


def test_a_snapshot_holds_up_nothing_and_is_of_before(make: Callable[..., Learner], tmp_path: Path) -> None:
    node = make("cuda", name="int8")
    for _ in range(3):  # into the same memory
        node.learn()
        node.round_end.apply(None)
        then = node.checkpoint.save(tmp_path / "then")
        snapshot = node.checkpoint.snapshot()
        assert all(flat.is_pinned() for flat in snapshot.state.values())
        for _ in range(5):  # queued behind the copies
            node.learn()
        node.round_end.apply(None)
        assert snapshot.save(tmp_path / "snapshot") == then


def test_memory_that_cannot_be_page_locked_is_used_by_a_detour(caplog: pytest.LogCaptureFixture) -> None:
    copiers, memory = [copier_for(torch.device("cuda")) for _ in range(2)], mmap.mmap(-1, 1 << 20)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    with caplog.at_level(logging.DEBUG):
        for copier in copiers:  # the second one is refused
            copier.pin(memoryview(memory))
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    with copiers[1].aside():
        copiers[1].send(copiers[1].to_fill(host).fill_(7), host)()
    assert bool((host == 7).all())


@pytest.mark.parametrize("is_pinned", [True, False])
def test_copies_arrive_by_either_way(is_pinned: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Memory is page-locked as long as its copier lives: the system gives the same addresses again."""
    for _ in range(3):
        copier, memory = copier_for(torch.device("cuda")), mmap.mmap(-1, 1 << 20)
        host = torch.frombuffer(memory, dtype=torch.uint8)
        if is_pinned:
            with caplog.at_level(logging.DEBUG):
                copier.pin(memoryview(memory))
        assert host.is_pinned() == is_pinned
        with copier.aside():
            copier.send(copier.to_fill(host).fill_(7), host)()
            assert bool((host == 7).all())
            assert bool((copier.fetch(host) == 7).all())
        del copier, host, memory
    assert not caplog.records


def test_compiled_inner_steps_learn_the_same(make: Callable[..., Learner]) -> None:
    plain, compiled = (make("cuda", is_compiled=flag) for flag in (False, True))
    for _ in range(3):
        torch.testing.assert_close(plain.learn(), compiled.learn(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_stack_is_trained_by_a_graph_of_kernels(
    model: ModelConfig, inner: InnerConfig, text: Text, optimizer: InnerName
) -> None:
    author = [Sampler(text, key=(RUN_ID, a), batch_size=2, context=model.context) for a in (ALICE, BOB)]
    method = Method("pairs", "pairs", 2, NoLoCoConfig(momentum="nesterov", codec="int8"), optimizer=optimizer)
    trials = [Trial(1, 1.0, author)]
    gpu, cpu = (Stack(method, [build_model(model, 1)], inner, trials, torch.device(name)) for name in ("cuda", "cpu"))
    for stack in (gpu, cpu):
        train(method, stack, trials, 8)
    batches = [author[0].held_out_batch(0)]
    assert gpu.losses(batches) == pytest.approx(cpu.losses(batches), rel=5e-3)
