"""`--verify N`: some finished rows run again alone, the user's proof that the batch changes no text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappush, heapreplace

from contbatch_cli.build import Executor
from contbatch_cli.core.divergence import Divergence
from contbatch_cli.core.noise import mix64
from contbatch_cli.core.request import FinishReason, Request
from contbatch_cli.units import counted

NEAR_TIE = 1e-4
"""Below this gap, in float32, two candidates are as likely as rounding can tell."""


class Sample:
    """Keeps `size` of the finished requests, chosen by a hash of their rows: the same ones in every run of a job."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: list[tuple[int, int, int, Request]] = []

    def offer(self, request: Request) -> None:
        if not self._size or request.finish is None or request.finish.reason is FinishReason.ERROR:
            return
        row, sample = request.request_id
        entry = (-mix64(row), -row, -sample, request)
        if len(self._kept) < self._size:
            heappush(self._kept, entry)
        elif entry > self._kept[0]:
            heapreplace(self._kept, entry)

    def requests(self) -> list[Request]:
        """The kept requests in order of their rows."""
        return sorted((entry[3] for entry in self._kept), key=lambda request: request.request_id)


def verify(sample: Sample, executor: Executor, token_text: Callable[[int], str]) -> Iterator[str]:
    """Runs each kept request alone; a line for each that differs, and one that sums up."""
    assert executor.first_divergence is not None, "this executor cannot run rows alone"
    requests = sample.requests()
    divergences = 0
    for request in requests:
        divergence = executor.first_divergence(request)
        if divergence is not None:
            divergences += 1
            yield divergence_line(request, divergence, token_text)
    again = f"{counted(len(requests), 'row')} run again alone"
    yield f"verified  {again}: {len(requests) - divergences} equal, {divergences} different"


def divergence_line(request: Request, divergence: Divergence, token_text: Callable[[int], str]) -> str:
    """Both candidates at the first difference, with the lone run's scores."""
    kind = "logit" if request.sampling.temperature == 0.0 else "score"
    note = ", a near tie" if divergence.gap < NEAR_TIE else ""
    return (
        f"verify    row {request.request_id.row}, output token {divergence.position}: "
        f"{token_text(divergence.token_id)!r} ({divergence.token_id}, {kind} {divergence.score:.6f}) in the batch, "
        f"{token_text(divergence.alone_token_id)!r} ({divergence.alone_token_id}, {kind} {divergence.alone_score:.6f}) alone, "
        f"gap {divergence.gap:.2e}{note}"
    )
