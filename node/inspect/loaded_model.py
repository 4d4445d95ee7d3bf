"""Text that a model generates, from weights on this disk: `farandole sample`, `farandole chat`, `farandole serve`."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from farandole.protocol.planning.needs import TRAINER_BYTES
from farandole.protocol.run.manifest import Manifest, decode_manifest
from farandole.protocol.run.models import num_parameters, stage_parameters
from farandole.protocol.run.own_model import ADAPTERS
from farandole.protocol.run.rules import SLOW
from farandole.protocol.wire.errors import FarandoleError
from farandole.protocol.wire.safetensors import FP32_BYTES
from farandole.training.base.errors import TrainingError
from farandole.training.base.host_memory import available_bytes
from farandole.training.data.tokenizer import ByteTokenizer, TextStream, Tokenizer, load_tokenizer, read_tokenizer
from farandole.training.model.own_function import require_allowed
from farandole.training.model.sampling import Sampling

from ..base.control import NoNodeError, call
from ..base.figures import count, size
from ..base.settings import TOKENIZER_NAME, NodeSettings
from ..base.system.tuning import TRAINING_NICENESS, lower_thread_priority
from ..programs.mesh import Mesh
from ..state.store import MANIFEST_FACT, read_fact
from ..store.consolidated.folder import read_folder
from ..store.consolidated.tensors import ConsolidatedError, Floats, TensorFile, open_tensors
from ..store.folder import CheckpointFolder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from farandole.training.base.device import Device
    from farandole.training.model.model import StageModule

# The weights of a whole model on this disk, open to be read: a node's own, or those of a folder.
#
# A node's newest checkpoint is read while its daemon runs. A checkpoint is never changed under its name
# (`farandole.node.store.folder`), and an open file can still be read after the daemon has removed it. Of the store, one
# fact is read. So the daemon neither waits nor notices.

_PULL: Final = "farandole checkpoint pull --to model"


Weights = tuple[Manifest, Callable[[str], Floats], dict[str, Any]]
"""A run's manifest; what reads a parameter by its name while the file is open; where it is and how far, for scripts."""


@contextlib.contextmanager
def open_weights(settings: NodeSettings, folder: Path | None) -> Iterator[Weights]:
    """Open the newest weights of the node's data directory, or those of a folder, while the block runs.

    ``folder``: what `checkpoint pull` or `import` wrote. Raises `FarandoleError`, whose message says what to do.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            yield _of_node(settings, stack)
        else:
            pulled = read_folder(folder)
            file, index = stack.enter_context(open_tensors(pulled.checkpoint)), pulled.index
            yield _weights(folder, pulled.manifest, file, (index.run_id, index.round, index.inner_steps))


def _of_node(settings: NodeSettings, stack: contextlib.ExitStack) -> Weights:
    raw = read_fact(settings.store, MANIFEST_FACT)
    if raw is None:
        raise FarandoleError(
            f"{settings.home} knows no run: join one (`farandole join INVITE`), name another data directory with "
            f"--home, or name a folder with a model (`{_PULL} INVITE` makes the folder `model`)"
        )
    manifest, signed = decode_manifest(raw)
    stage, problem, of_stage = 0, "", dict[str, int]()
    if manifest.model.num_stages > 1:
        pipeline: dict[str, int] | None = None
        with contextlib.suppress(NoNodeError):
            pipeline = call(settings.home, "status", max_members=0)["pipeline"]
        if pipeline is None:
            raise FarandoleError(
                f"this run's model is in stages, and no node in {settings.home} trains one now: start it with "
                f"`farandole join`, or `farandole resume` it. If the whole model fits here, pull it with `{_PULL}` "
                "while the node runs, and name the folder `model`"
            )
        of_stage["stage"] = stage = pipeline["stage"]
    for path in CheckpointFolder(settings.checkpoints, stage).files():
        try:
            file = stack.enter_context(open_tensors(path))
            if file.metadata.get("run_id") != signed.run_id.hex():
                raise ConsolidatedError(f"{path} is a checkpoint of another run")
            manifest, read, facts = _weights(path, manifest, file, (signed.run_id, *file.counters[:2]))
            return manifest, read, facts | of_stage
        except ConsolidatedError as error:
            problem = str(error)
    if problem:
        raise FarandoleError(f"no checkpoint in {settings.checkpoints} can be read: {problem}")
    raise FarandoleError(
        f"there is no checkpoint in {settings.checkpoints} yet: a node writes its first one some time after it has "
        f"begun to train ({settings.checkpoint_seconds:g} s by its settings). Try again then; `farandole status` shows "
        "what the node does"
    )


def _weights(path: Path, manifest: Manifest, file: TensorFile, reached: tuple[bytes, int, int]) -> Weights:
    of_run = {"run": manifest.name, "run_id": reached[0].hex(), "round": reached[1], "inner_steps": reached[2]}
    return manifest, lambda name: file.read(f"{SLOW}/{name}"), {"weights": str(path), **of_run}


@contextlib.contextmanager
def _errors_for_people() -> Iterator[None]:
    """Raise training's errors as `FarandoleError`."""
    try:
        yield
    except TrainingError as error:
        raise FarandoleError(str(error)) from error


