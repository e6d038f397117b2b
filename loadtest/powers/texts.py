"""Real prompts, of a text that was written for this and is in no model's training data (``text.txt``)."""

from pathlib import Path

TEXT = (Path(__file__).parent / "text.txt").read_text()
PARAGRAPHS = tuple(TEXT.strip().split("\n\n"))
# Of a paragraph's copy, how much the prompt begins.
BEGUN_WORDS = 12
# Told to write on from so many.
NEW_WORDS = 24


def _begun(paragraph: str, words: int) -> str:
    return " ".join(paragraph.split()[:words])


KINDS = {
    "": (),
    # The answer is in the prompt: what n-gram speculation is for.
    "copying": tuple(f"{one}\n\n{one}\n\n{_begun(one, BEGUN_WORDS)}" for one in PARAGRAPHS),
    "new": tuple(_begun(one, NEW_WORDS) for one in PARAGRAPHS),
}
