"""Baselines of a reward model that cost nothing: a longer answer is better, and a bag of words. Pure functions of
arrays and texts."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

WORD = re.compile(r"\w+|[^\w\s]")
"""A word, or one mark of punctuation."""
L2 = 1.0
"""Weight of ½‖w‖² beside the sum of the losses."""
SEEN = 2
"""Training texts in which a word has to occur."""
NEWTON_STEPS, CG_STEPS, HALVINGS = 25, 50, 20
TOLERANCE = 1e-3
"""Largest gradient component at the solution, and the residual of each linear system relative to its right side."""

Vector = Float[ndarray, "places"]


@dataclass(frozen=True)
class Differences:
    """The matrix [pairs, words] of the word counts of each pair's better text minus those of the worse one. Products
    are sums in a fixed order: the same bytes with any number of threads."""

    texts: Int[ndarray, "entries"]
    """The text of each entry of the sparse matrix [texts, words] of counts."""
    words: Int[ndarray, "entries"]
    counts: Float[ndarray, "entries"]
    size: tuple[int, int]
    """Numbers of texts and words."""
    better: Int[ndarray, "pairs"]
    worse: Int[ndarray, "pairs"]

    def times(self, weights: Vector) -> Vector:
        """Matrix · weights: one number a pair."""
        scores = np.bincount(self.texts, self.counts * weights[self.words], minlength=self.size[0])
        found: Vector = scores[self.better] - scores[self.worse]
        return found

    def transposed_times(self, pairs: Vector) -> Vector:
        """Matrixᵀ · pairs: one number a word."""
        texts = np.bincount(self.better, pairs, minlength=self.size[0])
        texts -= np.bincount(self.worse, pairs, minlength=self.size[0])
        return np.bincount(self.words, self.counts * texts[self.texts], minlength=self.size[1])


@dataclass(frozen=True)
class BagOfWords:
    """Scores a text by the sum of its words' weights, case ignored; a word that is not in `weights` has 0."""

    weights: dict[str, float]

    def __call__(self, texts: Sequence[str]) -> Vector:
        """A score for each text, in the unit of log-odds."""
        return np.array([sum(self.weights.get(word, 0.0) for word in words_of(text)) for text in texts])

    @classmethod
    def fitted(cls, texts: Sequence[str], pairs: Sequence[tuple[int, int]]) -> "BagOfWords":
        """The Bradley-Terry model on word counts: a logistic regression on the counts of the better text minus those of
        the worse one, without intercept, with a fixed L2 penalty. `pairs` are (better, worse) places in `texts`."""
        counted = [Counter(words_of(text)) for text in texts]
        found_in = Counter(word for words in counted for word in words)
        places = {word: i for i, word in enumerate(sorted(word for word, n in found_in.items() if n >= SEEN))}
        entries = [
            (text, places[word], count) for text, words in enumerate(counted) for word, count in words.items()
            if word in places
        ]  # fmt: skip
        rows, columns, counts = np.array(entries, dtype=np.int64).reshape(-1, 3).T
        better, worse = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        size = (len(texts), len(places))
        weights = logistic_regression(Differences(rows, columns, counts.astype(np.float64), size, better, worse))
        return cls(dict(zip(places, weights.tolist(), strict=True)))


def words_of(text: str) -> list[str]:
    """Lower-case words and marks of punctuation."""
    return WORD.findall(text.casefold())


def logistic_regression(differences: Differences) -> Vector:
    """The w that minimises Σ −log σ(x·w) + ½‖w‖² · `L2` over the rows x, by Newton's method, whose linear systems are
    solved by conjugate gradients. The minimum is unique; a step that does not lower the loss is halved."""
    weights = np.zeros(differences.size[1])

    def loss(at: Vector) -> float:
        return float(np.logaddexp(0.0, -differences.times(at)).sum() + 0.5 * L2 * (at * at).sum())

    for _ in range(NEWTON_STEPS):
        wrong = 1.0 / (1.0 + np.exp(np.clip(differences.times(weights), -500.0, 500.0)))
        gradient = L2 * weights - differences.transposed_times(wrong)
        if np.abs(gradient).max(initial=0.0) <= TOLERANCE:
            break
        curvature = wrong * (1.0 - wrong)

        def hessian(v: Vector, curvature: Vector = curvature) -> Vector:
            image: Vector = L2 * v + differences.transposed_times(curvature * differences.times(v))
            return image

        step, before = conjugate_gradients(hessian, -gradient), loss(weights)
        for halved in range(HALVINGS):
            if loss(weights + step * 0.5**halved) < before:
                weights = weights + step * 0.5**halved
                break
        else:
            break
    return weights


def conjugate_gradients(product: Callable[[Vector], Vector], right: Vector) -> Vector:
    """x with product(x) = right for a positive definite matrix, up to a relative residual of `TOLERANCE` (Hestenes and
    Stiefel 1952)."""
    found, residual = np.zeros_like(right), right.copy()
    direction, size = residual.copy(), float((residual * residual).sum())
    limit = TOLERANCE**2 * size
    for _ in range(CG_STEPS):
        if size <= limit:
            break
        image = product(direction)
        length = size / float((direction * image).sum())
        found, residual = found + length * direction, residual - length * image
        size, last = float((residual * residual).sum()), size
        direction = residual + size / last * direction
    return found


def ranks(values: Sequence[float] | Vector) -> Vector:
    """The rank of each value, from 1; equal values have the mean of their ranks."""
    _, places, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    found: Vector = (ends - 0.5 * (counts - 1))[places]
    return found
