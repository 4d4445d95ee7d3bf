"""The examples: what they show holds, and what they call exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # PyYAML comes without types
from torch.distributed.run import get_args_parser

from .documents.usage import check_farandole

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
# A command at the start of a line, after a keyword, or in a trap; up to what the shell does with it.
_COMMAND = re.compile(r"^\s*(?:until |trap ')?(farandole|torchrun) ([^;&>'\n]*)", re.MULTILINE)


def test_noloco_in_200_lines_keeps_replicas_closer_than_training_alone() -> None:
    example = EXAMPLES / "noloco_in_200_lines.py"
    assert len(example.read_text().splitlines()) <= 200
    command = [sys.executable, str(example), "--rounds", "4", "--inner-steps", "4"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spreads = {name: float(share) for name, share in re.findall(r"^(\w+) +held-out.* ([\d.]+)% apart$", printed, re.M)}
    assert spreads["NoLoCo"] < spreads["alone"]
    exchanges = re.search(r"^(\d+) of 16 outer steps had a partner", printed, re.M)
    assert exchanges is not None
    assert int(exchanges[1]) >= 8, "a volunteer goes alone only when the others are done"


def read_yaml(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text())


def pod() -> Any:
    return read_yaml("kubernetes.yaml")["spec"]["template"]["spec"]


def script_of(name: str) -> str:
    """Return the shell script in a file."""
    if name == "skypilot.yaml":
        task = read_yaml(name)
        return f"{task['setup']}{task['run']}"
    if name == "kubernetes.yaml":
        (script,) = pod()["containers"][0]["args"]
        return str(script)
    return (EXAMPLES / name).read_text()


@pytest.mark.parametrize("name", ["slurm.sbatch", "skypilot.yaml", "kubernetes.yaml"])
def test_a_member_on_a_cluster_is_a_node_and_torchrun_with_options_that_exist(name: str) -> None:
    script = script_of(name)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    commands = [(program, shlex.split(words)) for program, words in _COMMAND.findall(script)]
    programs = [f"{program} {words[0]}" if program == "farandole" else program for program, words in commands]
    assert programs[:3] == ["farandole join", "farandole status", "torchrun"]
    assert programs[-1] == "farandole leave"
    for program, words in commands:
        if program == "farandole":
            check_farandole(words)
        else:
            parsed = get_args_parser().parse_args(words)
            assert (EXAMPLES / Path(parsed.training_script).name).exists()
            assert parsed.training_script_args == [], "the loop attaches to the node that runs here"
    text, reference = (EXAMPLES / name).read_text(), (ROOT / "docs" / "reference.md").read_text()
    assert re.search(r"TORCH_DISABLE_SHARE_RDZV_TCP_STORE(=|, value: \")1", text), "restarts meet no predecessors"
    assert all(variable in reference for variable in re.findall(r"FARANDOLE_\w+", text))


def test_the_pod_mounts_volumes_that_it_has() -> None:
    stateful_set = read_yaml("kubernetes.yaml")["spec"]
    assert stateful_set["selector"]["matchLabels"] == stateful_set["template"]["metadata"]["labels"]
    volumes = {each["name"] for each in pod()["volumes"]}
    volumes |= {each["metadata"]["name"] for each in stateful_set["volumeClaimTemplates"]}
    assert {mount["name"] for mount in pod()["containers"][0]["volumeMounts"]} == volumes
