"""A hostile member: the real daemon, whose trainer sends what an attack says, and which may pair as it should not.

``python -m farandole.testnet.zoo.daemon join ...``: all options are those of ``farandole``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from farandole.node.base.system.processes import Child, start_child
from farandole.node.cli import main
from farandole.node.member import assembly
from farandole.node.trainer import trainer

from .greedy import GreedyPairing
from .plan import plan_of, tame

HONEST_TRAINER = "farandole.node.trainer_process.main"


async def start_hostile_child(module: str, *arguments: Any) -> Child:
    """As `start_child`, with the hostile trainer in the place of the honest one."""
    return await start_child(f"{__package__}.learner" if module == HONEST_TRAINER else module, *arguments)


if __name__ == "__main__":
    plan = plan_of()
    tame()
    # The daemon has no place for such parts, so they replace names that its modules import: to mypy these names are not
    # exported, and the types are others.
    trainer.start_child = start_hostile_child  # type: ignore[attr-defined, assignment]
    if plan.pairing != "honest":
        greedy = partial(GreedyPairing, does_exchange=plan.pairing == "greedy")
        assembly.Pairing = greedy  # type: ignore[attr-defined, assignment]
    main()
