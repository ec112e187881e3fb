"""LLM judge: an essay judged in several respects at the same time, then as a whole.

python examples/lang/llm_judge.py [MODEL or http://server]
"""

from __future__ import annotations

from headrace import lang

RESPECTS = ["clarity", "evidence", "style", "originality"]
GRADES = ["poor", "fair", "good", "excellent"]
ESSAY = (
    "Cities should plant more trees. Trees cool the streets in summer, and a street with trees is a street where "
    "people like to walk. In my own town the avenue with old lime trees is full of people on every evening, while "
    "the new road beside it is empty. Trees take years to grow, so the best time to plant them is now."
)


@lang.program
def judge(s: lang.State, essay: str) -> str:
    s += lang.system("You are a fair and brief judge of essays.")
    s += lang.user(f"Read this essay.\n\n{essay}")
    s += lang.assistant("I have read it.")
    branches = s.fork(len(RESPECTS))
    for respect, branch in zip(RESPECTS, branches, strict=True):
        branch += lang.user(f"Judge its {respect} in one sentence.")
        branch += lang.assistant(lang.gen("reason", max_tokens=32), "\nGrade: ", lang.select("grade", GRADES))
    found = s.join(branches)
    notes = "\n".join(
        f"{name}: {one['reason'].strip()} ({one['grade']})" for name, one in zip(RESPECTS, found, strict=True)
    )
    s += lang.user(f"These were your judgements:\n{notes}\nGive a grade for the whole.")
    s += lang.assistant("Grade: ", lang.select("grade", GRADES))
    return f"{notes}\nwhole: {s['grade']}"


def run(model: lang.Backend) -> str:
    """All judgements."""
    return str(judge.run(model, essay=ESSAY)["return"])


if __name__ == "__main__":
    with lang.model_of_command_line() as model:
        print(run(model))
