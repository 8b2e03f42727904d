"""Tokenizers as publishers ship them, with small vocabularies: directories with a `config.json` and the tokenizer's files."""

import json

from tokenizers import ByteLevelBPETokenizer

from .files import write_json
from .sentence_piece import texts, train

T5_TOKENS = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def write_file(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def reference(directory):
    """The tokenizer of transformers."""
    from transformers import AutoTokenizer, T5Tokenizer

    try:
        return AutoTokenizer.from_pretrained(directory)
    except ValueError:
        # For UMT5 transformers 5.23 does not look for a `spiece.model`, which T5's tokenizer reads.
        return T5Tokenizer.from_pretrained(directory)


def spiece(model_type, pieces_only, sentinels=100, **files):
    def make(folder):
        train(folder, normalization_rule_name="nmt_nfkc")
        rows = len(piece_names(folder)) + (0 if pieces_only else sentinels) + 12
        write_file(folder / "config.json", {"model_type": model_type, "vocab_size": rows, "d_model": 64})
        for name, content in files.items():
            write_file(folder / f"{name}.json", content)

    return make


def piece_names(folder):
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    return [model.id_to_piece(number) for number in range(len(model))]


def slow_t5(folder):
    """The files that transformers 4 saves for a slow tokenizer: the list of tokens is in `tokenizer_config.json`."""
    spiece("t5", pieces_only=False)(folder)
    first = len(piece_names(folder))
    named = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    listed = {str(number): {"content": name} | named for number, name in enumerate(("<pad>", "</s>", "<unk>"))}
    stripping = named | {"lstrip": True, "rstrip": True}
    for number in range(100):
        listed[str(first + 99 - number)] = {"content": f"<extra_id_{number}>"} | stripping
    sentinels = [f"<extra_id_{number}>" for number in range(100)]
    config = T5_TOKENS | {
        "added_tokens_decoder": listed, "additional_special_tokens": sentinels, "extra_ids": 100, "legacy": True,
        "model_max_length": 512, "sp_model_kwargs": {}, "tokenizer_class": "T5Tokenizer",
    }  # fmt: skip
    write_file(folder / "tokenizer_config.json", config)
    write_file(folder / "added_tokens.json", {f"<extra_id_{number}>": first + 99 - number for number in range(100)})
    write_file(folder / "special_tokens_map.json", T5_TOKENS | {"additional_special_tokens": sentinels})


def code_t5(folder):
    tokenizer = ByteLevelBPETokenizer()
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator(texts(3000, 1), vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.save_model(str(folder))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "cls_token": "<s>"}
    tokens = {role: {"content": name} | plain for role, name in tokens.items()} | {"pad_token": "<pad>"}
    tokens["mask_token"] = {"content": "<mask>"} | plain | {"lstrip": True}
    sentinels = [f"<extra_id_{number}>" for number in range(99, -1, -1)]
    typed = {role: token | {"__type": "AddedToken"} if isinstance(token, dict) else token for role, token in tokens.items()}
    config = typed | {
        "add_prefix_space": False, "errors": "replace", "trim_offsets": True, "model_max_length": 512,
        "additional_special_tokens": sentinels, "tokenizer_class": "RobertaTokenizer",
    }  # fmt: skip
    write_file(folder / "tokenizer_config.json", config)
    write_file(folder / "special_tokens_map.json", tokens | {"additional_special_tokens": sentinels})
    first = len(json.loads((folder / "vocab.json").read_text()))
    write_file(folder / "added_tokens.json", {name: first + index for index, name in enumerate(sentinels)})
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}
    write_file(folder / "config.json", {"model_type": "t5", "vocab_size": first + 100, "d_model": 64} | ids)


def chatlm(folder):
    """charent/ChatLM-mini-Chinese: byte pairs in a `tokenizer.json`, tokens in square brackets, no template."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    special = [f"[{name}]" for name in ("PAD", "EOS", "SEP", "BOS", "CLS", "MASK", "UNK")]
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.NFKC()
    digits = pre_tokenizers.Digits(individual_digits=True)
    parts = [pre_tokenizers.Punctuation(), digits, pre_tokenizers.Metaspace()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts(3000, 1), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]", "bos_token": "[BOS]"}
    write_file(folder / "special_tokens_map.json", roles)
    config = roles | {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    write_file(folder / "tokenizer_config.json", config)
    write_file(folder / "config.json", {"model_type": "t5", "vocab_size": tokenizer.get_vocab_size(), "d_model": 64})


def byt5(folder):
    write_file(folder / "config.json", {"model_type": "t5", "vocab_size": 384, "d_model": 64, "tokenizer_class": "ByT5Tokenizer"})


def byt5_hub(folder):
    """google/byt5-small: tokens with settings, which strip nothing."""
    byt5(folder)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    tokens = {role: {"content": name} | plain for role, name in T5_TOKENS.items()}
    sentinels = [f"<extra_id_{number}>" for number in range(125)]
    typed = {role: token | {"__type": "AddedToken"} for role, token in tokens.items()}
    config = typed | {"extra_ids": 125, "additional_special_tokens": sentinels, "tokenizer_class": "ByT5Tokenizer"}
    write_file(folder / "tokenizer_config.json", config)
    write_file(folder / "special_tokens_map.json", tokens | {"additional_special_tokens": sentinels})


def with_more(folder):
    """Added tokens, in the files of version 4. They have a role of their own, and none of the sentinels is named."""
    spiece("t5", pieces_only=False)(folder)
    first = len(piece_names(folder)) + 100
    write_file(folder / "added_tokens.json", {"<sep>": first, "quick": first + 1, "<end of turn>": first + 2})
    write_file(folder / "special_tokens_map.json", T5_TOKENS | {"bos_token": "<sep>"})
    write_file(folder / "tokenizer_config.json", {"additional_special_tokens": ["<end of turn>", "[SEP]"]})


MT5_CONFIG = T5_TOKENS | {"extra_ids": 0, "additional_special_tokens": None, "tokenizer_class": "T5Tokenizer"}

MAKERS = {
    "t5-spiece-alone": spiece("t5", pieces_only=False),
    "t5-slow": slow_t5,
    "mt5": spiece("mt5", pieces_only=True, tokenizer_config=MT5_CONFIG, special_tokens_map=T5_TOKENS),
    "umt5": spiece("umt5", pieces_only=False, sentinels=300, tokenizer_config=MT5_CONFIG | {"extra_ids": 300}),
    "t5-more": with_more,
    "codet5": code_t5,
    "chatlm": chatlm,
    "byt5": byt5,
    "byt5-hub": byt5_hub,
}

# Kinds whose ids are kept as goldens; `sentence_piece.py` has the kinds with `spiece.model` alone.
KEPT = ("t5-slow", "codet5", "byt5", "byt5-hub")


def write(folder):
    for name in KEPT:
        path = folder / name
        path.mkdir()
        MAKERS[name](path)
        tokenizer = reference(path)
        made = texts(300, 2)
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in made]
        start = [token for token in tokenizer("a")["input_ids"] if token == tokenizer.bos_token_id][:1]
        write_json(path / "ids.json", {"tokens": len(tokenizer), "start": start, "texts": made, "ids": ids})
