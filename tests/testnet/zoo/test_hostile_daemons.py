"""A hostile member among real daemons: they refuse its data, go on without it, and report it."""

from __future__ import annotations

from pathlib import Path

from farandole.testnet.play.launch import Testnet
from farandole.testnet.play.scenario import HostileSettings, parse_scenario
from farandole.testnet.zoo.conduct import conduct_of
from farandole.testnet.zoo.play import intruders_of

from ...patience import PATIENCE
from ..play.playing import SilentView

RUN = {
    "name": "hostile",
    "model": "tiny",
    "inner": {"learning_rate": 3e-3, "warmup_steps": 5, "total_steps": 100, "batch_size": 4},
    "rounds": {"inner_steps": 2, "round_seconds": 0, "exchange_seconds": 10},
}


async def test_a_member_that_sends_scaled_weights_is_refused_and_named(tmp_path: Path) -> None:
    settings = HostileSettings(members=1, attack="scale-3.9")
    scenario = parse_scenario(
        {
            **{"run": RUN, "nodes": 2, "rounds": 256, "exchanges_after_faults": 12, "min_partners": 1},
            **{"start_interval": 0.0, "step_seconds": 0.1, "timeout": PATIENCE},
        }
    )
    play = Testnet(scenario, tmp_path, SilentView(), intruders=intruders_of(settings))
    report = await play.play()
    assert report.reasons == []
    conduct = conduct_of(tmp_path, report)
    assert conduct.honest_exchanges > 0
    assert conduct.hostile_met > conduct.hostile_used - conduct.hostile_clipped
    assert any(after is not None for after in conduct.detected_after)
    assert conduct.warnings
    assert "refused a contribution of" in conduct.warnings[0] or "averaged nothing of" in conduct.warnings[0]
    assert max(conduct.losses) < 4.5, "they have learned: it was 5.5"
