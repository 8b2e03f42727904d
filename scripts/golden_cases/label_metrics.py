"""Goldens of the scores of labels and numbers, `cases.json`: seqeval's span F1 and accuracy, scikit-learn's macro-F1 and Matthews over the
labels of words, SciPy's correlations of numbers, and scikit-learn's accuracy, micro-F1 and macro-F1 of sets of labels, over the labels that the
references have. Needs `pip install "seqeval==1.2.*"` besides."""

import random

import numpy
from scipy.stats import pearsonr, spearmanr
from seqeval.metrics import accuracy_score, f1_score
from sklearn.metrics import accuracy_score as rows_right
from sklearn.metrics import f1_score as labels_f1
from sklearn.metrics import matthews_corrcoef

from .files import write_json

LETTERS = ["B", "I", "I", "E", "S"]


def write(folder):
    draw = random.Random(7)
    write_json(folder / "cases.json", {"words": [words(draw) for _ in range(12)], "numbers": [numbers(draw) for _ in range(6)], "sets": [sets(draw) for _ in range(8)]})


def words(draw):
    tags = ["O", "O"] + [f"{draw.choice(LETTERS)}-{kind}" for kind in ["PER", "LOC", "ORG-X", "MISC"] for _ in range(2)]
    references = [[draw.choice(tags) for _ in range(draw.randrange(1, 14))] for _ in range(draw.randrange(1, 9))]
    answers = [[tag if draw.random() < 0.7 else draw.choice(tags) for tag in row] for row in references]
    flat = [[tag for row in rows for tag in row] for rows in (references, answers)]
    return {
        "references": [" ".join(row) for row in references],
        "answers": [" ".join(row) for row in answers],
        "span_f1": float(f1_score(references, answers, zero_division=0)),
        "accuracy": float(accuracy_score(references, answers)),
        "macro_f1": float(labels_f1(*flat, labels=sorted(set(flat[0])), average="macro", zero_division=0)),
        "matthews": float(matthews_corrcoef(*flat)),
    }


def sets(draw):
    labels = [f"label {number}" for number in range(draw.randrange(2, 7))]
    references = [{label for label in labels if draw.random() < 0.4} for _ in range(draw.randrange(2, 20))]
    answers = [{label for label in labels if (label in row) != (draw.random() < 0.25)} for row in references]
    known = [at for at, label in enumerate(labels) if any(label in row for row in references)]
    matrices = [numpy.array([[label in row for label in labels] for row in rows], dtype=int) for rows in (references, answers)]
    f1 = lambda average: float(labels_f1(*matrices, labels=known, average=average, zero_division=0))  # noqa: E731
    text = lambda rows: [", ".join(sorted(row, reverse=draw.random() < 0.5)) for row in rows]  # noqa: E731
    return {
        "references": text(references),
        "answers": text(answers),
        "accuracy": float(rows_right(*matrices)),
        "micro_f1": f1("micro"),
        "macro_f1": f1("macro"),
    }


def numbers(draw):
    references = [draw.choice([draw.uniform(-3, 3), draw.randrange(-2, 3)]) for _ in range(draw.randrange(3, 30))]
    answers = [draw.choice([value + draw.gauss(0, 1), round(value)]) for value in references]
    pair = [[float(numpy.float32(value)) for value in values] for values in (references, answers)]
    return {
        "references": [str(value) for value in pair[0]],
        "answers": [str(value) for value in pair[1]],
        "pearson": float(pearsonr(*pair).statistic),
        "spearman": float(spearmanr(*pair).statistic),
    }
