"""Text that a model generates, from weights on this disk: `farandole sample`."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from farandole.protocol.planning.needs import TRAINER_BYTES
from farandole.protocol.run.manifest import Manifest, decode_manifest
from farandole.protocol.run.models import shapes_of
from farandole.protocol.run.rules import SLOW
from farandole.protocol.wire.errors import FarandoleError
from farandole.protocol.wire.safetensors import FP32_BYTES
from farandole.training.base.errors import TrainingError
from farandole.training.base.host_memory import available_bytes
from farandole.training.data.tokenizer import TextStream, Tokenizer, load_tokenizer
from farandole.training.model.own_function import require_allowed
from farandole.training.model.sampling import Sampling

from ..base.figures import count, size
from ..base.settings import NodeSettings
from ..base.system.terminal import without_controls
from ..state.store import MANIFEST_FACT, read_fact
from ..store.consolidated.folder import read_folder
from ..store.consolidated.tensors import ConsolidatedError, Floats, TensorFile, open_tensors
from ..store.folder import CheckpointFolder

# The weights of a whole model on this disk, open to be read: a node's own, or those of a folder.
#
# A node's newest checkpoint is read while its daemon runs. A checkpoint is never changed under its name
# (`farandole.node.store.folder`), and an open file can still be read after the daemon has removed it. Of the store, one
# fact is read. So the daemon neither waits nor notices.

_PULL: Final = "farandole checkpoint pull --to model"


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The weights of a whole model of a run; `read` works while they are open."""

    path: Path
    manifest: Manifest
    read: Callable[[str], Floats]
    """Returns a parameter by its name. Raises `ConsolidatedError`."""
    run_id: bytes
    round: int
    inner_steps: int
    is_own: bool
    """Whether they are of the replica that this node trains."""

    @property
    def facts(self) -> dict[str, object]:
        """Return where the weights are from and how far they are trained, for scripts."""
        of_run = {"run": self.manifest.name, "run_id": self.run_id.hex()}
        return {"weights": str(self.path), **of_run, "round": self.round, "inner_steps": self.inner_steps}

    @property
    def origin(self) -> str:
        """Say which weights these are, for people."""
        whose = "this node's weights" if self.is_own else "weights"
        return (
            f'{whose} of run "{self.manifest.name}", round {self.round}, '
            f"{count(self.inner_steps)} inner steps, from {self.path}"
        )


@contextlib.contextmanager
def open_weights(settings: NodeSettings, folder: Path | None) -> Iterator[ModelWeights]:
    """Open the newest weights of the node's data directory, or those of a folder, while the block runs.

    ``folder``: what `checkpoint pull` or `import` wrote. Raises `FarandoleError`, whose message says what to do.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            yield _of_node(settings, stack)
        else:
            pulled = read_folder(folder)
            file, index = stack.enter_context(open_tensors(pulled.checkpoint)), pulled.index
            reached = index.run_id, index.round, index.inner_steps
            yield ModelWeights(folder, pulled.manifest, _slow(file), *reached, is_own=False)


def _of_node(settings: NodeSettings, stack: contextlib.ExitStack) -> ModelWeights:
    raw = read_fact(settings.store, MANIFEST_FACT)
    if raw is None:
        raise FarandoleError(
            f"{settings.home} knows no run: join one (`farandole join INVITE`), name another data directory with "
            f"--home, or name a folder with a model (`{_PULL} INVITE` makes the folder `model`)"
        )
    manifest, signed = decode_manifest(raw)
    if manifest.model.num_stages > 1:
        raise FarandoleError(
            f"this node holds a stage of {manifest.model.num_stages}, and this takes the whole model: pull it with "
            f"`{_PULL}` while the node runs, then run the command again with the folder `model`"
        )
    problem = ""
    for path in CheckpointFolder(settings.checkpoints, 0).files():
        try:
            file = stack.enter_context(open_tensors(path))
            if file.metadata.get("run_id") != signed.run_id.hex():
                raise ConsolidatedError(f"{path} is a checkpoint of another run")
            return ModelWeights(path, manifest, _slow(file), signed.run_id, *file.counters[:2], is_own=True)
        except ConsolidatedError as error:
            problem = str(error)
    if problem:
        raise FarandoleError(f"no checkpoint in {settings.checkpoints} can be read: {problem}")
    raise FarandoleError(
        f"there is no checkpoint in {settings.checkpoints} yet: a node writes its first one some time after it has "
        f"begun to train ({settings.checkpoint_seconds:g} s by its settings). Try again then; `farandole status` shows "
        "what the node does"
    )


def _slow(file: TensorFile) -> Callable[[str], Floats]:
    return lambda name: file.read(f"{SLOW}/{name}")


@contextlib.contextmanager
def _errors_for_people() -> Iterator[None]:
    """Raise training's errors as `FarandoleError`."""
    try:
        yield
    except TrainingError as error:
        raise FarandoleError(str(error)) from error


