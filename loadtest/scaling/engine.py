"""One engine as the simulator sees it: continuous batching, step by step, without a GPU.

Each step generates one token for every sequence and fills the rest of its token budget with prompt tokens (chunked
prefill), oldest request first. A request is taken in while there is a slot, budget left and room for its prompt in the
KV cache; where the cache overflows, the youngest sequence goes back to the queue and is computed anew. A step takes

    step_s + sequence_s * sequences + kv_token_s * tokens in the cache + prompt_token_s * prompt tokens
"""

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class EngineSpec:
    """What an engine can do. Times in seconds, sizes in tokens. ``slots``: vLLM's ``max_num_seqs``; ``budget``: its
    ``max_num_batched_tokens``."""

    step_s: float
    sequence_s: float
    kv_token_s: float
    prompt_token_s: float
    kv_tokens: int
    slots: int = 256
    budget: int = 8192


@dataclass(slots=True, eq=False)
class Request:
    """``at_s``: when it arrives. ``prompt``, ``output``: tokens. The rest is what becomes of it: ``done`` tokens are
    generated, the first at ``first_s``, the last at ``ended_s``; ``refused``: it got no replica in time."""

    at_s: float
    prompt: int
    output: int
    done: int = 0
    first_s: float | None = None
    ended_s: float | None = None
    refused: bool = False
    # Of the gateway: it waits no longer than this.
    deadline_s: float = 0.0
    # Of its engine: when it came there, tokens to compute before it generates, the engine's count of steps when its
    # last token comes, and the number of its place in the engine's heap (0: none).
    ready_s: float = 0.0
    left: int = 0
    last_step: int = 0
    place: int = 0


class Engine:
    """``now``: its own clock, s: the end of the last step. ``tokens``: computed so far, of prompts and answers."""

    def __init__(self, spec: EngineSpec, now: float) -> None:
        self.spec = spec
        self.now = now
        self.tokens = 0
        self.waiting: deque[Request] = deque()
        self._prefilling: deque[Request] = deque()
        self._generating: dict[Request, None] = {}  # the youngest last
        self._ends: list[tuple[int, int, Request]] = []  # heap: last step, place, request
        self._places = 0
        self._steps = 0
        self._kv = 0
        self._late: list[Request] = []  # ended by a step that ends after the time that was asked for

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._generating)

    @property
    def requests(self) -> int:
        return self.running + len(self.waiting) + len(self._late)

    @property
    def kv_usage(self) -> float:
        return self._kv / self.spec.kv_tokens

    def add(self, request: Request, now: float) -> None:
        if not self.requests:
            self.now = max(self.now, now)
        request.ready_s = now
        request.left = request.prompt + request.done
        self.waiting.append(request)

    def advance(self, until: float) -> list[Request]:
        """Step up to ``until``. Returns the requests that ended."""
        ended = []
        while self.now < until:
            ended += self._late
            self._late = self._step(until)
        return ended

    def clear(self) -> list[Request]:
        """Take every request away, each with the tokens that it has."""
        for request in self._generating:
            request.done = request.output - (request.last_step - self._steps)
        taken = [*self._generating, *self._prefilling, *self.waiting]
        self._generating.clear()
        self._prefilling.clear()
        self.waiting.clear()
        self._ends.clear()
        self._kv = 0
        return taken

    def _step(self, until: float) -> list[Request]:
        """One step with prompt tokens, or several without."""
        spec = self.spec
        sequences = len(self._generating)
        while self._kv + sequences > spec.kv_tokens and sequences > 1:
            self._put_back()
            sequences -= 1
        prompts, filled = self._prefill(spec.budget - sequences)
        seconds = spec.step_s + spec.sequence_s * sequences + spec.kv_token_s * self._kv
        if prompts:
            seconds += spec.prompt_token_s * prompts
            steps = 1
        elif sequences:
            if self.waiting and self.waiting[0].ready_s > self.now:
                until = min(until, self.waiting[0].ready_s)
            room = (spec.kv_tokens - self._kv) // sequences
            steps = max(1, min(int((until - self.now) / seconds) + 1, self._next_end() - self._steps, room))
        else:
            self.now = min(until, max(self.now, self.waiting[0].ready_s)) if self.waiting else until
            return []
        self.now += steps * seconds
        self._steps += steps
        self._kv += steps * sequences
        self.tokens += steps * sequences + prompts
        return [*self._finish_answers(), *self._finish_prompts(filled)]

    def _prefill(self, budget: int) -> tuple[int, int]:
        """Spend up to ``budget`` on prompts. Returns (tokens, prompts that are complete)."""
        spec, left, complete = self.spec, budget, 0
        for request in self._prefilling:
            part = min(request.left, left)
            request.left -= part
            left -= part
            complete += request.left == 0
            if not left:
                break
        while left > 0 and self.waiting and self.waiting[0].ready_s <= self.now and self.running < spec.slots:
            request = self.waiting[0]
            if self._kv + request.left > spec.kv_tokens and self.running:
                break
            self.waiting.popleft()
            self._prefilling.append(request)
            self._kv += request.left
            part = min(request.left, left)
            request.left -= part
            left -= part
            complete += request.left == 0
        return budget - left, complete

    def _finish_prompts(self, complete: int) -> list[Request]:
        """A complete prompt gives the first token; then its sequence generates."""
        ended = []
        for _ in range(complete):
            request = self._prefilling.popleft()
            request.done += 1
            if request.first_s is None:
                request.first_s = self.now
            if request.done >= request.output:
                ended.append(self._end(request))
                continue
            request.last_step = self._steps + request.output - request.done
            self._generating[request] = None
            self._places += 1
            request.place = self._places
            heappush(self._ends, (request.last_step, request.place, request))
        return ended

    def _finish_answers(self) -> list[Request]:
        ended = []
        while self._generating and self._next_end() <= self._steps:
            request = heappop(self._ends)[2]
            del self._generating[request]
            request.done = request.output
            ended.append(self._end(request))
        return ended

    def _end(self, request: Request) -> Request:
        self._kv -= request.prompt + request.output - 1
        request.ended_s = self.now
        return request

    def _next_end(self) -> int:
        while self._ends[0][2].place != self._ends[0][1]:
            heappop(self._ends)  # left over from a request that was put back
        return self._ends[0][0]

    def _put_back(self) -> None:
        request, _ = self._generating.popitem()
        request.done = request.output - (request.last_step - self._steps)
        request.place = 0
        request.left = request.prompt + request.done
        self._kv -= request.left - 1
        self.waiting.appendleft(request)
