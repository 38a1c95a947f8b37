"""Where a row's tokens differ from those that it has when it runs alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first output token, from 0, in which a row differs when it runs alone, and the lone run's score of either token.

    For a greedy row scores are logits; for a sampled one they are logit / temperature plus the row's own noise.
    """

    position: int
    token_id: int
    alone_token_id: int
    score: float
    alone_score: float

    @property
    def gap(self) -> float:
        return self.alone_score - self.score
