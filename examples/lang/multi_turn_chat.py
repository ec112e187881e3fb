"""Multi-turn chat: several conversations at the same time, each turn on top of the one before.

python examples/lang/multi_turn_chat.py [MODEL or http://server]
"""

from __future__ import annotations

from headrace import lang

CONVERSATIONS = [
    ["Hello! I plan a trip to the mountains.", "What should I pack?", "And for a rainy day?"],
    ["I want to grow tomatoes.", "How much water do they need?", "When can I pick them?"],
    ["Tell me about the moon.", "How far away is it?", "Who was there first?"],
    ["I have a headache.", "What helps without pills?", "Thank you. Anything else?"],
]


@lang.program
def chat(s: lang.State, questions: list[str]) -> None:
    s += lang.system("You are a friendly assistant who answers in one or two sentences.")
    for number, question in enumerate(questions):
        s += lang.user(question)
        s += lang.assistant(lang.gen(f"answer {number}", max_tokens=40))


def run(model: lang.Backend) -> list[list[str]]:
    """The answers of each conversation."""
    states = chat.run_batch(model, [{"questions": questions} for questions in CONVERSATIONS])
    return [
        [state[f"answer {n}"] for n in range(len(own))]
        for own, state in zip(CONVERSATIONS, states, strict=True)
    ]


if __name__ == "__main__":
    with lang.model_of_command_line() as model:
        for questions, answers in zip(CONVERSATIONS, run(model), strict=True):
            for question, answer in zip(questions, answers, strict=True):
                print(f"> {question}\n{answer}\n")
