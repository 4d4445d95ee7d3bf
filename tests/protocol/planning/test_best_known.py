from __future__ import annotations

import msgspec
import pytest

from farandole.protocol.planning.needs import USUAL_RATE, needs_of
from farandole.protocol.planning.planning import (
    RATES,
    Machine,
    best_known,
    changes,
    complete,
    learning_rate_for,
    plan,
    reason_for,
)
from farandole.protocol.run.manifest import Manifest, ModelConfig, StartConfig
from farandole.protocol.run.models import preset
from farandole.protocol.run.own_model import ExternalModel
from farandole.protocol.run.rules import NoLoCoConfig, PlainConfig

RUN = Manifest("a", preset("3M"))


def test_measured_sizes_have_their_measured_rates() -> None:
    for size, rate in RATES:
        assert learning_rate_for(size, is_muon=False) == pytest.approx(rate, rel=0.05)
        assert learning_rate_for(size, is_muon=True) == pytest.approx(2 * rate, rel=0.05)


def test_rates_fall_with_the_size() -> None:
    rates = [learning_rate_for(size, is_muon=False) for size in (1, 10**5, 504_672, 10**6, 10**7, 10**8, 10**9, 10**10)]
    assert rates[:3] == [6e-3] * 3
    assert rates[2:] == sorted(set(rates[2:]), reverse=True)
    assert rates[-1] > 0.0


def test_what_a_run_file_leaves_open_is_chosen() -> None:
    known = best_known(RUN, ["outer.codec", "inner.total_steps", "inner.batch_size"])

    assert known.outer == PlainConfig(codec=RUN.outer.codec)
    assert known.inner == msgspec.structs.replace(RUN.inner, optimizer="muon", learning_rate=6e-3, warmup_steps=1_250)
    assert msgspec.structs.replace(known, outer=RUN.outer, inner=RUN.inner) == RUN
    assert best_known(RUN, ["inner.optimizer"]).inner.learning_rate == 3e-3, "AdamW's own"
    assert best_known(RUN, ["inner.learning_rate"]).inner.optimizer == RUN.inner.optimizer


@pytest.mark.parametrize("given", ["outer.kind", "outer.alpha", "outer.gamma", "outer.momentum"])
def test_a_rule_that_a_run_file_means_stays(given: str) -> None:
    run = msgspec.structs.replace(RUN, outer=NoLoCoConfig(alpha=0.3))
    assert best_known(run, [given]).outer == run.outer
    topk = msgspec.structs.replace(RUN, outer=NoLoCoConfig(codec="topk", topk=32))
    known = best_known(topk, ["outer.codec", "outer.topk"]).outer
    assert known == PlainConfig(codec="topk", topk=32), "settings that every rule has"


@pytest.mark.parametrize("name", ["start", "external"])
def test_inner_settings_of_what_was_not_measured_stay(name: str) -> None:
    external = ModelConfig(1, 0, 0, 0, 0, 0, external=ExternalModel({"a": (4, 4)}))
    other = {"model": external} if name == "external" else {"start": StartConfig("1" * 64, "0" * 64)}
    run = msgspec.structs.replace(RUN, **other)
    assert best_known(run, ()).inner == run.inner
    assert best_known(run, ()).outer == PlainConfig()


@pytest.mark.parametrize("model", ["tiny", "125M", "1B"])
def test_every_choice_has_a_reason(model: str) -> None:
    run = msgspec.structs.replace(RUN, model=preset(model))
    cut = plan(best_known(run, ()), Machine(USUAL_RATE, USUAL_RATE, memory=4 * 10**9)).manifest
    thin = plan(best_known(run, ()), Machine(USUAL_RATE / 50, USUAL_RATE / 50)).manifest
    completed = complete(run, ())
    assert (completed.model, needs_of(completed).rate <= USUAL_RATE) == (run.model, True), "homes can exchange it"
    for chosen in (completed, cut, thin):
        assert all(reason_for(name, value) for name, value in changes(run, chosen).items())
