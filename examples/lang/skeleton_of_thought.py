"""Skeleton of thought: the points of an answer first, then all points written out at the same time.

python examples/lang/skeleton_of_thought.py [MODEL or http://server]
"""

from __future__ import annotations

from headrace import lang

NUM_POINTS = 4
QUESTION = "How do I learn to cook?"


@lang.program
def skeleton_of_thought(s: lang.State, question: str) -> str:
    s += lang.system("You give clear and practical advice.")
    s += lang.user(f"{question}\nName {NUM_POINTS} points of an answer, a few words each.")
    points = lang.Pieces(())
    for number in range(NUM_POINTS):
        points = points + f"{number + 1}. " + lang.gen(f"point {number}", max_tokens=12, stop="\n") + "\n"
    s += lang.assistant(points)
    branches = s.fork(NUM_POINTS)
    for number, branch in enumerate(branches):
        branch += lang.user(f"Write two sentences about point {number + 1}, and nothing else.")
        branch += lang.assistant(lang.gen("text", max_tokens=48))
    texts = [found["text"].strip() for found in s.join(branches)]
    return "\n".join(f"{n + 1}. {s[f'point {n}'].strip()}: {text}" for n, text in enumerate(texts))


def run(model: lang.Backend) -> str:
    """The whole answer."""
    return str(skeleton_of_thought.run(model, question=QUESTION)["return"])


if __name__ == "__main__":
    with lang.model_of_command_line() as model:
        print(run(model))
