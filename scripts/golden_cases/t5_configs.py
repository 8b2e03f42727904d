"""T5 config.json texts as the hub, transformers 4 and transformers 5 write them, and the values that transformers reads in them.

`expected.json` maps each file to the values that `T5Config.from_pretrained` of this version resolves.
"""

import json

from transformers import T5Config

from .files import write_json

SUMMARIZATION = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "max_length": 200,
    "min_length": 30,
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "prefix": "summarize: ",
}
TRANSLATION = {"early_stopping": True, "max_length": 300, "num_beams": 4, "prefix": "translate English to German: "}

# The first T5 on the hub: few keys, generation settings inside, no key about tying.
HUB_T5_SMALL = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 8,
    "num_layers": 6,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "task_specific_params": {"summarization": SUMMARIZATION, "translation_en_to_de": TRANSLATION},
    "vocab_size": 32128,
}

HUB_V1_1_SMALL = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 1024,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "num_decoder_layers": 8,
    "num_heads": 6,
    "num_layers": 8,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "vocab_size": 32128,
}

# transformers 4 after `save_pretrained`: derived keys, torch_dtype, a version.
WRITTEN_BY_4 = {
    "classifier_dropout": 0.0,
    "dense_act_fn": "gelu_new",
    "is_gated_act": True,
    "relative_attention_max_distance": 128,
    "torch_dtype": "float32",
    "transformers_version": "4.57.1",
    "use_cache": True,
}

V4_FLAN_SMALL = (
    HUB_V1_1_SMALL | WRITTEN_BY_4 | {"n_positions": 512, "task_specific_params": {"summarization": SUMMARIZATION}}
)

V4_T5_SMALL = (
    HUB_T5_SMALL
    | WRITTEN_BY_4
    | {
        "_name_or_path": "t5-small",
        "dense_act_fn": "relu",
        "feed_forward_proj": "relu",
        "is_gated_act": False,
        "num_decoder_layers": 6,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
)

HUB_MT5_SMALL = HUB_V1_1_SMALL | {
    "_name_or_path": "google/mt5-small",
    "architectures": ["MT5ForConditionalGeneration"],
    "model_type": "mt5",
    "tokenizer_class": "T5Tokenizer",
    "vocab_size": 250112,
}

RAW = {
    "hub_t5_small.json": HUB_T5_SMALL,
    "hub_t5_v1_1_small.json": HUB_V1_1_SMALL,
    "hub_mt5_small.json": HUB_MT5_SMALL,
    "v4_t5_small.json": V4_T5_SMALL,
    "v4_flan_t5_small.json": V4_FLAN_SMALL,
    # Unusual but legal: private keys beside transformers' own, null where it is allowed, different depths.
    "v4_unusual.json": V4_FLAN_SMALL
    | {
        "num_decoder_layers": None,
        "feed_forward_proj": "gated-silu",
        "dense_act_fn": "silu",
        "d_kv": 48,
        "dropout_rate": 0,
        "decoder_start_token_id": 5,
        "eos_token_id": [1, 7],
        "x_of_our_own": {"kept": True},
    },
}

RESOLVED_KEYS = [
    "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads",
    "relative_attention_num_buckets", "relative_attention_max_distance", "dropout_rate", "layer_norm_epsilon",
    "initializer_factor", "feed_forward_proj", "dense_act_fn", "is_gated_act", "scale_decoder_outputs",
    "pad_token_id", "eos_token_id", "decoder_start_token_id",
]  # fmt: skip


def write(folder):
    for name, config in RAW.items():
        (folder / name).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name in ("hub_t5_small.json", "hub_t5_v1_1_small.json"):
        config = T5Config.from_json_file(folder / name)
        (folder / name.replace("hub_", "v5_")).write_text(config.to_json_string(use_diff=False))
    expected = {path.name: resolved(path) for path in sorted(folder.glob("*.json"))}
    write_json(folder / "expected.json", expected)


def resolved(path):
    config = T5Config.from_dict(json.loads(path.read_text()))
    return {key: getattr(config, key, None) for key in RESOLVED_KEYS}
