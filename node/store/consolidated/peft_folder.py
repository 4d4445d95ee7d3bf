"""A folder of adapters for the package peft, of a consolidated checkpoint: `PeftModel.from_pretrained` loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from farandole.protocol.run.manifest import Manifest
from farandole.protocol.run.models import shapes_of
from farandole.protocol.run.own_model import ADAPTERS, count
from farandole.protocol.run.rules import SLOW
from farandole.protocol.wire.safetensors import FP32_BYTES

from .folder import Consolidated
from .hf_folder import write_json
from .tensors import Floats, new_folder, open_tensors, write_tensors

# Of `farandole.training.model.adapters.Adapted`; peft leaves its own adapter's name out of the file, too.
_PREFIX: Final = "adapted."
_NAME: Final = ".default."


def has_adapters(manifest: Manifest) -> bool:
    """Return whether a run trains adapters of a base model."""
    return manifest.model.own is not None and manifest.model.own.function == ADAPTERS


def export_adapters(folder: Consolidated, to: Path) -> list[str]:
    """Write the folder ``to``, all of it or nothing; return the names of its files. Raises `ConsolidatedError`."""
    own = folder.manifest.model.own
    assert own is not None
    shapes = shapes_of(folder.manifest.model)
    ours = {name.removeprefix(_PREFIX).replace(_NAME, "."): name for name in shapes}
    with new_folder(to, FP32_BYTES * count(shapes)) as temporary, open_tensors(folder.checkpoint) as file:

        def tensor_of(name: str) -> Floats:
            return file.read(f"{SLOW}/{ours[name]}")

        theirs = {name: shapes[mine] for name, mine in ours.items()}
        write_tensors(temporary / "adapter_model.safetensors", {"format": "pt"}, theirs, tensor_of)
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "inference_mode": True,
            "r": own.config["rank"],
            "lora_alpha": own.config["alpha"],
            "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in ours}),
        }
        write_json(temporary / "adapter_config.json", settings)
        return sorted(path.name for path in temporary.iterdir())
