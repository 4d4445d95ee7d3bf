"""``config.toml``: the settings file of a node's folder, read, checked, and written for a beginner.

The file is flat: one key for each setting, by its name. All faults are reported at once.
"""

from __future__ import annotations

import json
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

from farandole.protocol.wire.errors import ManifestError

from ..settings import NodeSettings
from .setting import Setting, settings_of

CONFIG_NAME: Final = "config.toml"
CONFIG_VARIABLE: Final = "FARANDOLE_CONFIG"
LIMITS_NAME: Final = "limits.toml"
SETTINGS: Final = settings_of(NodeSettings)
_WIDTH: Final = 100
_writing_limits: Final = threading.Lock()
_HEAD: Final = """\
# Settings of a farandole node. Remove the # before a setting to use it; the node reads this file when it starts.
# Order of precedence: flag, environment variable, `farandole limit`, this file, default.
# Relative paths start at this file's folder. To check this file: farandole config show
"""


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings in a file by name, as a command line takes them; paths are relative to the file's folder.

    Raises `ManifestError`, with a line for each fault, if the file cannot be read, or says what cannot be.
    """
    from .toml_file import did_you_mean, read_toml, shown  # not needed for ``--help``: it imports msgspec

    known = {setting.name: setting for setting in SETTINGS}
    file, faults = read_toml(path), []
    for name, value in file.values.items():
        if name not in known:
            near = did_you_mean(name, known)
            hint = f"did you mean {near}?" if near else "`farandole config init` writes a file with all there are"
            faults.append(f"{name} is no setting; {hint}")
        elif not known[name].is_valid(value):
            faults.append(f"{name}: expected {known[name].expected}, got {shown(value)}")
    with file.named():
        if faults:
            raise ManifestError(*faults)
    return {name: _placed(value, known[name].kind, path.parent) for name, value in file.values.items()}


def _placed(value: Any, kind: Any, folder: Path) -> Any:
    """Return the value of a setting; of a path, or of each of a list, where it is if it starts at ``folder``."""
    if kind is Path:
        return str(folder / Path(value).expanduser())
    return [_placed(part, Path, folder) for part in value] if Path in get_args(kind) else value


def read_limits(home: Path) -> dict[str, Any]:
    """Return the limits that `keep_limits` wrote into a node's folder, as `read_config` does."""
    path = home / LIMITS_NAME
    return read_config(path) if path.exists() else {}


def keep_limits(home: Path, changed: Mapping[str, object]) -> None:
    """Keep limits that were set while a node ran, for its later starts; what is not in ``changed`` stays.

    Raises `OSError`, or `ManifestError` if the file is damaged; it is then as before.
    """
    from farandole.training.base.durable import replacing

    with _writing_limits:
        kept = {**read_limits(home), **changed}
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in kept.items()]
        with replacing(home / LIMITS_NAME) as file:
            file.write("".join(lines).encode())


def config_text() -> str:
    """Return a settings file that changes nothing: every setting commented out, with its meaning, default and unit."""
    parts = [_HEAD]
    for setting in (each for each in SETTINGS if not each.is_hidden):
        told = f"{setting.expected[0].upper()}{setting.expected[1:]}."
        ways = [f"flag {setting.flag}"] if setting.flag else []
        told += f" Or {', '.join([*ways, f'variable {setting.variable}'])}. Default: {default_of(setting)}."
        lines = textwrap.wrap(setting.help, _WIDTH) + textwrap.wrap(told, _WIDTH)
        value = setting.default if setting.default or setting.example is None else setting.example
        parts.append("".join(f"# {line}\n" for line in lines) + f"#{setting.name} = {json.dumps(value)}\n")
    return "\n".join(parts)


def default_of(setting: Setting) -> str:
    """Describe the default of a setting in words."""
    if setting.default in (None, []):
        return setting.unset or "none"
    return json.dumps(setting.default)
