"""Goldens of the scores of rankings, `cases.json`, and of searches, `searches.json`: trec_eval's `ndcg_cut_10`, and its `recip_rank` of the first ten, by pytrec_eval. Scores
differ, because trec_eval breaks ties by the names of texts. Needs `pip install "pytrec_eval-terrier==0.5.*"` besides."""

import random

import pytrec_eval

from .files import write_json


def write(folder):
    draw = random.Random(11)
    write_json(folder / "cases.json", [case(draw) for _ in range(8)])
    write_json(folder / "searches.json", [search(draw) for _ in range(6)])


CUTS = [1, 5, 10, 20, 50, 100]


def search(draw):
    """Queries over one corpus: what each found, with equal scores among them, and what was judged, found or not."""
    names = [f"d{number}" for number in range(180)]
    run, judged = {}, {}
    for number in range(draw.randrange(2, 8)):
        found = draw.sample(names, draw.randrange(1, 140))
        run[f"q{number}"] = {name: draw.randrange(-40, 40) / 16 for name in found}
        judged[f"q{number}"] = {name: draw.choice([0, 0, 1, 1, 2]) for name in draw.sample(names, draw.randrange(1, 60))}
    # trec_eval puts the larger name first where scores are equal.
    ordered = {query: sorted(texts, key=lambda name: (texts[name], name), reverse=True) for query, texts in run.items()}
    first = {query: {name: run[query][name] for name in texts[:10]} for query, texts in ordered.items()}
    measures = {"ndcg_cut_10"} | {f"recall_{cut}" for cut in CUTS}
    scores = pytrec_eval.RelevanceEvaluator(judged, measures).evaluate(run)
    mrr = pytrec_eval.RelevanceEvaluator(judged, {"recip_rank"}).evaluate(first)
    mean = lambda of, measure: sum(query[measure] for query in of.values()) / len(run)  # noqa: E731
    recall = [mean(scores, f"recall_{cut}") for cut in CUTS]
    return {"run": run, "judged": judged, "recall": recall, "mrr": mean(mrr, "recip_rank"), "ndcg": mean(scores, "ndcg_cut_10")}


def case(draw):
    queries = []
    for _ in range(draw.randrange(1, 7)):
        count = draw.randrange(1, 25)
        scores = draw.sample([step / 8 for step in range(-200, 200)], count)
        queries.append([[score, draw.choice([0, 0, 0, 0, 1, 2, 3])] for score in scores])
    judged = {str(query): {f"t{text}": gain for text, (_, gain) in enumerate(texts)} for query, texts in enumerate(queries)}
    run = {str(query): {f"t{text}": score for text, (score, _) in enumerate(texts)} for query, texts in enumerate(queries)}
    first = {query: dict(sorted(texts.items(), key=lambda text: -text[1])[:10]) for query, texts in run.items()}
    mean = lambda of, measure: sum(scores[measure] for scores in of.values()) / len(queries)  # noqa: E731
    ndcg = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut_10"}).evaluate(run)
    mrr = pytrec_eval.RelevanceEvaluator(judged, {"recip_rank"}).evaluate(first)
    return {"queries": queries, "mrr": mean(mrr, "recip_rank"), "ndcg": mean(ndcg, "ndcg_cut_10")}
