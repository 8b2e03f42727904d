"""Goldens of the text metrics: `rows.json`, `labels.json` and `stems.json`.

`rows.json`: about 240 rows of English, Chinese, punctuation and nothing at all. Each row has `hypothesis`, `reference`, sacreBLEU's
sentence `chrf` and `chrf++`, and google's `rouge` and `rouge_stemmed` as F-measures of rouge1, rouge2, rougeL and rougeLsum;
`corpus` has sacreBLEU's scores and signatures, and the means of the rows' ROUGE. `labels.json`: scikit-learn's `accuracy`,
`macro_f1`, scores of each label and `confusion` matrix, over the labels of the references. `stems.json`: words and their stems by NLTK.
"""

import random

import sacrebleu
from nltk.stem.porter import PorterStemmer
from rouge_score.rouge_scorer import RougeScorer
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, precision_recall_fscore_support

from .files import write_json

WORDS = """the a cat cats sat sitting mat on in running runs ran nationally national conditional happiness happily relational
generalization generalizations troubled hopping falling filing agreed plastered electricity electrical adjustment adoption
communism effective bowdlerized controlling rolled skies dying lying news innings enjoyed enjoyment spied tried flies geology
theology carefully hopefully usefully rationally digitizer conformably vietnamization analogously decisiveness callousness
sensibility formality predicate operator feudalism 1999 42 3rd x2 don't it's re-use state-of-the-art e.g. U.S.A. café naïve
İstanbul STRASSE straße ﬁne K Ⅷ""".split()
CHINESE = "今天天气很好我们去公园散步吧他买了三个苹果和两本书显存不足时训练器会减小微批大小，。！？“”——…"
MARKS = list(".,;:!?'\"()-/%$#@*&") + ["...", "--", "``", "''", "\u3000", "\u00a0", "\t", "\x1c", "\u2028"]
METRICS = ["rouge1", "rouge2", "rougeL", "rougeLsum"]


def sentence(draw):
    kind = draw.random()
    if kind < 0.25:
        return "".join(draw.choice(CHINESE) for _ in range(draw.randrange(1, 25)))
    words = []
    for _ in range(draw.randrange(1, 14)):
        word = draw.choice(WORDS)
        if kind > 0.8 and draw.random() < 0.3:
            word = "".join(draw.choice(CHINESE) for _ in range(draw.randrange(1, 5)))
        if draw.random() < 0.2:
            word = draw.choice([word + draw.choice(MARKS), draw.choice(MARKS) + word, word.upper(), word.capitalize()])
        words.append(word)
    return draw.choice([" ", " ", " ", "  "]).join(words) + draw.choice(["", ".", " .", "!", "\n", " "])


def changed(draw, text):
    kind = draw.random()
    if kind < 0.15:
        return text
    if kind < 0.2:
        return draw.choice(["", " ", "\n", ".", "？"])
    pieces = text.split(" ") if " " in text else list(text)
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(len(pieces) + 1)
        action = draw.random()
        if action < 0.4 and at < len(pieces):
            pieces[at] = draw.choice(WORDS) if " " in text else draw.choice(CHINESE)
        elif action < 0.6 and at < len(pieces):
            del pieces[at]
        elif action < 0.8:
            pieces.insert(at, draw.choice(pieces or ["x"]))
        else:
            draw.shuffle(pieces)
    return (" " if " " in text else "").join(pieces)


def rows():
    draw = random.Random(23)
    made = [("", ""), ("", "the cat"), ("the cat", ""), (" \n ", "a"), ("!", "!"), ("abc", "abc"), ("a", "b")]
    for _ in range(200):
        reference = sentence(draw)
        made.append((changed(draw, reference), reference))
    for _ in range(33):  # summaries of several lines
        lines = [sentence(draw) for _ in range(draw.randrange(2, 6))]
        others = [changed(draw, line) for line in lines if draw.random() < 0.8]
        draw.shuffle(others)
        made.append(("\n".join(others), draw.choice(["\n", "\n\n", "\n \n"]).join(lines)))
    return made


def write(folder):
    pairs = rows()
    chrf = {"chrf": sacrebleu.CHRF(), "chrf++": sacrebleu.CHRF(word_order=2)}
    rouge = {"rouge": RougeScorer(METRICS), "rouge_stemmed": RougeScorer(METRICS, use_stemmer=True)}
    goldens = []
    for hypothesis, reference in pairs:
        row = {"hypothesis": hypothesis, "reference": reference}
        for name, metric in chrf.items():
            row[name] = metric.sentence_score(hypothesis, [reference]).score
        for name, scorer in rouge.items():
            scores = scorer.score(reference, hypothesis)
            row[name] = [float(scores[metric].fmeasure) for metric in METRICS]
        goldens.append(row)
    hypotheses, references = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    corpus = {}
    for name, metric in chrf.items():
        score = metric.corpus_score(hypotheses, [references]).score
        corpus[name] = {"score": score, "signature": str(metric.get_signature())}
    for tokenizer in ["13a", "zh", "char", "none"]:
        metric = sacrebleu.BLEU(tokenize=tokenizer)
        score = metric.corpus_score(hypotheses, [references]).score
        corpus[f"bleu {tokenizer}"] = {"score": score, "signature": str(metric.get_signature())}
    for name in rouge:
        corpus[name] = [sum(row[name][i] for row in goldens) / len(goldens) for i in range(len(METRICS))]
    write_json(folder / "rows.json", {"rows": goldens, "corpus": corpus})
    write_json(folder / "labels.json", [labels(seed) for seed in range(6)])
    draw = random.Random(5)
    letters = "aaeeiioouuyysstlnrdbcmpgfzkhvwxqj1"
    made_up = ["".join(draw.choice(letters) for _ in range(draw.randrange(1, 9))) for _ in range(250)]
    endings = """ational tional enci anci izer bli abli alli entli eli ousli ization ation ator alism iveness fulness ousness aliti
    iviti biliti fulli logi icate ative alize iciti ical ful ness al ance ence er ic able ible ant ement ment ent ion ou ism ate
    iti ous ive ize eed ed ing ied ies sses ss s y e ll yed ying""".split()
    ended = [draw.choice(["", "r", "tr", "oat", "hop", "fall", "siz", "conflat", "troubl", "y", "yy"]) + end for end in endings]
    plain = [word.lower() for word in WORDS if word.isascii() and word.isalnum()]
    stemmer = PorterStemmer()
    words = sorted({word for word in made_up + ended + plain if word})
    write_json(folder / "stems.json", {word: stemmer.stem(word) for word in words})


def labels(seed):
    draw = random.Random(seed)
    names = ["yes", "no", "正面", "负面", "neutral", ""][: draw.randrange(2, 7)]
    references = [draw.choice(names) for _ in range(draw.randrange(1, 40))]
    answers = [reference if draw.random() < 0.6 else draw.choice([*names, "other", "Yes"]) for reference in references]
    known = sorted(set(references))
    precision, recall, f1, support = precision_recall_fscore_support(references, answers, labels=known, zero_division=0)
    return {
        "labels": known,
        "precision": precision.tolist(),
        "recall": recall.tolist(),
        "f1": f1.tolist(),
        "support": support.tolist(),
        "confusion": confusion_matrix(references, answers, labels=known).tolist(),
        "hypotheses": answers,
        "references": references,
        "accuracy": float(accuracy_score(references, answers)),
        "macro_f1": float(f1_score(references, answers, labels=known, average="macro", zero_division=0)),
    }
