"""Few-shot classification: many texts, one prompt of examples before each, labels compared by log-probability.

python examples/lang/few_shot_classification.py [MODEL or http://server]
"""

from __future__ import annotations

from headrace import lang

LABELS = ["positive", "negative"]
EXAMPLES = [
    ("I loved every minute of it.", "positive"),
    ("The plot was a mess and so was the acting.", "negative"),
    ("A warm, clever and very funny film.", "positive"),
    ("I want my two hours back.", "negative"),
    ("The best performance of her career.", "positive"),
    ("Dull, loud and far too long.", "negative"),
    ("We laughed all evening and went home happy.", "positive"),
    ("Not even the music could save this one.", "negative"),
]
REVIEWS = [
    "A beautiful story, told with love.",
    "I fell asleep after ten minutes.",
    "Wonderful from beginning to end.",
    "The worst film of the year.",
    "Great fun for the whole family.",
    "A complete waste of money.",
    "Charming and full of surprises.",
    "Nothing in it makes any sense.",
]


@lang.program
def classify(s: lang.State, review: str) -> None:
    for text, label in EXAMPLES:
        s += f"Review: {text}\nSentiment: {label}\n\n"
    s += f"Review: {review}\nSentiment: " + lang.select("label", LABELS)


def run(model: lang.Backend) -> list[str]:
    """The label of each review."""
    states = classify.run_batch(model, [{"review": review} for review in REVIEWS])
    return [state["label"] for state in states]


if __name__ == "__main__":
    with lang.model_of_command_line() as model:
        for review, label in zip(REVIEWS, run(model), strict=True):
            print(f"{label:9} {review}")
