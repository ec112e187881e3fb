"""Tree of thought: several ideas, each thought on, each judged; the best line of thought gives the answer.

python examples/lang/tree_of_thought.py [MODEL or http://server]
"""

from __future__ import annotations

from headrace import lang

NUM_IDEAS = 4
NUM_STEPS = 2
GRADES = ["1", "2", "3", "4", "5"]
QUESTION = (
    "A farmer has 17 sheep. All but 9 run away in the night, and in the morning she buys twice as many as she has "
    "left. How many sheep does she have then?"
)


@lang.program
def tree_of_thought(s: lang.State, question: str) -> str:
    s += lang.system("You solve problems step by step. Be brief and careful.")
    s += lang.user(f"Problem: {question}\nPropose one idea for solving it, in one sentence.")
    branches = s.fork(NUM_IDEAS)
    for index, branch in enumerate(branches):
        branch += lang.assistant(lang.gen("idea", max_tokens=32, temperature=0.8, seed=index))
        for step in range(NUM_STEPS):
            branch += lang.user("Think one step further.")
            branch += lang.assistant(lang.gen(f"step {step}", max_tokens=32, temperature=0.8, seed=index))
        branch += lang.user("How good is this line of thought, from 1 (wrong) to 5 (surely right)?")
        branch += lang.assistant("Grade: ", lang.select("grade", GRADES))
    s.join(branches)
    best = max(branches, key=grade_of)
    best += lang.user("Give the answer as one number.")
    best += lang.assistant("The answer is ", lang.gen("answer", max_tokens=8, stop="\n"))
    return str(best["answer"])


def grade_of(branch: lang.State) -> float:
    """The grade that the model expects, from the scores of all grades."""
    scores = branch.meta("grade")["scores"]
    lowest = min(scores.values())
    weights = {grade: score - lowest for grade, score in scores.items()}
    total = sum(weights.values()) or 1.0
    return sum(int(grade) * weight for grade, weight in weights.items()) / total


def run(model: lang.Backend) -> str:
    """The answer."""
    return str(tree_of_thought.run(model, question=QUESTION)["return"])


if __name__ == "__main__":
    with lang.model_of_command_line() as model:
        print(run(model))
