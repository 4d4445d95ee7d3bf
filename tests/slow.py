"""The modules of tests that take longest, which a run of all tests begins with."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import Final

import pytest

SECONDS: Final = {
    "tests/node/test_own_loop.py": 175,
    "tests/training/test_ranks.py": 175,
    "tests/node/loop/stages/test_pipeline.py": 164,
    "tests/testnet/test_faults_together.py": 151,
    "tests/protocol/test_pipeline.py": 141,
    "tests/node/loop/test_epoch.py": 118,
    "tests/testnet/bench/test_memory.py": 114,
    "tests/node/test_poisoned_newcomer.py": 108,
    "tests/node/store/test_own_model.py": 101,
    "tests/testnet/test_simulate_pairing.py": 98,
    "tests/node/bulk/test_faulty_partners.py": 93,
    "tests/node/test_audits.py": 85,
    "tests/node/test_daemon.py": 81,
    "tests/testnet/bench/test_simulate_hostile.py": 77,
    "tests/training/test_replica.py": 77,
    "tests/node/app/commands/test_sample.py": 75,
    "tests/testnet/test_compare.py": 73,
    "tests/testnet/natlab/test_mesh.py": 72,
    "tests/testnet/test_launch.py": 65,
    "tests/documents/test_pages.py": 65,
    "tests/node/ui/test_first_line.py": 60,
    "tests/testnet/natlab/test_own_loop.py": 55,
    "tests/node/trainer/test_determinism.py": 51,
    "tests/node/loop/test_lying_leases.py": 50,
    "tests/testnet/test_simulate_state.py": 45,
    "tests/testnet/test_simulate_sybils.py": 44,
    "tests/testnet/natlab/test_doctor.py": 43,
    "tests/node/base/system/test_elsewhere.py": 43,
    "tests/node/loop/test_freeze.py": 41,
    "tests/node/store/consolidated/test_going_on.py": 40,
    "tests/training/test_stage_worker.py": 40,
    "tests/testnet/test_simulate_leases.py": 39,
    "tests/node/bulk/test_contributions.py": 39,
    "tests/training/test_lean.py": 37,
    "tests/testnet/bench/test_hostile.py": 36,
    "tests/node/test_next_release.py": 33,
    "tests/testnet/natlab/test_mapping.py": 32,
    "tests/testnet/bench/test_nat.py": 32,
    "tests/node/trainer/test_trainer.py": 32,
    "tests/node/test_crowding.py": 31,
    "tests/testnet/natlab/test_two_homes.py": 31,
    "tests/node/test_private.py": 30,
    "tests/node/app/service/test_user_manager.py": 30,
    "tests/node/test_visitors.py": 26,
    "tests/node/test_mixed_run.py": 26,
    "tests/node/store/test_fetch.py": 26,
    "tests/node/store/test_save.py": 25,
}
"""Of each module, in one run of all tests on two cores; only their order and rough size matter."""


def deal(items: list[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """Return the tests in an order in which each worker begins with an equal part of the slow modules.

    A worker of pytest-xdist begins with an equal part of the list, and then takes over tests that others have not begun
    yet: these should be short, or one worker goes on long after the others.
    """
    by_module: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_module[item.nodeid.partition("::")[0]].append(item)
    parts: list[list[pytest.Item]] = [[] for _ in range(num_workers)]
    seconds = [0] * num_workers
    for module, length in SECONDS.items():
        if module in by_module:
            least = seconds.index(min(seconds))
            seconds[least] += length
            parts[least] += by_module.pop(module)
    short = iter([item for module in by_module.values() for item in module])
    size = len(items) // num_workers
    for part in parts:
        part += islice(short, max(0, size - len(part)))
    return [*(item for part in parts for item in part), *short]
