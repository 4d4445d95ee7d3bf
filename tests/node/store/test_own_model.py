"""A user's own model in real nodes and in run files: examples/own_model, as its README says."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from msgspec.structs import replace

from farandole.node.base.control import call
from farandole.node.base.errors import Exit, JoinError
from farandole.node.inspect.remote_stages import NAME
from farandole.node.programs.mesh import Mesh
from farandole.node.store.run_file import manifest_of, require_trainable_model
from farandole.protocol.run.manifest import Manifest, StartConfig, manifest_from_dict
from farandole.protocol.run.models import num_parameters
from farandole.protocol.wire.errors import ManifestError
from farandole.training.base.errors import TrainingError
from farandole.training.cluster.external import ExternalEngine, Loop, Turns
from farandole.training.model.stages import build_module

from ...patience import PATIENCE
from ..app.test_serving import talk
from ..daemons import joined, running
from ..small_runs import write_run

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_model"
CUT = {"preset": "tiny", "num_stages": 2}
BUILD, WHOLE = "own_model.convolutional:build", "own_model.convolutional:build_whole"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the example importable in this process, and in processes that it starts."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLE), os.environ.get("PYTHONPATH", "")]))


def own_run(model: object, allowed: tuple[str, ...] = (BUILD, WHOLE)) -> Manifest:
    return manifest_of({"name": "a", "model": model}, Path(), 0, allowed)


async def test_three_nodes_train_it_in_stages_and_openais_client_gets_its_text(tmp_path: Path, texts: Path) -> None:
    cut = {"num_stages": 3, "own": BUILD, "context": 64, "vocabulary": 256, "config": {"width": 64, "depth": 4}}
    run = {"name": "a", "model": cut, "inner": {"learning_rate": 3e-3, "warmup_steps": 20, "batch_size": 16}}
    boxed = {"data": {"source": "text"}, "rounds": {"round_seconds": 1, "exchange_seconds": 5}}
    signed = write_run(tmp_path, manifest_of(run | boxed, Path(), 0, (BUILD,)))
    options = ("--data", str(texts), "--allow-model", BUILD, "--checkpoint-seconds", "0.2", "--stage")
    serve = (sys.executable, "-m", "farandole.node", "serve", "--port", "0", "--allow-model", BUILD, "--home")

    def say(client: Any) -> None:
        assert client.completions.create(model="a", prompt="def ", max_tokens=5, temperature=0).choices[0].text

    async with contextlib.AsyncExitStack() as stack:
        alice = await stack.enter_async_context(joined(tmp_path / "0", str(tmp_path / "run.manifest"), *options, "0"))
        await alice.says("listening on")
        for stage in ("1", "2"):
            await stack.enter_async_context(joined(tmp_path / stage, alice.invite(signed.run_id), *options, stage))
        await alice.until(lambda status: bool(status.losses) and status.losses[-1][1] < status.losses[0][1] - 0.5)
        homes = [str(tmp_path / stage) for stage in "012"]
        servers = [await stack.enter_async_context(running(tmp_path, [*serve, home], {})) for home in homes]
        port = int((await servers[0].says("a is at http://127.0.0.1:")).removesuffix("/v1").rpartition(":")[2])
        with trio.fail_after(PATIENCE):
            while len(await trio.to_thread.run_sync(Mesh(home=homes[0]).notes, NAME)) < 2:  # noqa: ASYNC110 - no event
                await trio.sleep(0.2)
        await talk(port, say)
        await trio.to_thread.run_sync(call, Path(homes[2]), "pause")
        with pytest.raises(Exception, match=r"nobody computes stage 2 .*farandole serve"):
            await talk(port, say)
        assert (await servers[1].end(signal.SIGINT), await servers[2].ends()) == (0, Exit.BAD_INPUT)


def test_a_function_is_a_model() -> None:
    short, long = own_run(BUILD), own_run({"own": BUILD, "context": 256, "vocabulary": 256, "config": {"depth": 4}})
    assert short.model.own is not None
    assert (short.model.num_layers, short.model.width, short.model.context) == (4, 64, 256)
    assert long.model.own is not None
    assert (long.model.own.layer, long.model.own.config) == (short.model.own.layer, {"depth": 4})
    assert num_parameters(short.model) == 256 * 64 + 2 * 64 + 4 * (2 * 64 + 128 * 5 + 64 * 65)


def test_a_module_without_sections_is_one_layer() -> None:
    model = own_run(WHOLE).model
    assert (model.num_layers, model.width) == (1, 0)
    with pytest.raises(ManifestError, match="makes a module without sections: it trains whole"):
        own_run({"own": WHOLE, "num_stages": 2})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("os:system", "--allow-model os:system"),
        ({"own": "os.system"}, r"expected a function's name in quotes, package\.module:function"),
        ({"own": BUILD, "config": {"width": [[1]]}}, "config"),
        ({"own": BUILD, "config": {"width": "64"}}, "model.own: the model's own code failed: TypeError"),
        ({"own": BUILD, "config": {"rate": float("nan")}}, "numbers must be finite"),
        ({"own": BUILD, "num_stages": 9}, "num_stages is 9"),
    ],
)
def test_what_is_wrong_with_it_is_named(model: object, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        own_run(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 4}, "num_heads is 4"),
        ({"width": 0}, "model.width 0"),
        ({"num_layers": 512, "own": {"ends": {"a": [1]}, "layer": {"a": [2**40]}}}, "more than"),
        ({"own": {"ends": {}}}, "ends"),
        ({"own": {"ends": {"../../etc": [1]}}}, "ends"),
        ({"own": {"ends": {"a": [0]}}}, "ends"),
        ({"own": {"function": "a b:c"}}, "function"),
        ({"own": {"function": "a:__import__('os')"}}, "function"),
        ({"hf": {"model_type": "gpt2", "vocab_size": 2, "n_embd": 8, "n_inner": 8, "n_layer": 1, "n_head": 1}}, "two"),
    ],
)
def test_a_hostile_manifest_is_refused(change: dict[str, Any], message: str) -> None:
    own = {"function": BUILD, "ends": {"a": [4, 8]}, "layer": {"a": [8]}, **change.pop("own", {})}
    sizes = {"num_layers": 2, "width": 8, "num_heads": 0, "hidden": 0, "context": 8, "vocabulary": 256, **change}
    with pytest.raises(ManifestError, match=message):
        manifest_from_dict({"name": "a", "model": {**sizes, "own": own}})


def test_the_owner_has_the_last_word() -> None:
    """A loop brings the module, and needs the function only for the weights of the seed."""
    tiny, cut = (manifest_of({"name": "a", "model": model}, Path(), 0) for model in ("tiny", CUT))
    own = own_run(BUILD)
    started = replace(own, start=StartConfig("a" * 64, "b" * 64))
    sizes = dict.fromkeys(("width", "num_heads", "hidden", "context", "vocabulary"), 0)
    loops = manifest_from_dict(
        {"name": "a", "model": {"num_layers": 1, **sizes, "external": {"parameters": {"w": [2]}}}}
    )
    for run, allowed, by_loop in (
        *((own, [WHOLE, BUILD], False), (own, [BUILD], True)),
        *((tiny, [], False), (tiny, [], True), (started, [], True), (loops, [], True)),
    ):
        require_trainable_model(run, allowed, by_loop=by_loop)
    for run, allowed, by_loop, message in (
        *((own, allowed, False, f"--allow-model {BUILD}") for allowed in ([], [WHOLE], ["own_model"], [BUILD.upper()])),
        (own, [], True, f"--allow-model {BUILD}"),
        (started, [], False, f"--allow-model {BUILD}"),
        (cut, [], True, r"model\.num_stages exclude.*farandole join without --trainer external"),
        (loops, [], False, r"farandole\.NoLoCo.*--trainer external"),
    ):
        with pytest.raises(JoinError, match=message):
            require_trainable_model(run, allowed, by_loop=by_loop)


@pytest.mark.parametrize("function", [BUILD, WHOLE])
def test_a_loop_that_brings_the_module_begins_with_the_seeds_weights(function: str) -> None:
    run = own_run(function)
    module, oracle = (build_module(run.model, seed, allowed_models=[function]) for seed in (1, run.seed))
    loop = Loop(module, tokens_per_step=1)
    engine = ExternalEngine(loop, run, Turns(), run_id=b"r" * 32, allowed_models=[function])
    engine.begin_anew()
    for mine, expected in zip(module.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(mine, expected)
    with pytest.raises(TrainingError, match=f"--allow-model {function}"):
        ExternalEngine(loop, run, Turns(), run_id=b"r" * 32).begin_anew()
