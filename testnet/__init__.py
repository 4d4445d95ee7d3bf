"""Many nodes on one machine: launch, faults, simulation, reports, benchmarks."""
