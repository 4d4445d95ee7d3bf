from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from farandole.node.base.errors import Exit
from farandole.node.base.figures import count
from farandole.protocol.planning.needs import USUAL_RATE, needs_of
from farandole.protocol.run.manifest import Manifest, decode_manifest
from farandole.protocol.run.models import num_parameters

from ...conftest import Cli


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a temporary folder the working directory, where run files are."""
    monkeypatch.chdir(tmp_path)


def manifest_in(path: Path) -> Manifest:
    return decode_manifest(path.read_bytes())[0]


@pytest.mark.parametrize(("model", "gpu", "upload"), [("350M", 24, "5Mbit"), ("1B", 12, "20Mbit")])
def test_a_model_is_planned_written_and_signed_as_it_was_planned(
    cli: Cli, tmp_path: Path, model: str, gpu: int, upload: str
) -> None:
    options = (model, "--gpu", f"{gpu}GB", "--upload", upload)
    code, out, _ = cli("run", "plan", *options)
    assert code == 0
    assert ": fits\n" in out
    assert all(
        "#" in line for line in out.split("[inner]\n")[1].splitlines() if "=" in line and line != "fragments = 1"
    )
    Path("run.toml").write_text(out)
    plan: dict[str, Any] = json.loads(cli("run", "plan", *options, "--json")[1])
    assert plan["fits"]
    assert plan["needs"]["rate"] * 8 <= float(upload.removesuffix("Mbit")) * 1e6

    code, _, err = cli("run", "create", "run.toml")
    assert code == 0
    assert "leaves these open" not in err
    signed = manifest_in(tmp_path / "run.manifest")
    assert needs_of(signed).on_gpu.device <= gpu * 1e9
    assert (signed.model.num_stages > 1) == (gpu == 12)
    for name, value in plan["settings"].items():
        section, _, field = name.partition(".")
        assert getattr(getattr(signed, section), field) == value


@pytest.mark.parametrize(
    ("gpu", "fits", "form"), [(24, True, "13.5 GB in bf16"), (12, True, "in 4 bits"), (6, False, "")]
)
def test_adapters_of_a_base_are_planned_by_its_size(cli: Cli, gpu: int, fits: bool, form: str) -> None:
    options = ("7B", "--lora", "16", "--gpu", f"{gpu}GB", "--upload", "20Mbit")
    code, out, _ = cli("run", "plan", *options)
    assert code == (0 if fits else 1)
    assert "40.0 M parameters" in out
    assert form in out
    assert ("(too little memory)" in out) != fits
    plan: dict[str, Any] = json.loads(cli("run", "plan", *options, "--json")[1])
    assert plan["needs"]["contribution_bytes"] == pytest.approx(41e6, rel=0.02)
    assert plan["base_in_4_bits"] == (gpu < 24)
    for other in ("125M", "hf:nowhere"):
        assert cli("run", "plan", other, "--lora", "16")[0] == Exit.BAD_INPUT


def test_a_plan_of_adapters_becomes_a_run_file_of_them(cli: Cli, tmp_path: Path) -> None:
    from ...test_lora import a_base  # which needs transformers

    base = a_base(tmp_path / "base")
    code, out, _ = cli("run", "plan", f"hf:{base}", "--lora", "2", "--memory", "2GB")
    assert code == 0
    Path("run.toml").write_text(out)
    again = cli("run", "plan", "run.toml", "--memory", "2GB")[1]
    assert [line for line in out.splitlines() if "base " in line] == [
        line for line in again.splitlines() if "base " in line
    ]
    assert cli("run", "create", "run.toml")[0] == 0
    signed = manifest_in(tmp_path / "run.manifest")
    assert f"# {count(num_parameters(signed.model))} parameters" in out


def test_what_does_not_fit_is_an_exit_code(cli: Cli) -> None:
    code, out, _ = cli("run", "plan", "1B", "--upload", "1kbit")

    assert code == 1
    assert "does not fit (too little line)" in out


@pytest.mark.parametrize("command", ["plan", "create"])
def test_a_run_file_may_come_through_a_pipe_which_can_be_read_once(cli: Cli, tmp_path: Path, command: str) -> None:
    outlet, inlet = os.pipe()
    os.write(inlet, b'name = "a"\nmodel = "125M"\n[outer]\ncodec = "fp32"\n')
    os.close(inlet)
    (tmp_path / "run.toml").symlink_to(f"/dev/fd/{outlet}")
    code, out, err = cli("run", command, "run.toml", "--json")
    os.close(outlet)
    assert code == 0, err
    assert "outer.codec" not in out
    assert "signed with" not in err


def test_creating_a_large_run_says_what_each_member_needs_and_the_remedy(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'name = "a"\nmodel = "125M"\n[outer]\ncodec = "int8"\nfragments = 1\n[rounds]\nexchange_seconds = 30\n'
    )

    code, out, err = cli("run", "create", "run.toml")
    assert (code, out.splitlines()[0][:4]) == (0, "run ")
    assert "each member needs 96.7 Mbit/s up and down" in err
    assert "at 20 Mbit/s an exchange takes 50.8 s of the 10.5 s that it has" in err
    assert "Set outer.fragments = 2, rounds.round_seconds = 120.0, rounds.exchange_seconds = 120.0" in err
    assert manifest_in(tmp_path / "run.manifest").outer.fragments == 1

    warnings = json.loads(cli("run", "create", "run.toml", "--force", "--json")[1])["warnings"]
    assert len(warnings) == 1


def test_a_large_model_alone_gets_settings_with_which_homes_can_exchange_and_a_word_about_memory(
    cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text('name = "a"\nmodel = "1B"\n')

    _, _, err = cli("run", "create", "run.toml")
    assert needs_of(manifest_in(tmp_path / "run.manifest")).rate <= USUAL_RATE
    assert "each member needs 37.5 GB of memory" in err
    assert "set model.num_stages" in err


def test_a_module_of_ones_own_is_planned_once_it_is_allowed(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = "own_model.convolutional:build"
    monkeypatch.syspath_prepend(Path(__file__).parents[4] / "examples" / "own_model")
    (tmp_path / "run.toml").write_text(f'name = "a"\nmodel = "{function}"\n')

    code, _, err = cli("run", "plan", "run.toml")
    assert (code, f"--allow-model {function}" in err) == (Exit.BAD_INPUT, True)
    code, out, _ = cli("run", "plan", "run.toml", "--allow-model", function)
    assert code == Exit.OK
    assert ": fits\n" in out
