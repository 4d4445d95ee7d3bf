"""Stages without a provider: when, and for how long."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class Vacancies:
    """Tracks the stages whose trainers run; a stage counts from its first provider on."""

    seconds: dict[int, float] = field(default_factory=dict)
    """The longest completed time without a provider, by stage."""
    _held: set[int] = field(default_factory=set)
    _empty_since: dict[int, float] = field(default_factory=dict)

    def observe(self, held: Collection[int], now: float) -> list[str]:
        """Record which stages are held, and return a line for each change."""
        news = []
        for stage in sorted(self._held.difference(held, self._empty_since)):
            self._empty_since[stage] = now
            news.append(f"nobody holds stage {stage}")
        for stage in sorted(self._empty_since.keys() & set(held)):
            seconds = now - self._empty_since.pop(stage)
            self.seconds[stage] = max(seconds, self.seconds.get(stage, 0.0))
            news.append(f"stage {stage} is held again, {seconds:.1f} s later")
        self._held.update(held)
        return news

    def problems(self, limit: float, now: float) -> list[str]:
        """Return stages that were, or have been, without a provider for too long."""
        longest = {**self.seconds}
        for stage, since in self._empty_since.items():
            longest[stage] = max(now - since, longest.get(stage, 0.0))
        return [
            f"nobody held stage {stage} for {seconds:.0f} s, more than {limit:g} s"
            for stage, seconds in sorted(longest.items())
            if seconds > limit
        ]