@dataclass(slots=True)
class Generation:
    """A text in the making; made by `LoadedModel.generate`."""

    tokenizer: Tokenizer
    start: Sequence[int]
    """The tokens before it."""
    stops: Sequence[str]
    """It ends before the first of these."""
    _ends: frozenset[int]
    _generated: Iterator[int]
    tokens: list[int] = field(default_factory=list)
    """The tokens generated so far, without one that ends the text."""
    is_ended: bool = False
    """Whether the model has ended the text, by such a token or by one of `stops`."""

    def pieces(self) -> Iterator[str]:
        """Yield the text as its tokens come, for some of them an empty piece. It may have control characters.

        Raises `FarandoleError`.
        """
        text, held = TextStream(self.tokenizer, self.start), ""
        with _errors_for_people():
            for token in self._generated:
                if token in self._ends:
                    self.is_ended = True
                    break
                self.tokens.append(token)
                held += text.add(token)
                if found := [at for stop in self.stops if (at := held.find(stop)) >= 0]:
                    self.is_ended = True
                    yield held[: min(found)]
                    return
                # Its end may be the beginning of a stop.
                kept = max((n for stop in self.stops for n in range(len(stop)) if held.endswith(stop[:n])), default=0)
                yield held[: len(held) - kept]
                held = held[len(held) - kept :]
        yield held + text.end()


