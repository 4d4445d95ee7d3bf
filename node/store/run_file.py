"""``run.toml``: a run as a person writes it, turned into a manifest.

It has the manifest's own fields, and some shortcuts: a model by its preset's name, by its Hugging Face configuration
or by the function that makes it, a tokenizer by its file, and the schedule of the
learning rate by tokens.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from farandole.protocol.planning.adapters import USUAL_CONTEXT, Base
from farandole.protocol.planning.planning import BY_TOKENS
from farandole.protocol.run.exclusions import why_no_loop
from farandole.protocol.run.families import FAMILIES, HFConfig, base, hf_config_from_dict
from farandole.protocol.run.manifest import InnerConfig, Manifest, manifest_from_dict
from farandole.protocol.run.models import PRESETS, preset
from farandole.protocol.run.own_model import ADAPTERS, MAX_RANK, FunctionName, Settings
from farandole.protocol.run.rules import with_known
from farandole.protocol.wire.errors import FarandoleError, ManifestError
from farandole.training.base.errors import DataError, TrainingError
from farandole.training.model.own_function import is_allowed, require_allowed

from ..base.config.toml_file import TomlFile, check, did_you_mean, shown
from ..base.errors import JoinError

_HF_PREFIX: Final = "hf:"
# What a run file may have, and a manifest has in another form.
_SHORTCUTS: Final[Mapping[str, Collection[str]]] = {
    "model": ("preset", "hf", "own", "lora"),
    "tokenizer": ("file",),
    "inner": tuple(name.removeprefix("inner.") for name in BY_TOKENS),
}
_MODEL_FORM: Final = (
    f"a preset ({', '.join(PRESETS)}), a folder (hf:FOLDER), a function (package.module:function), or a section"
)
# More tokens than any run has; it bounds what is divided.
MAX_TOKENS: Final = 2**56


def manifest_of_file(file: TomlFile, now: float, allowed_models: Collection[str] = ()) -> Manifest:
    """Make the manifest that a run file describes, at ``now`` (Unix seconds).

    ``allowed_models`` are the functions that may be called to make a user's own module. Raises `ManifestError`, with a
    line for each fault, which begins with the file's name.
    """
    with file.named():
        return manifest_of(file.values, file.path.parent, now, allowed_models)


def manifest_of(
    settings: Mapping[str, Any], folder: Path, now: float, allowed_models: Collection[str] = ()
) -> Manifest:
    """Make the manifest from a parsed run file; ``folder`` is where its relative paths start.

    For ``allowed_models`` see `manifest_of_file`. Raises `ManifestError`, whose problems begin with a setting's name.
    """
    model, tokenizer = settings.get("model"), settings.get("tokenizer", {})
    if isinstance(model, str):  # "3M", "hf:FOLDER" or "package.module:function"
        kind = "hf" if model.startswith(_HF_PREFIX) else "own" if ":" in model else "preset"
        model = {kind: model.removeprefix(_HF_PREFIX)}
    if "tokenizer" not in settings and isinstance(model, Mapping) and (of := model.get("hf", model.get("lora"))):
        tokenizer = hf_tokenizer(of, folder)
    complete = with_known({"created_at": int(now), "outer": {}, **settings})
    if "model" not in settings and not settings.keys() - set(Manifest.__struct_fields__):
        raise ManifestError(f"model is missing: expected {_MODEL_FORM}")
    if "model" in settings:
        complete["model"] = _model(model, folder, allowed_models)
    complete["tokenizer"] = _tokenizer(tokenizer, folder)
    if isinstance(model, Mapping) and "lora" in model and isinstance(complete.get("inner", {}), Mapping):
        complete["inner"] = {**ADAPTERS_INNER, **complete.get("inner", {})}
    complete["inner"] = _by_steps(complete.get("inner", {}), complete.get("model"))
    check(complete, Manifest, shortcuts=_SHORTCUTS)
    manifest = manifest_from_dict(complete)
    if isinstance(tokenizer, Mapping) and "file" in tokenizer:
        _try_tokenizer(manifest, folder / str(tokenizer["file"]))
    return manifest


def _try_tokenizer(manifest: Manifest, path: Path) -> None:
    """Raise `ManifestError` if no node could use the tokenizer file, or the model has too few tokens for it."""
    from farandole.training.data.tokenizer import load_tokenizer  # imports numpy

    if importlib.util.find_spec("tokenizers") is None:  # this machine cannot tell; the nodes have it
        return
    model, problem = manifest.model, ""
    try:
        num_tokens = load_tokenizer(manifest.tokenizer, path).vocabulary
    except DataError as error:
        problem = str(error)
    else:
        if model.own is None and model.external is None and num_tokens > model.vocabulary:
            problem = (
                f"{path} has {num_tokens} tokens, and the model {model.vocabulary}: set model.vocabulary = {num_tokens}"
            )
    if problem:
        raise ManifestError(f"tokenizer.file: {problem}")


def _model(model: object, folder: Path, allowed_models: Collection[str]) -> object:
    """Expand a table that starts from a preset, ``{preset = "3M", context = 512}``, from ``hf``, or from ``own``."""
    if isinstance(model, Mapping) and isinstance(model.get("lora"), str):
        return lora_model(model, folder)
    if isinstance(model, Mapping) and isinstance(model.get("own"), str):
        return own_model(model, allowed_models)
    if isinstance(model, Mapping) and model.get("hf") is not None:
        return hf_model(model, folder)
    if isinstance(model, Mapping) and not model.keys() - {"num_stages"}:
        raise ManifestError('model: say which: preset = "3M", or its sizes (num_layers, width, ...)')
    if not isinstance(model, Mapping):
        raise ManifestError(f"model: expected {_MODEL_FORM}, got {shown(model)}")
    if "preset" not in model:
        return model
    name, rest = str(model["preset"]), {name: value for name, value in model.items() if name != "preset"}
    try:
        return {**msgspec.structs.asdict(preset(name)), **rest}
    except ManifestError as error:
        near = did_you_mean(name, PRESETS)
        raise ManifestError(f"{error}{f'; did you mean {near}?' if near else ''}") from error


def _by_steps(inner: object, model: object) -> object:
    """Turn tokens of one member into inner steps, at least one."""
    if not isinstance(inner, Mapping):
        return inner
    section = dict(inner)
    context = model.get("context") if isinstance(model, Mapping) else None
    batch_size = section.get("batch_size", InnerConfig().batch_size)
    for name, other in BY_TOKENS.items():
        steps = other.removeprefix("inner.")
        if (tokens := section.pop(name.removeprefix("inner."), None)) is None:
            continue
        if steps in section:
            raise ManifestError(f"{name} and {other} say the same: leave one of them out")
        if not isinstance(tokens, int | float) or isinstance(tokens, bool) or not 0 < tokens <= MAX_TOKENS:
            raise ManifestError(f"{name} is {shown(tokens)}: a positive number is expected")
        if not isinstance(context, int) or context <= 0:
            raise ManifestError(f"{name} needs a model with a context: set {other}")
        if isinstance(batch_size, int) and batch_size > 0:  # otherwise it is refused later
            section[steps] = max(1, round(tokens / (batch_size * context)))
    return section


def _tokenizer(tokenizer: object, folder: Path) -> object:
    """Replace ``{file = "tokenizer.json"}`` by the hash by which every node will know the file."""
    if not isinstance(tokenizer, Mapping) or "file" not in tokenizer:
        return tokenizer
    path = folder / str(tokenizer["file"])
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ManifestError(f"tokenizer.file: cannot read {path}: {error.strerror}") from error
    rest = {name: value for name, value in tokenizer.items() if name != "file"}
    return {"kind": "tokenizers", "sha256": digest, **rest}


# Hugging Face configurations
#
# In ``model = {hf = "config.json", num_stages = 3, context = 128}``, the file's path may be replaced by its folder's,
# or by its content as a table. Settings that decide how the model is trained go into the manifest
# (`farandole.protocol.run.families`). Settings without effect on training are left out. Any other setting is refused by
# name, because it might make it a different model.

# A configuration has two pages; with labels or parameters of tasks a few more.
MAX_CONFIG_BYTES: Final = 256 * 1024

# These have no effect on training here: names and versions; generation; other tasks; tokens that text does not contain;
# the dtype of weights that are not there. Dropout is left out on purpose: a stage's work may be done twice, and must
# give the same result (`farandole.protocol.run.families`).
_WITHOUT_BEARING: Final = frozenset(
    {
        *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype"),
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "pretraining_tp", "n_ctx"),
        *("chunk_size_feed_forward", "gradient_checkpointing", "_attn_implementation_autoset"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
        *("id2label", "label2id", "problem_type", "task_specific_params"),
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
        *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
    }
)
# Known settings that are trained only with transformers' default values.
_AS_USUAL: Final[Mapping[str, object]] = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "reorder_and_upcast_attn": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
}
_TOKENIZER_FILE: Final = "tokenizer.json"
_OTHER_TOKENIZER_FILES: Final = ("tokenizer.model", "vocab.json", "spiece.model", "vocab.txt", "tokenizer_config.json")


def hf_model(model: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make a manifest's ``model`` table from one of a run file that has ``hf``; other fields stay as they are.

    Sizes follow from the configuration, and so does ``context`` if it is left out. Raises `ManifestError`, which names
    the setting that is wrong.
    """
    settings = model["hf"]
    if isinstance(settings, str):
        path = folder / settings
        path = path / "config.json" if path.is_dir() else path
        try:
            if (size := path.stat().st_size) > MAX_CONFIG_BYTES:
                raise ManifestError(
                    f"model.hf: {path} has {size} bytes, more than {MAX_CONFIG_BYTES}: no configuration"
                )
            settings = msgspec.json.decode(path.read_bytes())
        except OSError as error:
            hub = "; models of the Hub are not fetched: download it first, and name its folder"
            raise ManifestError(f"model.hf: cannot read {path}: {error.strerror}{hub}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ManifestError(f"model.hf: {path} is not JSON: {error}") from error
    if not isinstance(settings, Mapping):
        raise ManifestError("model.hf is a config.json's path, or its content as a table")
    family = settings.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ManifestError(f"model.hf.model_type is {family!r}: the known families are {', '.join(FAMILIES)}")
    for name, usual in _AS_USUAL.items():
        if settings.get(name, usual) != usual:
            raise ManifestError(f"model.hf.{name} can be trained as {usual} alone")
    left_out = {*_WITHOUT_BEARING, *_AS_USUAL}
    settings = FAMILIES[family]({name: value for name, value in settings.items() if name not in left_out})
    check(settings, HFConfig, "model.hf")
    config = hf_config_from_dict(settings)
    return {"context": config.max_context, **config.sizes, **model, "hf": msgspec.to_builtins(config)}


def hf_tokenizer(hf: object, folder: Path) -> dict[str, Any]:
    """Make the missing ``tokenizer`` table of a run file in ``folder``, from the configuration's ``tokenizer.json``.

    Raises `ManifestError` if the folder has a tokenizer, but not as that one file.
    """
    if not isinstance(hf, str) or not (place := folder / hf).is_dir():
        return {}
    if (place / _TOKENIZER_FILE).exists():
        return {"file": str(Path(hf, _TOKENIZER_FILE))}
    if other := [name for name in _OTHER_TOKENIZER_FILES if (place / name).exists()]:
        raise ManifestError(
            f"tokenizer: {place} has {other[0]}, but no {_TOKENIZER_FILE}, which is what farandole reads. Make one by "
            "`AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` of transformers, or write "
            'tokenizer = {kind = "bytes"} to train on bytes'
        )
    return {}


# A user's own module
#
# A run file has ``model = "mypackage.models:build"``, or a table with more settings:
#
#     [model]
#     own = "mypackage.models:build"
#     context = 256
#     vocabulary = 256
#     config = {width = 128, depth = 4}     # the function's argument
#
# The function is called once, if the owner of this machine allows it: what it makes goes into the manifest as names and
# shapes (`farandole.protocol.run.own_model`). It needs torch, and takes as long as the model takes to make.

# Settings that the function decides.
_DECIDED: Final = ("num_layers", "width", "num_heads", "hidden", "hf", "preset")


class _Table(msgspec.Struct, frozen=True):
    """The model table of a run file."""

    own: FunctionName
    context: base.Context = 256
    """As byte-level presets have."""
    vocabulary: base.Vocabulary = 256
    config: Settings = {}


def require_trainable_model(manifest: Manifest, allowed: Collection[str], *, by_loop: bool) -> None:
    """Raise `JoinError`, which says what to install and what to pass, unless this node can train the run's model.

    A model that a function makes needs the owner's permission; nothing is imported here, since only the trainer does
    that. A model that members train in loops of their own needs such a loop (``by_loop``); a built-in model accepts
    one, which brings the module. It needs the function only for the weights of the run's seed.
    """
    if manifest.model.external is not None and not by_loop:
        raise JoinError(
            "this run's members train in loops of their own: use farandole.NoLoCo in a script of yours, and farandole "
            "join with --trainer external where the node is not to end with the script"
        )
    if by_loop and (reason := why_no_loop(manifest)):
        raise JoinError(
            f"this run takes no loops of one's own: {reason}. Train with the built-in trainer (farandole join without "
            "--trainer external), or ask the run's creator for a run without that setting"
        )
    if manifest.model.own is None or (by_loop and manifest.start is not None):
        return
    try:
        require_allowed(manifest.model.own.function, manifest.model.own.package, allowed)
    except TrainingError as error:
        raise JoinError(str(error)) from error


# Adapters
#
# ``model = {lora = "FOLDER", rank = 16}`` trains adapters of the base model in the Hugging Face folder
# (`farandole.training.model.adapters`), which each member has a copy of and names with --base.

# Of adapters, as they are trained by one machine (arXiv 2106.09685, appendix D; peft's examples).
ADAPTERS_INNER: Final[Mapping[str, object]] = {
    "optimizer": "adamw",
    "learning_rate": 2e-4,
    "warmup_steps": 50,
    "total_steps": 5_000,
    "batch_size": 4,
}


USUAL_RANK: Final = 16


class _Adapters(msgspec.Struct, frozen=True):
    """The model table of such a run file."""

    lora: str
    rank: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANK)] = USUAL_RANK
    alpha: Annotated[float, msgspec.Meta(gt=0)] = 0.0
    """The factor of B A is alpha / rank; 0: twice the rank."""
    context: base.Context = 0
    """0: the base's own, but at most `USUAL_CONTEXT`."""


