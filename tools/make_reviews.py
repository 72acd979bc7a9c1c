"""Write made-up reviews as token arrays, to try a text task without a download.

    python tools/make_reviews.py reviews.npz            24,000 reviews, 4,000 of them for the test
    fastload pack reviews.npz reviews.h5
    python tools/train.py reviews.h5                    with attention; --layers 0 is a bag of words
    python tools/make_reviews.py pairs.npz --pairs      a review and a claim about it, as in MNLI

Each review says something about three things, in words such as "the soup was not , to be honest , very good", and is
positive where it praises more of them than it blames. "not" turns what comes after it around, often some words later:
which of the praising and blaming words it belongs to shows only in their order, so a bag of words is right on two in
three at best. With `--pairs` reviews are short, and a claim such as "the soup was bad" stands after each, which it
entails (0), says nothing about (1) or contradicts (2): sentence pairs in the form of MNLI (Williams et al., 2018).

The arrays, each once with `train_` and once with `test_` before its name: `tokens` int32 (N, L), 0 behind the end;
`attention_mask` uint8 (N, L), 1 for words; `labels` int64 (N,), 0 negative and 1 positive, or as above; for pairs
`token_type_ids` uint8 (N, L), 1 for the claim. The vocabulary, a word a line, is a text file beside them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

THINGS = (
    "soup bread fish salad cake coffee wine menu waiter cook music view garden room bed price plot film song cast "
    "ending camera screen battery keyboard seat train driver museum guide"
).split()
GOOD = "good great fine lovely fresh superb warm pleasant bright delightful excellent charming".split()
BAD = "bad awful dull poor stale dreadful cold unpleasant dim boring terrible clumsy".split()
STRENGTHS = "very really quite rather truly".split()
NEGATIONS = ("not", "never", "hardly", "by no means")
ASIDES = ("", "", "", ", to be honest ,", ", if you ask me ,", ", for so bright a name ,")
JOINS = (" . ", " , and ", " , but ", " ; ")
OPENINGS = ("", "", "we came twice . ", "a bad day in a good town : ", "i read a great review first . ")


BETWEEN = "<then>"
"""What stands between a review and a claim about it."""


def judged(rng: np.random.Generator, *, short: bool = False) -> tuple[str, list[tuple[str, bool]]]:
    """A review, and the things that it judges with whether it praises them; a thing may come twice.

    A short one is of two out of ten things, without a word aside.
    """

    def one(choices: tuple[str, ...] | list[str]) -> str:
        return choices[rng.integers(len(choices))]

    text, said = "" if short else one(OPENINGS), []
    for clause in range(2 if short else 3):
        kind, turned = rng.random(2) < (0.5, 0.3)
        thing = one(THINGS[:10] if short else THINGS)
        said.append((thing, bool(kind) != bool(turned)))
        words = ["the", thing, "was", one(NEGATIONS) if turned else "", "" if short else one(ASIDES)]
        words += [one(STRENGTHS) if rng.random() < 0.5 else "", one(GOOD if kind else BAD)]
        text += (one(JOINS) if clause else "") + " ".join(word for word in words if word)
    return text + " .", said


def review(rng: np.random.Generator) -> tuple[str, int]:
    """A review and its label."""
    text, said = judged(rng)
    return text, int(sum(praised for _, praised in said) >= 2)


def pair(rng: np.random.Generator) -> tuple[str, int]:
    """A short review, `BETWEEN` and a claim, which it entails (0), leaves open (1) or contradicts (2)."""
    text, said = judged(rng, short=True)
    while len({thing for thing, _ in said}) < len(said):
        text, said = judged(rng, short=True)
    label, claimed = int(rng.integers(3)), bool(rng.integers(2))
    if label == 1:
        others = [thing for thing in THINGS[:10] if thing not in {thing for thing, _ in said}]
        thing = others[rng.integers(len(others))]
    else:
        thing, praised = said[rng.integers(len(said))]
        claimed = praised == (label == 0)
    kinds = GOOD if claimed else BAD
    return f"{text} {BETWEEN} the {thing} was {kinds[rng.integers(len(kinds))]} .", label


def arrays(
    count: int, test: int, seed: int, *, pairs: bool = False
) -> tuple[dict[str, NDArray[np.generic]], list[str]]:
    """The arrays by name, and the vocabulary; each text occurs once, so the test holds none of the training."""
    rng = np.random.default_rng(seed)
    found: dict[str, int] = {}
    while len(found) < count:
        text, label = pair(rng) if pairs else review(rng)
        found.setdefault(text, label)
    texts = [text.split() for text in found]
    vocabulary = ["<end>", *sorted({word for words in texts for word in words})]
    number = {word: token for token, word in enumerate(vocabulary)}
    tokens = np.zeros((count, max(map(len, texts))), np.int32)
    for row, words in zip(tokens, texts, strict=True):
        row[: len(words)] = [number[word] for word in words]
    whole = {
        "tokens": tokens,
        "attention_mask": (tokens != 0).astype(np.uint8),
        "labels": np.array(list(found.values()), np.int64),
    }
    if pairs:
        after = np.cumsum(tokens == number[BETWEEN], axis=1) > 0
        whole["token_type_ids"] = (after & (tokens != 0)).astype(np.uint8)
    parts = {"train": slice(count - test), "test": slice(count - test, count)}
    return {
        f"{part}_{name}": values[rows] for part, rows in parts.items() for name, values in whole.items()
    }, vocabulary


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description="Write made-up reviews as token arrays.")
    parser.add_argument("output", type=Path, help="an .npz to write; the vocabulary goes beside it as .txt")
    parser.add_argument("--count", type=int, default=24_000, help="reviews (default: 24,000)")
    parser.add_argument("--test", type=int, help="of them for the test (default: a sixth)")
    parser.add_argument("--pairs", action="store_true", help="a claim after each review: entailed, open, contradicted")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.count < 6:
        parser.error("--count must be at least 6")
    test = options.count // 6 if options.test is None else options.test
    if not 0 < test < options.count:
        parser.error("--test must leave reviews for both")
    made, vocabulary = arrays(options.count, test, options.seed, pairs=options.pairs)
    np.savez(options.output, **made)
    words = options.output.with_suffix(".txt")
    words.write_text("\n".join(vocabulary) + "\n")
    print(
        f"{options.output}: {options.count} {'pairs' if options.pairs else 'reviews'} of up to "
        f"{made['train_tokens'].shape[1]} tokens, {test} of them test; labels of these "
        f"{np.bincount(made['test_labels']).tolist()}; {words}: {len(vocabulary)} words"
    )


if __name__ == "__main__":
    main()
