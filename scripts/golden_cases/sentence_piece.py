"""SentencePiece goldens: a `spiece.model` alone, and the ids that transformers' `T5Tokenizer` makes of hostile texts.

`T5/spiece.model` has T5's special tokens and normalization (nmt_nfkc). `none/spiece.model` is not normalized, and has pieces that
its maker requested; its `tokenizer_config.json` says that there are no sentinels, as mT5's does.
`ids.json` of each: `texts`, and for each its `ids` without the end of the sequence.
"""

import json
import random
import tempfile

import sentencepiece
from transformers import T5Tokenizer

from .files import write_json

WORDS = (
    "the quick brown fox jumps over a lazy dog while seventeen small models learn to translate English into German "
    "Das Haus ist wunderbar und die Bäume blühen im Frühling naïve café façade Straße résumé "
    "我们 今天 学习 机器 翻译 模型 天气 很好 привет мир обучение مرحبا بالعالم 3.14 2024-03-15 100 % foo_bar() {x: 1}"
).split()

PIECES = [
    " ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u200b", "\u2028", "\ufeff", "\u0000", "\u0085", "\u001f",
    "▁", "▁▁", "</s>", "<pad>", "<unk>", "<extra_id_0>", "<extra_id_99>", "<extra_id_100>", "<s>", "[SEP]", "@user",
    "ﬁ", "①", "Å", "é", "e\u0301", "ｆｕｌｌ", "½", "ﷺ", "👩\u200d👩\u200d👧", "🇩🇪", "𝔘𝔫𝔦", "\U0010ffff", "ｶﾞ", "가", "ß", "İ",
    "a" * 300, "-" * 64, "…", "''", "``", '"', "\\n", "<", ">", "</", "0x1f", "1,234.50", "：", "，", "。", "!?",
]  # fmt: skip


def texts(count, seed):
    draw = random.Random(seed)
    made = ["", " ", "\n", "▁", "</s>", "a", " a", "a "]
    while len(made) < count:
        parts = [draw.choice(WORDS if draw.random() < 0.6 else PIECES) for _ in range(draw.randrange(1, 9))]
        made.append("".join(part + draw.choice(["", " ", " ", "  "]) for part in parts))
    return made


def train(path, **more):
    lines = texts(3000, 1)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(line.replace("\n", " ").replace("\r", " ").replace("\0", "") for line in lines))
        file.flush()
        sentencepiece.SentencePieceTrainer.train(
            input=file.name, model_prefix=str(path / "spiece"), vocab_size=300, character_coverage=0.98,
            pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2, hard_vocab_limit=False, **more,
        )  # fmt: skip
    (path / "spiece.vocab").unlink()


def write(folder):
    cases = {
        "T5": ({"normalization_rule_name": "nmt_nfkc"}, None),
        "none": (
            {"normalization_rule_name": "identity", "user_defined_symbols": ["@user", "[SEP]"]},
            {"tokenizer_class": "T5Tokenizer", "extra_ids": 0},
        ),
    }
    for name, (training, config) in cases.items():
        path = folder / name
        path.mkdir()
        train(path, **training)
        if config:
            (path / "tokenizer_config.json").write_text(json.dumps(config) + "\n")
        tokenizer = T5Tokenizer.from_pretrained(path)
        made = texts(400, 2)
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in made]
        write_json(path / "ids.json", {"tokens": len(tokenizer), "texts": made, "ids": ids})