@dataclass(slots=True)
class Sample:
    """A text in the making; made by `prepare_sample`."""

    weights: ModelWeights
    tokenizer: Tokenizer
    start: Sequence[int]
    """The prompt's tokens; without a prompt the separator, which stands before each document."""
    _generated: Iterator[int]
    tokens: list[int] = field(default_factory=list)
    """The tokens generated so far, without the separator that ends a document."""
    is_ended: bool = False
    """Whether the model has ended the document."""

    def pieces(self) -> Iterator[str]:
        """Yield the text that follows the prompt, as its tokens come; a terminal may be given it.

        Raises `FarandoleError`.
        """
        text = TextStream(self.tokenizer, self.start)
        with _errors_for_people():
            for token in self._generated:
                if token == self.tokenizer.separator:
                    self.is_ended = True
                    break
                self.tokens.append(token)
                yield without_controls(text.add(token))
        yield without_controls(text.end())


def prepare_sample(
    settings: NodeSettings, folder: Path | None, prompt: str, num_tokens: int, sampling: Sampling, device: str
) -> Sample:
    """Load the newest weights (see `open_weights`), for a text of at most ``num_tokens`` tokens after the prompt.

    Torch is imported only when the weights are known to be there, to fit into the memory, and to be of a model that may
    be made here. Raises `FarandoleError`.
    """
    with open_weights(settings, folder) as weights, _errors_for_people():
        manifest, allowed = weights.manifest, tuple(settings.allow_model)
        model = manifest.model
        if model.external is not None:
            raise FarandoleError(
                "this run's members train in loops of their own, and only these know how the model computes. Its "
                "weights are in checkpoint.safetensors of a folder that `farandole checkpoint pull` writes, by the "
                "names slow/..."
            )
        if model.own is not None:
            require_allowed(model.own.function, model.own.package, allowed)
        tokenizer = load_tokenizer(manifest.tokenizer, settings.tokenizer)
        start = tokenizer.encode(prompt.encode(errors="surrogateescape")).tolist() or [tokenizer.separator]
        positions = min(model.context, len(start) + num_tokens)
        num_parameters = sum(math.prod(shape) for shape in shapes_of(model).values())
        needed = FP32_BYTES * (num_parameters + positions * model.vocabulary) + TRAINER_BYTES
        available = available_bytes()
        if available is not None and available < needed:
            raise FarandoleError(
                f"the model's {num_parameters:,} parameters, and its logits, take {size(needed)} of memory here, with "
                f"PyTorch, and {size(available)} are free: stop other programs, or use a machine with more"
            )

        import torch

        from farandole.training.base.device import choose_device
        from farandole.training.model.generation import generate, load_model

        if weights.is_own:
            # The trainer computes beside it: several threads would wait for each other at every operation.
            torch.set_num_threads(1)
        chosen = choose_device(device)
        module = load_model(manifest, weights.read, chosen, allowed, tokenizer.separator)
        generated = generate(
            module,
            start,
            context=model.context,
            vocabulary=min(model.vocabulary, tokenizer.vocabulary),  # the model may have logits for more tokens
            sampling=sampling,
            device=chosen,
        )
    return Sample(weights, tokenizer, start, itertools.islice(generated, num_tokens))