def lora_model(model: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make a manifest's ``model`` table from one of a run file that has ``lora``; raises `ManifestError`."""
    check(model, _Adapters, "model")
    table = msgspec.convert(model, _Adapters, strict=True)
    place = (folder / table.lora).absolute()
    try:
        from farandole.training.model.base_folder import base_config, base_hash

        settings = base_config(place)
        base_is = base_hash(place)
    except TrainingError as error:
        raise ManifestError(f"model.lora: {error}") from error
    own = {
        "own": ADAPTERS,
        "context": table.context or min(USUAL_CONTEXT, settings.get("max_position_embeddings", USUAL_CONTEXT)),
        "vocabulary": settings.get("vocab_size"),
        "config": {"base": base_is, "rank": table.rank, "alpha": table.alpha or 2.0 * table.rank},
    }
    return own_model(own, [f"{ADAPTERS}={place}"])


def base_in(folder: Path) -> Base:
    """Return the base model in a Hugging Face folder by its sizes; raises `ManifestError`."""
    try:
        from farandole.training.model.base_folder import base_config, weight_files

        from .consolidated.tensors import open_tensors

        settings, shapes = base_config(folder), dict[str, tuple[int, ...]]()
        for path in weight_files(folder):
            with open_tensors(path) as file:
                shapes |= file.shapes
        width = settings.get("hidden_size") or settings["n_embd"]
        layers = settings.get("num_hidden_layers") or settings["n_layer"]
        hidden, vocabulary = settings.get("intermediate_size", 4 * width), settings["vocab_size"]
        context = min(USUAL_CONTEXT, settings.get("max_position_embeddings", USUAL_CONTEXT))
        return Base(shapes, *(int(each) for each in (layers, width, hidden, vocabulary, context)))
    except (FarandoleError, KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{folder} is no base model whose sizes can be read: {error}") from error


def own_model(model: Mapping[str, Any], allowed: Collection[str]) -> dict[str, Any]:
    """Make a manifest's ``model`` table from one of a run file that has ``own``; other fields stay as they are.

    Raises `ManifestError`, which says what to correct: in the run file, in the model, or in what is allowed.
    """
    if decided := [name for name in _DECIDED if name in model]:
        raise ManifestError(f"model.{decided[0]}: what {model['own']} returns decides on it; leave it out")
    check(model, _Table, "model")
    table = msgspec.convert(model, _Table, strict=True)
    try:
        if not is_allowed(table.own, allowed):
            raise ManifestError(
                f"model.own: {table.own} is code of your own, and not allowed yet: install its package into "
                f"farandole's environment, and type the command again with --allow-model {table.own}"
            )
        from farandole.training.model.own_model import try_own_model  # torch is imported for no other run file

        own, num_layers, width = try_own_model(table.own, table.config, table.context, table.vocabulary, allowed)
    except TrainingError as error:
        raise ManifestError(f"model.own: {error}") from error
    rest = {name: value for name, value in model.items() if name not in ("own", "config")}
    return {
        **rest,
        "context": table.context,
        "vocabulary": table.vocabulary,
        "num_layers": num_layers,
        "width": width,
        "num_heads": 0,
        "hidden": 0,
        "own": msgspec.to_builtins(own),
    }
