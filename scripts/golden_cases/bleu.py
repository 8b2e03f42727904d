"""Corpus BLEU goldens from sacreBLEU: `bleu.json` holds corpora and, for each tokenizer, sacreBLEU's results.

Each case: {name, hypotheses, references (one per hypothesis), scores: {TOKENIZER: {score, precisions, counts,
totals, brevity_penalty, hypothesis_length, reference_length, signature, tokenized}}}; `score` and `precisions`
are percentages. `tokenized` is the tokenizer's own output for hypotheses and references, to find where two
implementations differ.
"""

import sacrebleu

from .files import write_json

TOKENIZERS = ["13a", "zh", "char", "none"]

CASES = {
    "english": (
        ["The cat sat on the mat.", "It is raining; take an umbrella!", "He bought 3 apples and 2 pears."],
        ["The cat is sitting on the mat.", "It's raining, take your umbrella!", "He bought three apples and 2 pears."],
    ),
    "identical": (
        ["one two three four five", "a quick brown fox jumps over the lazy dog ."],
        ["one two three four five", "a quick brown fox jumps over the lazy dog ."],
    ),
    "nothing_in_common": (["alpha beta gamma delta epsilon"], ["one two three four five"]),
    "no_four_gram_match": (["the cat the dog the bird the cow"], ["the cat and a dog saw the bird near one cow"]),
    "shorter_than_four_tokens": (["yes", "no way"], ["yes", "no way"]),
    "empty_hypothesis": (["", "the house is small"], ["the garden is large", "the house is small"]),
    "all_hypotheses_empty": (["", "  "], ["the garden is large", "the house is small"]),
    "empty_reference": (["the house is small"], [""]),
    "brevity_penalty": (
        ["the house is small", "we went home early"],
        ["the house is small and it stands on a hill", "we went home early because it was getting dark"],
    ),
    "longer_than_the_reference": (
        ["the house is small and it stands on a hill far away"],
        ["the house is small and it stands"],
    ),
    "repeated_words_are_clipped": (["the the the the the the the"], ["the cat is on the mat near the door"]),
    "case_counts": (["The House Is Small Today"], ["the house is small today"]),
    "punctuation": (
        ['"Well," she said - (quietly) - "what now?!" ...', "a/b, c\\d; e_f: g@h #i $5 %6 &7 *8 +9 =0 <x> [y] {z} ^ ~ `q` |"],
        ['"Well", she said (quietly), "what now?"...', "a/b c\\d; e_f g@h; #i $5 %6 &7 *8 +9 =0 <x> [y] {z} ^ ~ `q` |"],
    ),
    "numbers": (
        ["It cost 1,000.5 dollars in 1999, not 12.", "From 3-5 to 10:30, about .5 or 5. of -7, 1.2.3 and 4,5,6"],
        ["It cost 1,000.5 dollars in 1999; not 12", "From 3-5 to 10:30 about .5 or 5 of -7; 1.2.3 and 4,5,6"],
    ),
    "entities": (
        ["Tom &amp; Jerry said &quot;hi&quot; to &lt;b&gt; them &apos;all&apos;", "<skipped> a line here today <skipped>"],
        ['Tom & Jerry said "hi" to <b> them \'all\'', "a line <skipped>here today"],
    ),
    "whitespace": (
        ["  tabs\tand   many    spaces \u00a0here now ", "line\nbreak and hy-\nphen breaks\r\ntoo"],
        ["tabs and many spaces here now", "line break and hyphen breaks too"],
    ),
    "chinese": (
        ["今天天气很好，我们去公园散步吧。", "他买了三个苹果和两本书。"],
        ["今天天气真好，我们一起去公园散步吧！", "他买了三个苹果和二本书。"],
    ),
    "mixed_chinese_and_english": (
        ["我用Python3.11写了一个T5模型，共1,234行代码(v2.0)。", "GPU显存只有8GB，batch size是16。"],
        ["我用 Python 3.11 写了一个 T5 模型，共 1,234 行代码（v2.0）。", "GPU显存只有8 GB，batch_size为16。"],
    ),
    "full_width": (
        ["ＡＢＣ　１２３，《红楼梦》第十二回：“你好”——他说……", "℃ ① 〇 、。「引号」【括号】￥１００"],
        ["ABC 123，《红楼梦》第12回：“你好！”——他说……", "℃ ① 零 、。『引号』【括号】￥100"],
    ),
    "other_scripts": (
        ["Привет, мир! 日本語のテスト 한국어 시험 ελληνικά", "emoji 👍🏽 and 𠀀𠀁 rare 㐀 ideographs ⼀ ㄅ ㍿ ゟ"],
        ["Привет мир! 日本語テスト 한국어 시험 ελληνικά.", "emoji 👍 and 𠀀𠀂 rare 㐀 ideograph ⼀ ㄅ ㍿ ゟ"],
    ),
    "many_sentences": (
        [f"sentence number {n} has {n % 7} words and {n * n} letters in it" for n in range(40)],
        [f"sentence {n} has {n % 5} words and {n * n} letters in all" for n in range(40)],
    ),
}


def write(folder):
    goldens = []
    for name, (hypotheses, references) in CASES.items():
        scores = {tokenizer: score(hypotheses, references, tokenizer) for tokenizer in TOKENIZERS}
        goldens.append({"name": name, "hypotheses": hypotheses, "references": references, "scores": scores})
    write_json(folder / "bleu.json", goldens)


def score(hypotheses, references, tokenizer):
    metric = sacrebleu.BLEU(tokenize=tokenizer)
    result = metric.corpus_score(hypotheses, [references])
    return {
        "score": result.score,
        "precisions": result.precisions,
        "counts": result.counts,
        "totals": result.totals,
        "brevity_penalty": result.bp,
        "hypothesis_length": result.sys_len,
        "reference_length": result.ref_len,
        "signature": str(metric.get_signature()),
        "tokenized": {
            "hypotheses": [metric.tokenizer(text.rstrip()) for text in hypotheses],
            "references": [metric.tokenizer(text.rstrip()) for text in references],
        },
    }