@dataclass(slots=True)
class LoadedModel:
    """A model in memory, with its tokenizer; made by `load_newest`. One thread at a time may use it."""

    name: str
    facts: dict[str, Any]
    """Where the weights are from and how far they are trained, for scripts."""
    tokenizer: Tokenizer
    context: int
    """The most tokens that the model can see."""
    _module: nn.Module
    _device: Device
    _vocabulary: int
    """Tokens below this are drawn."""
    _ends: frozenset[int]
    manifest: Manifest | None = None
    """The run's; None for a model of transformers."""
    _template: Any = None
    """transformers' tokenizer, which has a chat template; None: chats are written as plain text."""
    _of_node: NodeSettings | None = None
    """Whose newest checkpoint it is."""

    def refresh(self) -> None:
        """Read the node's newest checkpoint, if there is another than at the last call. Raises `FarandoleError`."""
        if self._of_node is None:
            return
        from farandole.training.model.generation import read_parameters_

        with open_weights(self._of_node, None) as (_, read, facts), _errors_for_people():
            if facts.get("stage", 0) != self.stage:
                raise FarandoleError("this node holds another stage now: run this again")
            if facts != self.facts:
                self.facts = {}  # the old ones are no longer whole
                read_parameters_(self._module, read)
                self.facts = facts

    @property
    def stage(self) -> int:
        """Return the stage that is here, of a model in stages; else 0, as where this node makes the text."""
        return int(self.facts.get("stage", 0))

    def compute(self, rows: Tensor, begins: bool) -> Tensor:
        """Return what the stage that is here makes of rows (T, C), with the newest weights if they begin a text."""
        import torch

        if begins:
            self.refresh()
        stage = cast("StageModule", self._module)
        with torch.no_grad(), self._device.autocast():
            return stage.advance(rows[None].to(self._device.torch_device))[0].float().cpu()

    @property
    def origin(self) -> str:
        """Which weights these are, for people."""
        facts, whose = self.facts, "weights" if self._of_node is None else "this node's weights"
        if "run" in facts:
            whose += f' of run "{facts["run"]}", round {facts["round"]}, {count(facts["inner_steps"])} inner steps,'
        return f"{whose} from {facts['weights']}"

    def tokens_of(self, prompt: str) -> list[int]:
        """Return a prompt's tokens; without a prompt the separator, which stands before each document."""
        return self.tokenizer.encode(prompt.encode(errors="surrogateescape")).tolist() or [self.tokenizer.separator]

    def tokens_of_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[list[int], Sequence[str]]:
        """Return the tokens of messages with ``role`` and ``content``, which an answer follows, and where that stops.

        A model without a template gets lines, ``User: ...`` and ``Assistant: ...``. Raises `FarandoleError`.
        """
        if self._template is None:
            names = {"system": "", "user": "User: ", "assistant": "Assistant: "}
            lines = [f"{names[each['role']]}{each['content'].strip()}\n" for each in messages]
            return self.tokens_of("".join([*lines, "Assistant:"])), ("\nUser:",)
        try:
            text = self._template.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True)
        except Exception as error:  # the template is a program, which may refuse them
            raise FarandoleError(f"the model's chat template takes no such messages: {error}") from error
        return self.tokens_of(text), ()

    def generate(
        self, start: Sequence[int], num_tokens: int, sampling: Sampling, stops: Sequence[str] = ()
    ) -> Generation:
        """Return at most ``num_tokens`` that follow a start, which has one at least. Nothing is computed yet.

        Raises `FarandoleError` where a later stage is here.
        """
        from farandole.training.model import generation

        if self.stage:
            raise FarandoleError(
                f"this node holds stage {self.stage}, and text begins and ends at stage 0: run this at a member that "
                "holds it. `farandole serve` computes this stage for such members"
            )
        seen = {"context": self.context, "vocabulary": self._vocabulary}
        drawn = generation.generate(self._module, start, **seen, sampling=sampling, device=self._device)
        return Generation(self.tokenizer, start, stops, self._ends, itertools.islice(drawn, num_tokens))


