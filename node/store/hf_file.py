"""A Hugging Face ``config.json`` in a run file: ``model = {hf = "config.json", num_stages = 3, context = 128}``.

The file's path may be replaced by its folder's, or by its content as a table. Settings that decide how the model is
trained go into the manifest (`farandole.protocol.run.families`). Settings without effect on training are left out. Any
other setting is refused by name, because it might make it a different model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from farandole.protocol.run.families import FAMILIES, HFConfig, hf_config_from_dict
from farandole.protocol.wire.errors import ManifestError

from ..base.config.faults import FaultyError, faults_of

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
    settings = _reduced(_settings(model["hf"], folder))
    if faults := faults_of(settings, HFConfig, place=("model", "hf")):
        raise FaultyError(faults)
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


def _settings(hf: object, folder: Path) -> dict[str, Any]:
    settings = _read(folder / hf) if isinstance(hf, str) else hf
    if not isinstance(settings, Mapping):
        raise ManifestError("model.hf is a config.json's path, or its content as a table")
    return dict(settings)


def _read(path: Path) -> object:
    """Read and parse a JSON file, or the ``config.json`` of a folder."""
    path = path / "config.json" if path.is_dir() else path
    try:
        if (size := path.stat().st_size) > MAX_CONFIG_BYTES:
            raise ManifestError(f"model.hf: {path} has {size} bytes, more than {MAX_CONFIG_BYTES}: no configuration")
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ManifestError(f"model.hf: cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"model.hf: {path} is not JSON: {error}") from error


def _reduced(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings for the manifest, with the ones that transformers would derive from the rest."""
    family = settings.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ManifestError(f"model.hf.model_type is {family!r}: the known families are {', '.join(FAMILIES)}")
    for name, usual in _AS_USUAL.items():
        if settings.pop(name, usual) != usual:
            raise ManifestError(f"model.hf.{name} can be trained as {usual} alone")
    kept = {name: value for name, value in settings.items() if name not in _WITHOUT_BEARING}
    return FAMILIES[family](kept)
