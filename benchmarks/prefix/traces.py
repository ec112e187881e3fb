"""Six synthetic request traces whose prompts share prefixes the way applications make them share. Deterministic."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

VOCAB = 32_000


@dataclass(frozen=True)
class TraceRequest:
    """One request: the tokens of its prompt, and of the answer that it will get."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class TokenSource:
    """Makes text out of nothing: runs of random tokens."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def text(self, low: int, high: int | None = None) -> tuple[int, ...]:
        """Between ``low`` and ``high`` tokens."""
        length = self.rng.randint(low, high if high is not None else low)
        return tuple(self.rng.randrange(VOCAB) for _ in range(length))

    def zipf(self, number: int) -> int:
        """An index below ``number``, small ones more often."""
        weights = [1 / (rank + 1) for rank in range(number)]
        return self.rng.choices(range(number), weights)[0]


def few_shot(seed: int = 0, num_tasks: int = 12, num_requests: int = 400) -> list[TraceRequest]:
    """Benchmark questions behind the worked examples of their task (MMLU, HellaSwag), tasks interleaved."""
    source = TokenSource(seed)
    header = source.text(40)
    tasks = [header + source.text(500, 1200) for _ in range(num_tasks)]
    return [
        TraceRequest(tasks[source.rng.randrange(num_tasks)] + source.text(30, 120), source.text(4, 16))
        for _ in range(num_requests)
    ]


def agent(seed: int = 1, num_agents: int = 40, num_turns: int = 10) -> list[TraceRequest]:
    """ReAct agents: one long system prompt with tools; each step appends thought, action and observation."""
    source = TokenSource(seed)
    system = source.text(900)
    histories = [system + source.text(60, 200) for _ in range(num_agents)]
    left = [num_turns] * num_agents
    requests = []
    while any(left):
        index = source.rng.choice([i for i, turns in enumerate(left) if turns])
        answer = source.text(40, 120)
        requests.append(TraceRequest(histories[index], answer))
        histories[index] += answer + source.text(50, 250)
        left[index] -= 1
    return requests


def tree_of_thought(
    seed: int = 2, num_problems: int = 12, breadth: int = 3, depth: int = 3
) -> list[TraceRequest]:
    """Each problem's thoughts branch ``breadth`` ways, level by level; problems are solved side by side."""
    source = TokenSource(seed)
    examples = source.text(600)
    levels = [[examples + source.text(100, 250)] for _ in range(num_problems)]
    requests = []
    for _ in range(depth):
        batch = []
        for problem, paths in enumerate(levels):
            grown = []
            for path in paths:
                for _ in range(breadth):
                    thought = source.text(40, 100)
                    batch.append(TraceRequest(path, thought))
                    grown.append(path + thought + source.text(8))
            levels[problem] = grown
        source.rng.shuffle(batch)
        requests += batch
    return requests


def multi_turn(
    seed: int = 3, num_chats: int = 60, num_turns: int = 6, num_systems: int = 4
) -> list[TraceRequest]:
    """Chats that take turns in random order; a few system prompts, histories that grow by question and answer."""
    source = TokenSource(seed)
    systems = [source.text(150, 400) for _ in range(num_systems)]
    histories = [systems[source.zipf(num_systems)] for _ in range(num_chats)]
    left = [num_turns] * num_chats
    requests = []
    while any(left):
        index = source.rng.choice([i for i, turns in enumerate(left) if turns])
        histories[index] += source.text(20, 150)
        answer = source.text(60, 300)
        requests.append(TraceRequest(histories[index], answer))
        histories[index] += answer
        left[index] -= 1
    return requests


def judge(seed: int = 4, num_essays: int = 60, num_dimensions: int = 6) -> list[TraceRequest]:
    """Branch, solve, merge: each essay is judged along several dimensions, then the verdicts are summed up."""
    source = TokenSource(seed)
    instructions = source.text(300)
    dimensions = [source.text(30, 60) for _ in range(num_dimensions)]
    requests = []
    for _ in range(num_essays):
        essay = instructions + source.text(500, 1500)
        verdicts: tuple[int, ...] = ()
        for dimension in dimensions:
            verdict = source.text(50, 150)
            requests.append(TraceRequest(essay + dimension, verdict))
            verdicts += verdict
        requests.append(TraceRequest(essay + verdicts, source.text(80, 200)))
    return requests


def rag(
    seed: int = 5, num_documents: int = 60, num_requests: int = 350, top_k: int = 3
) -> list[TraceRequest]:
    """Questions behind retrieved documents, the most relevant first; popular documents come often."""
    source = TokenSource(seed)
    system = source.text(200)
    documents = [source.text(200, 600) for _ in range(num_documents)]
    requests = []
    for _ in range(num_requests):
        first = source.zipf(num_documents)
        chosen = [first, *((first + 1 + source.zipf(8)) % num_documents for _ in range(top_k - 1))]
        context = tuple(token for index in dict.fromkeys(chosen) for token in documents[index])
        requests.append(TraceRequest(system + context + source.text(15, 60), source.text(30, 150)))
    return requests


TRACES: dict[str, Callable[[], list[TraceRequest]]] = {
    "few-shot": few_shot,
    "agent": agent,
    "tree-of-thought": tree_of_thought,
    "multi-turn": multi_turn,
    "judge": judge,
    "rag": rag,
}
