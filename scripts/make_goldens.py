#!/usr/bin/env python3
"""Writes the golden files for the Rust tests.

    python scripts/make_goldens.py                 # everything, into crates/*/tests/goldens
    python scripts/make_goldens.py t5 bleu         # only these groups
    python scripts/make_goldens.py --check         # write nothing: recompute and report the differences

Groups: t5 (models, batches, logits, gradients), families (the same for each family, as it is published), gemma (T5Gemma and T5Gemma 2;
needs transformers 5.24), adapters (LoRA by
PEFT: fifty steps, directories, merged weights), generation
(greedy, beams, processors), encoders (vectors, eight steps of classifiers, adapters and contrastive losses),
configs (config.json texts), adafactor, adamw, adamw8bit (needs bitsandbytes), train
(twelve whole steps), recipes (losses and optimizers together), schedules, bleu, metrics
(chrF, ROUGE, labels, stems), labels (spans, correlations; needs seqeval), ranking (needs pytrec_eval-terrier),
list-losses (eight steps of monoT5 and RankT5),
quantised (int8 and NF4 weights; needs bitsandbytes), t5gemma-operations, sentence-piece, tokenizers.
Everything is seeded and runs on one CPU thread. The script asserts the versions, because other versions compute other
goldens. `scripts/README.md` describes the environment and the content of each file.
"""

import argparse
import importlib
import pathlib
import shutil
import sys
import tempfile

VERSIONS = {
    "torch": "2.15",
    "transformers": ("5.23", "5.24"),
    "peft": "0.21",
    "sacrebleu": "2.6",
    "safetensors": "0.8",
    "sklearn": "1.9",
    "nltk": "3.10",
}
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

# group -> (module under golden_cases, folder that the group owns)
GROUPS = {
    "t5": ("t5_models", "crates/t5/tests/goldens/models"),
    "families": ("families", "crates/t5/tests/goldens/families"),
    "gemma": ("gemma", "crates/t5/tests/goldens/gemma"),
    "generation": ("generation", "crates/t5/tests/goldens/generation"),
    "configs": ("t5_configs", "crates/t5/tests/goldens/configs"),
    "adafactor": ("adafactor", "crates/trainer/tests/goldens/adafactor"),
    "adapters": ("adapters", "crates/t5/tests/goldens/adapters"),
    "encoders": ("encoders", "crates/trainer/tests/goldens/encoders"),
    "adamw": ("adamw", "crates/trainer/tests/goldens/adamw"),
    "adamw8bit": ("adamw8bit", "crates/trainer/tests/goldens/adamw8bit"),
    "recipes": ("recipes", "crates/trainer/tests/goldens/recipes"),
    "train": ("training", "crates/trainer/tests/goldens/train"),
    "schedules": ("schedules", "crates/trainer/tests/goldens/schedules"),
    "tokenizers": ("tokenizers", "crates/dataloader/tests/goldens/tokenizers"),
    "bleu": ("bleu", "crates/text-metrics/tests/goldens/bleu"),
    "metrics": ("text_metrics", "crates/text-metrics/tests/goldens/metrics"),
    "labels": ("label_metrics", "crates/text-metrics/tests/goldens/labels"),
    "list-losses": ("list_losses", "crates/trainer/tests/goldens/ranking"),
    "ranking": ("ranking", "crates/text-metrics/tests/goldens/ranking"),
    "quantised": ("quantised", "crates/t5-ops/tests/goldens/quantised"),
    "t5gemma-operations": ("t5gemma_operations", "crates/t5-ops/tests/goldens/t5gemma"),
    "sentence-piece": ("sentence_piece", "crates/dataloader/tests/goldens/sentence_piece"),
}


def assert_versions():
    for package, expected in VERSIONS.items():
        found = importlib.import_module(package).__version__
        versions = expected if isinstance(expected, tuple) else (expected,)
        if not any(found.startswith(version + ".") for version in versions):
            sys.exit(
                f"error: {package}: expected {expected}.*, got {found}\n"
                "hint: scripts/README.md lists the commands that make the environment"
            )


def write_group(name, folder):
    """Runs one group into an empty `folder`."""
    module = importlib.import_module(f"golden_cases.{GROUPS[name][0]}")
    module.write(folder)


def replace(name):
    folder = REPOSITORY / GROUPS[name][1]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_group(name, folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{name}: {size / 1024:.0f} KiB in {folder.relative_to(REPOSITORY)}")


def check(name):
    """Recomputes a group beside the committed one; returns whether they agree byte for byte or nearly."""
    from golden_cases.compare import differences

    committed = REPOSITORY / GROUPS[name][1]
    with tempfile.TemporaryDirectory() as scratch:
        fresh = pathlib.Path(scratch)
        write_group(name, fresh)
        found = list(differences(committed, fresh))
    for line in found:
        print(f"{name}: {line}")
    print(f"{name}: {'differs' if found else 'as committed'}")
    return not found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of: {', '.join(GROUPS)}; default: all")
    parser.add_argument("--check", action="store_true", help="compare with the committed files, write nothing")
    arguments = parser.parse_args()
    unknown = set(arguments.groups) - set(GROUPS)
    if unknown:
        parser.error(f"unknown group {', '.join(sorted(unknown))}; expected some of: {', '.join(GROUPS)}")
    assert_versions()

    import torch
    import transformers

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    names = arguments.groups or list(GROUPS)
    if arguments.check:
        sys.exit(0 if all([check(name) for name in names]) else 1)
    for name in names:
        replace(name)


if __name__ == "__main__":
    main()
