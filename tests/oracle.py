"""The oracle of greedy rows, and what "equal" means.

The oracle is each row alone through transformers' own `generate`. A row is equal when its ids are identical; or, at the first
difference, when the oracle's logits of the two candidates are less than GAP apart: then rounding decided, the row's comparison
stops there and is counted. More than one counted row in 50 fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

GAP = 1e-4
ROWS_PER_NEAR_TIE = 50


@dataclass(frozen=True)
class OracleRow:
    """The oracle's output ids, and its float32 logits [tokens, vocabulary] at each of them."""

    token_ids: list[int]
    logits: torch.Tensor


def greedy_alone(model: Any, prompt_ids: Sequence[int], max_tokens: int, eos_token_ids: Sequence[int] = ()) -> OracleRow:
    """One row through `generate`; the model is to have an attention of transformers' own."""
    ids = torch.tensor([list(prompt_ids)])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return OracleRow(output.sequences[0, len(prompt_ids) :].tolist(), torch.cat(output.logits).float())


class Comparison:
    """Compares row by row, and counts."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.near_ties: list[str] = []
        self.failures: list[str] = []

    def add(self, name: str, token_ids: Sequence[int], oracle: OracleRow) -> None:
        self.num_rows += 1
        ours, wanted = list(token_ids), oracle.token_ids
        if ours == wanted:
            return
        place = next((i for i, (a, b) in enumerate(zip(ours, wanted, strict=False)) if a != b), min(len(ours), len(wanted)))
        if place == min(len(ours), len(wanted)):
            self.failures.append(f"{name}: {len(ours)} tokens, the oracle has {len(wanted)}")
            return
        logits = oracle.logits[place]
        gap = float(logits[wanted[place]] - logits[ours[place]])
        found = f"{name}: token {place} is {ours[place]}, the oracle has {wanted[place]} by {gap:.2g}"
        (self.near_ties if gap < GAP else self.failures).append(found)

    def check(self, name: str) -> None:
        """Print the count; fail unless all rows are equal."""
        print(f"{name}: {self.num_rows} rows, {len(self.near_ties)} near ties")
        assert not self.failures, f"{len(self.failures)} of {self.num_rows} rows differ: " + "; ".join(self.failures[:5])
        allowed = -(-self.num_rows // ROWS_PER_NEAR_TIE)
        assert len(self.near_ties) <= allowed, f"{len(self.near_ties)} near ties in {self.num_rows} rows: {self.near_ties[:5]}"
