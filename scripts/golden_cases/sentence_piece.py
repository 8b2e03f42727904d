"""SentencePiece goldens: a `spiece.model` alone, and the ids that transformers' `T5Tokenizer` makes of hostile texts.

`T5/spiece.model` has T5's special tokens and normalization (nmt_nfkc). The others have settings that T5 has not, and the ids of the
SentencePiece library: `none/spiece.model` is not normalized, and has pieces that its maker requested; `bytes` writes unknown
characters in bytes; `blanks` keeps blanks, and puts none before a text. Their `tokenizer_config.json` says that there are no
sentinels, as mT5's does. `ids.json` of each: `texts`, and for each its `ids` without the end of the sequence.
"""

import json
import random
import unicodedata
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
            input=file.name, model_prefix=str(path / "spiece"), vocab_size=more.pop("vocab_size", 300),
            character_coverage=0.98, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2, hard_vocab_limit=False, **more,
        )  # fmt: skip
    (path / "spiece.vocab").unlink()


NO_SENTINELS = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}

# Decomposed texts, as macOS writes names.
DECOMPOSED = [unicodedata.normalize("NFD", text) for text in ["가 나다 각", "naïve café façade", "ｶﾞ が ぱ", "Việt Nam", "Ελλάδα"]]


def write(folder):
    cases = {
        "T5": ({"normalization_rule_name": "nmt_nfkc"}, None),
        "none": (
            {"normalization_rule_name": "identity", "user_defined_symbols": ["@user", "[SEP]"]},
            NO_SENTINELS,
        ),
        "bytes": ({"normalization_rule_name": "identity", "byte_fallback": True, "vocab_size": 500}, NO_SENTINELS),
        "blanks": (
            {"normalization_rule_name": "nmt_nfkc", "add_dummy_prefix": False, "remove_extra_whitespaces": False},
            NO_SENTINELS,
        ),
    }
    for name, (training, config) in cases.items():
        path = folder / name
        path.mkdir()
        train(path, **training)
        if config:
            (path / "tokenizer_config.json").write_text(json.dumps(config) + "\n")
        made = texts(400, 2)
        library = sentencepiece.SentencePieceProcessor(model_file=str(path / "spiece.model"))
        if config:
            # The names of control tokens are tokens in a text here, as in transformers, but not for the library. A run of one letter
            # has many paths with the same sum. The tokenizers crate strips no ▁, and takes a line break of two characters for one.
            named = ["</s>", "<pad>", "<unk>", "\0", "a" * 300, "▁", "\r\n"]
            made = [text for text in made + DECOMPOSED if not any(name in text for name in named)]
            ids, tokens = [library.encode(text) for text in made], library.get_piece_size()
        else:
            tokenizer = T5Tokenizer.from_pretrained(path)
            ids, tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in made], len(tokenizer)
            made += DECOMPOSED
            ids += [library.encode(text) for text in DECOMPOSED]
        write_json(path / "ids.json", {"tokens": tokens, "texts": made, "ids": ids})
