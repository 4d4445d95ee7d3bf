"""The benchmark of programs that use a mesh, small: two real daemons, their programs, and a plain socket."""

from __future__ import annotations

from pathlib import Path

from farandole.testnet.bench.mesh import ANEW, OURS, SOCKET, measure, report


def test_what_a_mesh_costs_programs_is_measured(tmp_path: Path) -> None:
    done, problems = measure(tmp_path, size=1, requests=4, repeats=1, cache=None, say=lambda text: None)

    assert not problems
    assert set(done) == {OURS, ANEW, SOCKET}
    assert all(0 < median <= p99 for cost in done.values() for median, p99 in cost.calls.values())
    assert done[OURS].push
    assert done[OURS].fetch
    assert done[ANEW].push is None
    told = report({"command": "x", "date": "y"}, 1, done, {"Lattica": "it was not asked for"})
    assert [row[0] for row in told.grids[0].rows] == [SOCKET, OURS, ANEW]
    assert told.words[-1] == "Lattica is missing: it was not asked for"
    assert not told.misses
