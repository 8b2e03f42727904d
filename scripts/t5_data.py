"""Rows of parquet files as T5 batches, by the rules of the public interface and with transformers' own tokenizer.

Text is cut in tokens, EOS is appended as an id and counts, no other special token is added. Without shuffling
step i of an epoch takes rows [i * batch_size, (i + 1) * batch_size); the last step of an epoch may be smaller.
"""

import itertools
import json
import pathlib

import pyarrow.parquet as parquet
import torch
from transformers import PreTrainedTokenizerFast


def read_pairs(files, prompt_column, response_column, bad_rows="error"):
    """All (prompt, response) pairs in file order; a bad row (null, empty) is None, to be skipped by its batch."""
    pairs = []
    for file in files:
        table = parquet.read_table(file, columns=[prompt_column, response_column])
        columns = (table[prompt_column].to_pylist(), table[response_column].to_pylist())
        for row, (prompt, response) in enumerate(zip(*columns)):
            if prompt and response:
                pairs.append((prompt, response))
            elif bad_rows == "skip":
                pairs.append(None)
            else:
                raise SystemExit(f"error: {file}: row {row} is null or empty\nhint: --bad-rows skip")
    return pairs


class Encoder:
    """Token ids of texts, cut to a number of tokens that includes EOS."""

    def __init__(self, model_directory, tokenizer_file=None):
        directory = pathlib.Path(model_directory)
        file = pathlib.Path(tokenizer_file) if tokenizer_file else directory / "tokenizer.json"
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
        self.config = json.loads((directory / "config.json").read_text())
        eos = self.config["eos_token_id"]
        self.eos = eos[0] if isinstance(eos, list) else eos
        self.pad = self.config.get("pad_token_id", 0)

    def ids(self, text, max_tokens):
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return tokens[: max_tokens - 1] + [self.eos]

    def batch(self, pairs, max_source_tokens, max_target_tokens):
        """Padded tensors for T5ForConditionalGeneration, `labels` with -100; None if every row is bad."""
        pairs = [pair for pair in pairs if pair is not None]
        if not pairs:
            return None
        sources = [self.ids(prompt, max_source_tokens) for prompt, _ in pairs]
        targets = [self.ids(response, max_target_tokens) for _, response in pairs]
        return {
            "input_ids": padded(sources, self.pad),
            "attention_mask": padded([[1] * len(source) for source in sources], 0),
            "labels": padded(targets, -100),
        }


def padded(rows, value):
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def in_order(pairs, batch_size, steps):
    """The unshuffled batches of `steps` steps, epoch after epoch."""
    starts = itertools.cycle(range(0, len(pairs), batch_size))
    for start in itertools.islice(starts, steps):
        yield pairs[start : start + batch_size]
