"""The policies that a user may choose or compare with, on the same requests, cache and engine.

`stall_free` is the product's own. `prefill_first` and `static` keep the budget, the blocks and the once-only rule; that every
decode moves in every step is `stall_free`'s promise alone.
"""

from __future__ import annotations

from contbatch_cli.core.kv_cache_manager import PrefixHit
from contbatch_cli.core.request import Request
from contbatch_cli.core.scheduler import StallFreeScheduler, Step


class PrefillFirstScheduler(StallFreeScheduler):
    """Prompts before decodes, never in one step: Orca (Yu et al., OSDI 2022), early vLLM, Text Generation Inference.

    While there is a prompt to compute and room for it, decodes wait.
    """

    def _plan(self, step: Step) -> None:
        if self.running and not self.running[-1].is_prefill_done:
            request = self.running[-1]
            if self._make_room(request, step):
                step.add(self._sequence(request, step.budget_left))
        self._admit(step)
        if not step.sequences:
            self._continue_running(step)


class StaticScheduler(PrefillFirstScheduler):
    """Classic batches: seats are filled once, and no request joins until all of the batch have finished.

    A batch takes requests while their longest possible texts all fit the cache, so it never preempts. Unlike the padded batches
    it stands for, a seat whose request has ended costs nothing here; it only stays empty.
    """

    _is_closed = False

    def _plan(self, step: Step) -> None:
        if not self.running:
            self._is_closed = False
        super()._plan(step)
        self._is_closed = self._is_closed or not step.admitted

    def _has_room(self, request: Request, hit: PrefixHit) -> bool:
        if self._is_closed:
            return False
        return self.kv.can_promise(request.max_num_tokens)


POLICIES: dict[str, type[StallFreeScheduler]] = {
    "stall_free": StallFreeScheduler,
    "prefill_first": PrefillFirstScheduler,
    "static": StaticScheduler,
}
