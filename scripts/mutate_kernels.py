#!/usr/bin/env python3
"""Changes the kernels in every small way that a table names, one at a time, and counts the changes that their tests do not notice.

    python3 scripts/mutate_kernels.py [--only FILES] [--share SHARE] [--jobs N] [--target DIRECTORY]

Needs Python, g++ and cargo, and no card: the kernels run over the emulation. A changed source becomes a library. The kernels' tests load it in
place of their own kernels of these names. Prints each change that was not noticed, then a table in Markdown. Many of them change nothing
that a test can notice: a tuning parameter, a second write of the same value, a path that computes the same more slowly. A person reads the rest.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

from planted_bugs import KERNELS, copied

CRATE = "crates/cuda-kernels"
SECONDS = 60  # of the tests of one change; a loop without an end is noticed, too
COMPILER = ["g++", "-x", "c++", "-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-fno-gnu-unique", "-Wl,-Bsymbolic"]

# The tests of each source.
TESTS = {
    "attention.cu": "attention", "attention_backward.cu": "attention", "attention_forward.cu": "attention", "cross_entropy.cu": "cross_entropy",
    "decoding.cu": "decoding", "dequantise.cu": "dequantise", "dropout.cu": "dropout", "elementwise.cu": "candle", "small_m.cu": "small_m",
    "indexing.cu": "candle::indexing", "norm.cu": "norm", "optimizer.cu": "optimizer", "reduce.cu": "candle::reduce", "rows.cu": "rows",
}
# Patterns and what takes their place. None: the number plus one.
CHANGES = [
    (r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "), (r" == ", " != "), (r" != ", " == "),
    (r" \+ ", " - "), (r" - ", " + "), (r" \* ", " + "), (r" / ", " * "), (r" % ", " / "),
    (r" \+= ", " = "), (r" \+= ", " -= "), (r"\bmax\(", "min("), (r"\bmin\(", "max("),
    (r" && ", " || "), (r" \|\| ", " && "), (r"!(?=[a-z])", ""),
    (r" >> ", " << "), (r" << ", " >> "), (r" & ", " | "), (r" \| ", " & "), (r" \^ ", " | "),
    (r"(?<![\w.])(0|1|2|4|8|16|32)(?![\w.])", None), (r"(?<![\w.])0\.0f", "1.0f"), (r"(?<![\w.])1\.0f", "1.01f"),
    (r"\b(WARP_)?BARRIER\(\);", ";"), (r"\bwait_for_copies<\d>\(\);", ";"),
    (r"\bif \([^;{}]*\) (return|continue|break);", ""), (r"\bif \((?!c)", "if (true || "), (r"\bif \((?!c)", "if (false && "),
]

Change = collections.namedtuple("Change", "name line old new shown text")


def changes(path):
    """Each change of a source: what it replaces, and the whole changed text."""
    text, start = path.read_text(), 0
    for number, line in enumerate(text.split("\n"), 1):
        code = line.split("//")[0]
        if not code.strip().startswith(("#include", "#pragma", "template", "static_assert", "using")):
            for pattern, new in CHANGES:
                for found in re.finditer(pattern, code):
                    instead = str(int(found[0]) + 1) if new is None else new
                    changed = text[:start + found.start()] + instead + text[start + found.end():]
                    yield Change(path.name, number, found[0].strip(), instead.strip(), line.strip(), changed)
        start += len(line) + 1


def users(kernels, name):
    """The sources that a file is a part of."""
    def included(of):
        return {of}.union(*(included(inner) for inner in re.findall(r'#include "(\w+\.h)"', (kernels / of).read_text()) if (kernels / inner).is_file()))
    return [source for source in TESTS if name in included(source)]


def fate(copy, program, change):
    """Whether a change was noticed: "noticed", "not noticed", or "does not compile"."""
    with tempfile.TemporaryDirectory() as directory:
        kernels, library = pathlib.Path(directory) / "kernels", pathlib.Path(directory) / "changed.so"
        shutil.copytree(copy / KERNELS, kernels)
        (kernels.parent / "emulation").symlink_to(copy / CRATE / "emulation")
        (kernels / change.name).write_text(change.text)
        for source in users(copy / KERNELS, change.name):
            build = subprocess.run([*COMPILER, f"-I{copy / CRATE / 'emulation'}", kernels / source, "-o", library], capture_output=True)
            if build.returncode != 0:
                return "does not compile"
            variables = {**os.environ, "LOW_MEM_T5_CHANGED_KERNELS": str(library)}
            try:
                passes = subprocess.run([program, TESTS[source]], env=variables, capture_output=True, timeout=SECONDS).returncode == 0
            except subprocess.TimeoutExpired:
                passes = False
            if not passes:
                return "noticed"
    return "not noticed"


def built(copy, target):
    """The program of the kernels' tests, which lets a library use its functions."""
    command = ["cargo", "test", "--release", "--locked", "-p", "cuda-kernels", "--test", "kernels", "--no-run", "--message-format=json"]
    variables = {**os.environ, "CXXFLAGS": "-O1", "RUSTFLAGS": "-C link-args=-rdynamic"}
    build = subprocess.run([*command, "--target-dir", target], cwd=copy, env=variables, stdout=subprocess.PIPE, text=True)
    artefacts = [json.loads(line) for line in build.stdout.splitlines()] if build.returncode == 0 else []
    programs = [artefact["executable"] for artefact in artefacts if artefact.get("executable") and artefact["target"]["name"] == "kernels"]
    if not programs or subprocess.run([programs[0]], capture_output=True).returncode != 0:
        sys.exit("the kernels' tests do not build, or fail without a change")
    return programs[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="files, separated by commas")
    parser.add_argument("--share", type=float, default=1.0, help="the share of the changes that is tried, chosen at random")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--target", default="target/mutants", help="where cargo builds")
    options = parser.parse_args()
    target = pathlib.Path(options.target).resolve()
    with tempfile.TemporaryDirectory() as directory:
        copy = pathlib.Path(directory)
        copied(copy)
        program = built(copy, target)
        names = options.only.split(",") if options.only else sorted(path.name for path in (copy / KERNELS).iterdir())
        chosen = random.Random(1)
        tried = [change for name in names for change in changes(copy / KERNELS / name) if chosen.random() < options.share]
        print(f"{len(tried)} changes", file=sys.stderr)
        fates = collections.Counter()
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for change, of in zip(tried, pool.map(lambda change: fate(copy, program, change), tried)):
                fates[change.name, of] += 1
                if of == "not noticed":
                    print(f"{change.name}:{change.line}: `{change.old}` becomes `{change.new}` in `{change.shown}`", flush=True)
    print("\n| file | changes | do not compile | noticed | not noticed |\n| --- | --- | --- | --- | --- |")
    for name in names:
        counts = [fates[name, of] for of in ("does not compile", "noticed", "not noticed")]
        print(f"| `{name}` | {sum(counts)} | " + " | ".join(map(str, counts)) + " |")


if __name__ == "__main__":
    main()
