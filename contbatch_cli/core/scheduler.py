"""StallFreeScheduler: running decodes first, then the part-done prefill, then new requests, under one token budget.

The method is Sarathi-Serve's stall-free batching (Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with
Sarathi-Serve", OSDI 2024) in the phase-free form of vLLM V1: a step hands out at most `token_budget` tokens, and a request is a
list of tokens of which some are computed. `running` is in order of admission and only its last member can have an unfinished
prefill, so that "decodes, then the part-done prefill" is a walk in that order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from contbatch_cli.core.batch import (
    BatchResult,
    Logits,
    ScheduledBatch,
    ScheduledSequence,
    SequenceResult,
    WindowTable,
    sequence_of,
)
from contbatch_cli.core.drafts import MAX_DRAFTS, NgramDrafts, may_be_drafted
from contbatch_cli.core.forecast import OVERCOMMIT, OutputLengths
from contbatch_cli.core.kv_cache_manager import KVCacheManager, Newcomer, PrefixHit
from contbatch_cli.core.request import Finish, FinishReason, Request, RequestId
from contbatch_cli.core.windowed_cache import GroupedKVCacheManager

StopRule = Callable[[Request], Finish | None]
_NONE, _LAST, _ALL = Logits  # a name of the module is found sooner than a member of an Enum


class Step:
    """The plan of one iteration while it is being made."""

    __slots__ = ("admitted", "budget_left", "num_drafts", "preempted", "sequences")

    def __init__(self, token_budget: int) -> None:
        self.budget_left = token_budget
        self.num_drafts = 0
        self.sequences: list[ScheduledSequence] = []
        self.preempted: list[RequestId] = []
        self.admitted: list[RequestId] = []

    def add(self, sequence: ScheduledSequence) -> None:
        self.sequences.append(sequence)
        self.budget_left -= len(sequence.tokens)

    def add_drafts(self, place: int, sequence: ScheduledSequence) -> None:
        """`sequence` takes the place of the same run without drafts."""
        self.sequences[place] = sequence
        self.budget_left -= sequence.num_drafts
        self.num_drafts += sequence.num_drafts


class StallFreeScheduler:
    """Plans batches for the requests it was given, and moves them on with the results.

    `token_budget` is the most tokens of one step. At most `seats` = min(max_batch_size, token_budget) requests run at once, so
    that every running request gets a token in every step. `stop_rule` is asked after each new token. Once nothing waits, steps of
    fewer than `draft_tokens` tokens are filled up to that number with drafts.
    """

    def __init__(
        self,
        kv: KVCacheManager | GroupedKVCacheManager,
        token_budget: int,
        max_batch_size: int,
        stop_rule: StopRule,
        draft_tokens: int = 0,
    ) -> None:
        if token_budget < 1 or max_batch_size < 1:
            raise ValueError(f"a step needs room: token_budget {token_budget}, max_batch_size {max_batch_size}")
        self.kv = kv
        self.token_budget = token_budget
        self.seats = min(max_batch_size, token_budget)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.lengths = OutputLengths()
        self._draft_tokens = min(draft_tokens, token_budget)
        self._drafts = NgramDrafts()
        self._stop_rule = stop_rule
        self._requests: dict[RequestId, Request] = {}
        self._released: list[RequestId] = []
        self._is_full = False

    # What can be asked

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def fits(self, request: Request) -> bool:
        """Whether the request can ever run: alone, in an empty cache."""
        return self.kv.fits(request.max_num_tokens)

    # What moves it on

    def add_request(self, request: Request) -> None:
        """Put a request at the end of the line. It must fit, and its id must be new among those not finished."""
        assert self.fits(request), (
            f"{request.request_id} with {request.max_num_tokens} tokens does not fit "
            f"{self.kv.num_blocks} blocks of {self.kv.block_size}"
        )
        assert request.request_id not in self._requests, f"{request.request_id} is here already"
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def schedule_next_batch(self) -> ScheduledBatch:
        """Plan one iteration. Never empty while there is work; to be followed by `update` or `abort`."""
        step = Step(self.token_budget)
        self._plan(step)
        self._draft(step)
        assert step.sequences or not self.has_work(), "no request can move on"
        released, self._released = self._released, []
        return ScheduledBatch(
            tuple(step.sequences),
            self.token_budget - step.budget_left,
            tuple(step.preempted),
            tuple(step.admitted),
            tuple(released),
            step.num_drafts,
        )

    def update(self, batch: ScheduledBatch, result: BatchResult) -> list[Request]:
        """Move the batch's requests on by its results; returns those that finished, their blocks given back."""
        self.kv.commit()
        finished = []
        requests = self._requests
        for sequence, outcome in zip(batch.sequences, result.results, strict=True):
            request = requests[sequence.request_id]
            num_accepted = len(outcome.token_ids) - 1
            request.num_computed_tokens = sequence.num_known + (num_accepted if num_accepted > 0 else 0)
            request.finish = self._advance(request, sequence, outcome)
            if request.finish is not None:
                finished.append(request)
        for request in finished:
            self._retire(request)
        if finished:
            self.running = [request for request in self.running if request.finish is None]
            self._is_full = False
        return finished

    def abort(self, batch: ScheduledBatch) -> None:
        """The batch was not executed: forget what it would have written and put those it admitted back in line."""
        self.kv.rollback()
        for request_id in reversed(batch.admitted):
            request = self.running.pop()
            assert request.request_id == request_id, f"{request_id} was admitted last, {request.request_id} is last"
            self._send_back(request)
        for request in self.running:
            self.kv.unseal(request.request_id, request.num_computed_tokens)
        self._released = [*batch.released, *self._released]

    # The plan

    def _plan(self, step: Step) -> None:
        self._continue_running(step)
        if not step.preempted:
            self._admit(step)

    def _continue_running(self, step: Step) -> None:
        """One run for each running request in order of admission; when the cache is full, the youngest make room."""
        grow, running, position = self.kv.grow, self.running, 0
        while position < len(running):
            request = running[position]
            is_grown = grow(request.request_id, request.num_computed_tokens, len(request.token_ids))
            if not is_grown and not self._make_room(request, step):
                return
            step.add(self._sequence(request, step.budget_left))
            position += 1

    def _make_room(self, request: Request, step: Step) -> bool:
        """Preempt from the tail until the request's table can grow; False when the request was itself the youngest left."""
        while not self.kv.grow(request.request_id, request.num_computed_tokens, len(request.token_ids)):
            victim = self.running.pop()
            self._preempt(victim, step)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, step: Step) -> None:
        """Give a running request's blocks back; it keeps its tokens and waits at the front."""
        request.num_preemptions += 1
        request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)
        step.preempted.append(request.request_id)
        self._send_back(request)

    def _send_back(self, request: Request) -> None:
        self.kv.release(request.request_id)
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)
        self._is_full = False

    def _admit(self, step: Step) -> None:
        """Start waiting requests in order while budget, seats and cache last; blocks for all known tokens are taken at once."""
        while step.budget_left > 0 and self.waiting and len(self.running) < self.seats:
            request = self.waiting[0]
            hit = self._lookup(request)
            if not self._has_room(request, hit):
                return
            self.waiting.popleft()
            self._start(request, hit)
            step.admitted.append(request.request_id)
            step.add(self._sequence(request, step.budget_left))

    def _lookup(self, request: Request) -> PrefixHit:
        """A row that reports its prompt's log-probabilities has to compute all of it, so it takes no hits."""
        is_scored = request.sampling.prompt_logprobs is not None
        return self.kv.lookup(() if is_scored else request.token_ids, request.adapter)

    def _start(self, request: Request, hit: PrefixHit) -> None:
        num_cached = self.kv.open(request.request_id, hit, request.max_num_tokens)
        grown = self.kv.grow(request.request_id, num_cached, len(request.token_ids))
        assert grown, f"{request.request_id} was admitted without room"
        request.num_computed_tokens = num_cached
        request.num_cached_tokens = max(request.num_cached_tokens, min(num_cached, request.num_prompt_tokens))
        request.num_recomputed_tokens += max(request.num_lost_tokens - num_cached, 0)
        request.num_lost_tokens = 0
        self.running.append(request)

    def _has_room(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a waiting request may start: its known tokens fit now, and all that run will still fit when they have grown.

        With nothing running it always may. Once the forecast said no, it is not asked again until something gives blocks back.
        """
        kv = self.kv
        if not kv.has_room(len(request.token_ids), hit):
            return False
        if not self.running or kv.can_promise(request.max_num_tokens):
            return True
        if self._is_full:
            return False
        remaining = self.lengths.remaining
        newcomer = Newcomer(len(request.token_ids), hit, remaining(request))
        peak = kv.expected_peak(newcomer, ((other.request_id, remaining(other)) for other in self.running))
        self._is_full = peak > OVERCOMMIT
        return not self._is_full

    def _sequence(self, request: Request, budget_left: int) -> ScheduledSequence:
        """The run of a request's next tokens, at most `budget_left`; blocks that it fills become findable."""
        token_ids = request.token_ids
        request_id = request.request_id
        sampling = request.sampling
        start = request.num_computed_tokens
        num_tokens = len(token_ids)
        end = num_tokens if num_tokens - start <= budget_left else start + budget_left
        kv = self.kv
        size = kv.block_size
        table = kv.tables[request_id]
        if end // size > table.num_sealed:
            kv.seal(request_id, token_ids, end)
        window = table.window
        samples = end == num_tokens and sampling.max_tokens > 0
        scores = sampling.prompt_logprobs is not None and start < request.num_prompt_tokens
        fields = (
            request_id,
            (token_ids[start],) if end == start + 1 else tuple(token_ids[start:end]),
            start,
            table.block_ids,
            request.num_prompt_tokens,
            sampling,
            samples,
            _ALL if scores else _LAST if samples else _NONE,
            tuple(token_ids) if samples and sampling.needs_history else None,
            request.adapter,
            token_ids[end] if scores and end < request.num_prompt_tokens else None,
            table.first_block * size,
            None if window is None else WindowTable(window.block_ids, window.first_block * size),
            0,
        )
        return sequence_of(fields)

    def _draft(self, step: Step) -> None:
        """Fill a small step of a drained batch with drafts, dealt out evenly; where a table cannot grow for them there are none."""
        if self.waiting:
            return
        for place, sequence in enumerate(step.sequences):
            room = self._draft_tokens - (self.token_budget - step.budget_left)
            if room <= 0:
                return
            if may_be_drafted(sequence):
                request = self._requests[sequence.request_id]
                most = min(MAX_DRAFTS, room // (len(step.sequences) - place), request.max_num_tokens - request.num_tokens)
                drafts = self._drafts.propose(request, most) if most > 0 else ()
                if drafts and self.kv.grow(request.request_id, sequence.start, sequence.end + len(drafts)):
                    step.add_drafts(place, self._drafted(sequence, drafts))

    def _drafted(self, sequence: ScheduledSequence, drafts: tuple[int, ...]) -> ScheduledSequence:
        """A decode with drafts behind its token, which its table has grown for at the end."""
        table, window = self.kv.tables[sequence.request_id], sequence.window
        if window is not None and table.window is not None:
            window = window._replace(block_ids=table.window.block_ids)
        return sequence._replace(
            tokens=sequence.tokens + drafts,
            num_drafts=len(drafts),
            logits=Logits.ALL,
            block_ids=table.block_ids,
            window=window,
        )

    # The results

    def _advance(self, request: Request, sequence: ScheduledSequence, outcome: SequenceResult) -> Finish | None:
        """Take one run's outcome into the request; why the request ends with it, if it does."""
        if outcome.error is not None:
            self.kv.forget(request.request_id)
            return Finish(FinishReason.ERROR, message=outcome.error)
        if outcome.prompt_logprobs:
            self._take_prompt_logprobs(request, sequence, outcome)
        logprobs = outcome.logprobs
        for position, token_id in enumerate(outcome.token_ids):
            request.token_ids.append(token_id)
            if logprobs:
                request.logprobs.append(logprobs[position])
            finish = self._stop_rule(request)
            if finish is not None:
                return finish
        is_scored_only = not outcome.token_ids and request.sampling.max_tokens == 0
        if is_scored_only and request.num_computed_tokens == len(request.token_ids):
            return Finish(FinishReason.LENGTH)
        return None

    @staticmethod
    def _take_prompt_logprobs(request: Request, sequence: ScheduledSequence, outcome: SequenceResult) -> None:
        """A run that is recomputed after a preemption reports again what is known; only the new end is kept."""
        known = len(request.prompt_logprobs)
        request.prompt_logprobs.extend(outcome.prompt_logprobs[max(known - sequence.start, 0) :])

    def _retire(self, request: Request) -> None:
        self.kv.release(request.request_id)
        self._released.append(request.request_id)
        self._drafts.forget(request.request_id)
        del self._requests[request.request_id]
        assert request.finish is not None
        if request.num_output_tokens and request.finish.reason is not FinishReason.ERROR:
            self.lengths.observe(request.num_output_tokens)

    def check(self) -> None:
        """Assert every invariant of the class, and the cache's; between steps. For tests."""
        self.kv.check()
        assert len(self.running) <= self.seats
        for request in self.running:
            assert 0 <= request.num_computed_tokens < request.num_tokens, f"{request.request_id} has nothing to compute"
            assert request.request_id in self.kv.tables
        for request in self.running[:-1]:
            assert request.num_computed_tokens == request.num_tokens - 1, f"{request.request_id}: a prefill that is not last"
        for request in self.waiting:
            assert request.num_computed_tokens == 0 and request.request_id not in self.kv.tables
        assert set(self.kv.tables) == {request.request_id for request in self.running}
