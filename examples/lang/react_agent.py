"""ReAct agent: the model thinks, picks a tool and its input; Python runs the tool; until it answers.

python examples/lang/react_agent.py [MODEL or http://server]
"""

from __future__ import annotations

from collections.abc import Callable

from headrace import lang

FACTS = {
    "france": "Paris is the capital of France.",
    "italy": "Rome is the capital of Italy.",
    "oslo": "Oslo is in Norway.",
}
MAX_STEPS = 3
QUESTIONS = [
    "What is the capital of France?",
    "What is 12 + 30?",
    "In which country is Oslo?",
    "What is 7 + 8?",
]


def look_up(text: str) -> str:
    """What is known about a word in the text."""
    found = [fact for word, fact in FACTS.items() if word in text.lower()]
    return found[0] if found else "Nothing is known about that."


def add(text: str) -> str:
    """The sum of the numbers in the text."""
    words = "".join(char if char.isdigit() else " " for char in text).split()
    return str(sum(int(word) for word in words))


TOOLS: dict[str, Callable[[str], str]] = {"look_up": look_up, "add": add}


@lang.program
def agent(s: lang.State, question: str) -> str:
    s += "Answer the question. Tools: look_up finds a fact, add adds numbers, answer ends.\n\n"
    s += "Question: What is 2 + 3?\nThought: I should add the numbers.\nTool: add\nInput: 2 + 3\nResult: 5\n"
    s += "Thought: Now I know it.\nTool: answer\nInput: 5\n\n"
    s += f"Question: {question}\n"
    for step in range(MAX_STEPS):
        s += "Thought: " + lang.gen(f"thought {step}", max_tokens=24, stop="\n")
        choices = ["answer"] if step == MAX_STEPS - 1 else [*TOOLS, "answer"]
        s += "\nTool: " + lang.select(f"tool {step}", choices)
        s += "\nInput: " + lang.gen(f"input {step}", max_tokens=24, stop="\n")
        tool, given = s[f"tool {step}"], s[f"input {step}"]
        if tool == "answer":
            return str(given)
        s += f"\nResult: {TOOLS[tool](given)}\n"
    raise AssertionError("the last step answers")


def run(model: lang.Backend) -> list[str]:
    """The answer to each question."""
    states = agent.run_batch(model, [{"question": question} for question in QUESTIONS])
    return [state["return"] for state in states]


if __name__ == "__main__":
    with lang.model_of_command_line() as model:
        for question, answer in zip(QUESTIONS, run(model), strict=True):
            print(f"{question} {answer}")