def load_newest(settings: NodeSettings, folder: Path | None, device: str) -> LoadedModel:
    """Load a folder's model, or the newest weights of the node's data directory (see `open_weights`).

    The folder may be one of transformers or peft, too. Torch is imported only when the weights are known to be there,
    to fit into the memory, and to be of a model that may be made here. Raises `FarandoleError`.
    """
    if folder is not None and any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        return _of_transformers(settings, folder, device)
    with open_weights(settings, folder) as (manifest, read, facts), _errors_for_people():
        model, allowed = manifest.model, tuple(settings.allow_model)
        if model.external is not None:
            raise FarandoleError(
                "this run's members train in loops of their own, and only these know how the model computes. Its "
                "weights are in checkpoint.safetensors of a folder that `farandole checkpoint pull` writes, by the "
                "names slow/..."
            )
        if model.own is not None:
            require_allowed(model.own.function, model.own.package, allowed)
        base = settings.base if model.own is not None and model.own.function == ADAPTERS else None
        stage: int | None = facts.get("stage")
        tokenizer = ByteTokenizer() if stage else load_tokenizer(manifest.tokenizer, settings.tokenizer)
        num_elements = num_parameters(model) if stage is None else stage_parameters(model, stage)
        _require_memory(FP32_BYTES * num_elements, base)

        import torch

        from farandole.training.base.device import choose_device
        from farandole.training.model.adapters import Adapted
        from farandole.training.model.generation import load_model

        if folder is None:
            # The trainer computes beside it: several threads would wait for each other at every operation.
            torch.set_num_threads(1)
            lower_thread_priority(TRAINING_NICENESS)
        chosen = choose_device(device)
        module = load_model(manifest, read, chosen, allowed, tokenizer.separator, stage)
        if stage == 0:
            from .remote_stages import LaterStages

            cast("StageModule", module).onward = LaterStages(manifest, Mesh(home=settings.home))
        ends, template = _of_base(base)
        return LoadedModel(
            name=manifest.name,
            facts=facts,
            tokenizer=tokenizer,
            context=module.context if isinstance(module, Adapted) else model.context,
            _module=module,
            _device=chosen,
            _vocabulary=min(model.vocabulary, tokenizer.vocabulary),  # the model may have logits for more tokens
            _ends=ends | {tokenizer.separator},
            manifest=manifest,
            _template=template,
            _of_node=settings if folder is None else None,
        )


def _of_transformers(settings: NodeSettings, folder: Path, device: str) -> LoadedModel:
    """Load a folder of transformers, or one of peft with the base that the settings name."""
    has_adapters = (folder / "adapter_config.json").exists()
    base = settings.base if has_adapters else folder
    if base is None:
        raise FarandoleError(f"{folder} has adapters of a base model: name its folder with --base FOLDER")
    if has_adapters and not (folder / "adapter_model.safetensors").exists():  # peft would take a pickle
        raise FarandoleError(f"{folder} has no adapter_model.safetensors")
    _require_memory(0, base)
    with _errors_for_people():
        tokenizer = read_tokenizer(settings.tokenizer or base / TOKENIZER_NAME)

        from farandole.training.base.device import choose_device
        from farandole.training.model.adapters import model_of

        chosen = choose_device(device)
        module = model_of(base, folder if has_adapters else None).to(chosen.torch_device).eval()
    ends, template = _of_base(base)
    return LoadedModel(
        name=folder.resolve().name,
        facts={"weights": str(folder)},
        tokenizer=tokenizer,
        context=module.context,
        _module=module,
        _device=chosen,
        _vocabulary=tokenizer.vocabulary,
        _ends=ends | ({tokenizer.separator} if tokenizer.has_separator else frozenset()),
        _template=template,
    )


def _require_memory(num_bytes: int, base: Path | None) -> None:
    """Raise `FarandoleError` unless weights of this size, those of a base, and PyTorch fit into the free memory."""
    of_base = 0 if base is None else sum(path.stat().st_size for path in base.glob("*.safetensors"))
    needed, available = num_bytes + of_base + TRAINER_BYTES, available_bytes()
    if available is not None and available < needed:
        raise FarandoleError(
            f"the model takes {size(needed)} of memory here, with PyTorch, and {size(available)} are free: stop other "
            "programs, or use a machine with more"
        )


def _of_base(folder: Path | None) -> tuple[frozenset[int], Any]:
    """Return the tokens with which a model of transformers ends a text, and transformers' tokenizer for its chats."""
    ends, tokenizer = set[int](), None
    if folder is None:
        return frozenset(), None
    for name in ("config.json", "generation_config.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # without such a file there are none
            end = json.loads((folder / name).read_bytes()).get("eos_token_id")
            ends.update(token for token in (end if isinstance(end, list) else [end]) if isinstance(token, int))
    with contextlib.suppress(ImportError, OSError, ValueError):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return frozenset(ends), tokenizer if getattr(tokenizer, "chat_template", None) else None
