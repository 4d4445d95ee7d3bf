"""The trainer process of a hostile member: the honest one, with a `HostileLearner` and a `HostileRoundEnd`."""

from __future__ import annotations

from farandole.node.trainer_process.main import main

if __name__ == "__main__":
    from farandole.training.engine import learner, replica

    from .learner import HostileLearner, HostileRoundEnd

    learner.Learner = HostileLearner  # type: ignore[misc]  # what `build_learner` makes
    vars(replica)["RoundEnd"] = HostileRoundEnd  # what a replica has
    main()
