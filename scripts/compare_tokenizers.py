#!/usr/bin/env python3
"""Compare token ids with transformers' on random hostile texts, for model directories as publishers ship them.

    python scripts/compare_tokenizers.py --tool target/release/examples/token_ids --count 10000 [DIRECTORY...]

`cargo build --release --example token_ids -p dataloader` makes the tool. Without directories the script makes one of each kind
with small vocabularies of its own: `spiece.model` alone (T5, mT5, UMT5), the same with the files of a slow tokenizer,
`vocab.json` with `merges.txt` (CodeT5), ByT5 without a file, and the `tokenizer.json` that transformers makes of each.
The reference is `AutoTokenizer`: the Python tokenizer for ByT5, and the tokenizers library for all others.
Ids are compared without special tokens, and the ids before the text separately. Decoded texts are compared, too.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

from golden_cases.sentence_piece import texts
from golden_cases.tokenizers import MAKERS, reference


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="*", type=pathlib.Path, metavar="DIRECTORY")
    parser.add_argument("--tool", required=True, help="the example `token_ids`")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    made = hostile_texts(arguments.count, arguments.seed)
    with tempfile.TemporaryDirectory() as scratch:
        directories = arguments.directories or make_all(pathlib.Path(scratch))
        results = [compare(directory, made, arguments.tool) for directory in directories]
    sys.exit(0 if all(results) else 1)


def make_all(scratch):
    directories = []
    for name, make in MAKERS.items():
        folder = scratch / name
        folder.mkdir()
        make(folder)
        again = scratch / f"{name}-saved"
        reference(folder).save_pretrained(again)
        (again / "config.json").write_text((folder / "config.json").read_text())
        directories += [folder, again]
    return directories


def hostile_texts(count, seed):
    """Half are words and traps, half are any characters."""
    draw = random.Random(seed)
    made = texts(count // 2, seed)
    alphabets = [(0x20, 0x7E), (0, 0x2F), (0xA0, 0x17F), (0x300, 0x36F), (0x2000, 0x206F), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF), (0xFE00, 0xFFFD), (0, 0x10FFFF)]
    while len(made) < count:
        low, high = draw.choice(alphabets)
        letters = (draw.randint(low, high) for _ in range(draw.randrange(0, 60)))
        made.append("".join(chr(letter) for letter in letters if not 0xD800 <= letter <= 0xDFFF))
    return made


def compare(directory, made, tool):
    tokenizer = reference(directory)
    lines = "".join(json.dumps(text) + "\n" for text in made)
    output = subprocess.run([tool, directory], input=lines, capture_output=True, text=True)
    if output.returncode != 0:
        print(f"{directory.name}: {output.stderr.strip()}")
        return False
    different = {"ids": 0, "start": 0, "text": 0}
    for text, line in zip(made, output.stdout.split("\n"), strict=False):
        ours = json.loads(line)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer(text)["input_ids"]
        start = whole[: len(whole) - len(ids) - 1] if len(whole) > len(ids) + 1 else []
        back = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        found = {"ids": ours["ids"] != ids, "start": ours["start"] != start, "text": ours["text"] != back}
        for key, differs in found.items():
            if differs and different[key] < 3:
                theirs = {"ids": ids, "start": start, "text": back}[key]
                print(f"{directory.name}: {key} of {text!r}: {ours[key]!r}, transformers {theirs!r}")
            different[key] += differs
    kind = type(tokenizer).__name__
    print(f"{directory.name} ({kind}, {len(tokenizer)} tokens): {len(made)} texts, differences {different}")
    return not any(different.values())


if __name__ == "__main__":
    main()
