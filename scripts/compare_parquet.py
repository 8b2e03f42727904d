#!/usr/bin/env python3
"""Rows per second and peak memory of parquet readers: pyarrow, datasets, and the parquet-dataset crate.

    python scripts/compare_parquet.py --make 1000000 --file million.parquet --from train.parquet   # the file
    python scripts/compare_parquet.py --file million.parquet --rounds 2 --seconds 5 \
        --bench "target/release/examples/million_rows {file} shuffled" \
        --bench "target/release/examples/million_rows {file} ultra"

--make writes N rows in one row group with pyarrow's defaults: the rows of --from (columns prompt and response;
without it made-up text), each rotated at a random place and numbered, so that they do not compress away.
--bench is a command with {file} in it. It prints the line of parquet-dataset's example `million_rows`, or a
line of JSON with `name`, `rows_per_second`, `peak_rss_bytes` and, if known, `base_rss_bytes` and `open_ms`.
Every reader runs in a process of its own, in turn, --rounds times; the table holds medians and largest peaks.
Python readers are stopped after --seconds; the rate counts the rows until then.
"""

import argparse
import itertools
import json
import pathlib
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

import measured_machine

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
COLUMNS = ["prompt", "response"]

# The output of the example `million_rows`.
MILLION_ROWS = re.compile(
    r"^(?P<mode>\S+): opened in (?P<opened>[\d.]+) ms; .*: (?P<rate>[\d.]+) rows/s; "
    r"peak (?P<above>[\d.]+) MiB above (?P<base>[\d.]+) MiB"
)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=pathlib.Path, required=True)
    parser.add_argument("--make", type=int, metavar="ROWS", help="write --file and end")
    parser.add_argument("--from", dest="source", type=pathlib.Path, help="real rows to make the file of")
    parser.add_argument("--bench", action="append", default=[], metavar="COMMAND", help="repeatable")
    parser.add_argument("--readers", nargs="+", default=list(READERS), choices=list(READERS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--worker", choices=list(READERS), help=argparse.SUPPRESS)
    return parser.parse_args()


def make_file(options):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rng = random.Random(1)
    if options.source:
        table = parquet.read_table(options.source, columns=COLUMNS)
        texts = {name: table[name].to_pylist() for name in COLUMNS}
    else:
        letters = "abcdefghijklmnopqrstuvwxyz今天气很好"
        words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(5000)]
        texts = {name: [" ".join(rng.choices(words, k=rng.randint(5, 60))) for _ in range(3000)] for name in COLUMNS}

    def column(rows):
        for row in range(options.make):
            text = rows[row % len(rows)]
            cut = rng.randrange(len(text) + 1)
            yield f"{row}:{text[cut:]}{text[:cut]}"

    parquet.write_table(pa.table({name: list(column(texts[name])) for name in COLUMNS}), options.file)
    metadata = parquet.ParquetFile(options.file).metadata
    size = options.file.stat().st_size / 1e6
    print(f"{options.file.name}: {metadata.num_rows} rows, {metadata.num_row_groups} row groups, {size:.0f} MB")


# Each reader takes (file, seconds to read for), and returns (rows read, seconds of reading, seconds before that).


def pyarrow_table(file, seconds):
    """The whole table in memory, then rows in random order."""
    import pyarrow.parquet as parquet

    start = time.perf_counter()
    table = parquet.read_table(file, columns=COLUMNS)
    opened = time.perf_counter() - start
    rng = random.Random(0)

    def random_row():
        row = table.slice(rng.randrange(table.num_rows), 1)
        return [row[name][0].as_py() for name in COLUMNS]

    return (*count(iter(random_row, None), seconds), opened)


def pyarrow_batches(file, seconds):
    """Batches of 1,024 rows in file order."""
    import pyarrow.parquet as parquet

    start = time.perf_counter()
    opened_file = parquet.ParquetFile(file)
    opened = time.perf_counter() - start
    batches = opened_file.iter_batches(batch_size=1024, columns=COLUMNS)
    rows = itertools.chain.from_iterable(zip(*(batch[name].to_pylist() for name in COLUMNS)) for batch in batches)
    return (*count(rows, seconds), opened)


def pyarrow_reopen(file, seconds):
    """Opens the file and reads the row group again for every row, like the original `ultra_low_mem`."""
    import pyarrow.parquet as parquet

    rng = random.Random(0)

    def random_row():
        opened = parquet.ParquetFile(file)
        group = opened.read_row_group(rng.randrange(opened.num_row_groups), columns=COLUMNS)
        row = group.slice(rng.randrange(group.num_rows), 1)
        return [row[name][0].as_py() for name in COLUMNS]

    return (*count(iter(random_row, None), seconds), 0.0)


def datasets_streaming(file, seconds):
    """Streaming with a shuffle buffer of 10,000 rows, which is not a shuffle of the file."""
    from datasets import load_dataset

    start = time.perf_counter()
    stream = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
    rows = iter(stream.shuffle(buffer_size=10_000, seed=1))
    next(rows)
    opened = time.perf_counter() - start
    return (*count(rows, seconds), opened)


def datasets_map(file, seconds):
    """Map style: converts to a cache on disk first, then rows in random order."""
    from datasets import load_dataset

    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        rows = load_dataset("parquet", data_files=str(file), split="train", cache_dir=cache)
        opened = time.perf_counter() - start
        return (*count((rows[rng.randrange(len(rows))] for _ in itertools.count()), seconds), opened)


READERS = {
    "pyarrow read_table, random rows": pyarrow_table,
    "pyarrow iter_batches(1024), in order": pyarrow_batches,
    "pyarrow, reopened for every row": pyarrow_reopen,
    "datasets streaming, buffer 10,000": datasets_streaming,
    "datasets map style, random rows": datasets_map,
}


def count(rows, seconds):
    """Rows taken until the deadline, looking at the clock after 1, 2, ... 64, 128, ... rows."""
    start = time.perf_counter()
    taken, look = 0, 1
    for _ in rows:
        taken += 1
        if taken >= look:
            if time.perf_counter() - start > seconds:
                break
            look += min(look, 64)
    return taken, time.perf_counter() - start


def work(options):
    import datasets  # noqa: F401  both are imported for all readers, so that their bases can be compared
    import pyarrow.parquet  # noqa: F401

    base = measured_machine.rss_bytes()
    rows, seconds, opened = READERS[options.worker](options.file, options.seconds)
    result = {
        "name": options.worker,
        "rows_per_second": rows / seconds,
        "peak_rss_bytes": measured_machine.peak_rss_bytes(),
        "base_rss_bytes": base,
        "open_ms": 1000 * opened,
    }
    print(json.dumps(result))


def run_child(command):
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.stderr.write(f"error: exit code {done.returncode}: {shlex.join(command)}\n{done.stderr[-3000:]}")
    results = (parse_line(line) for line in done.stdout.splitlines())
    return [result for result in results if result]


def parse_line(line):
    """One result of a child, or None for a line without a result."""
    if line.startswith("{"):
        return json.loads(line)
    found = MILLION_ROWS.search(line)
    if not found:
        return None
    opened, rate, above, base = (float(found[name]) for name in ("opened", "rate", "above", "base"))
    return {
        "name": f"parquet-dataset {found['mode']}",
        "rows_per_second": rate,
        "peak_rss_bytes": (above + base) * 2**20,
        "base_rss_bytes": base * 2**20,
        "open_ms": opened,
    }


def table(results):
    lines = [
        "| reader | rows/s | peak RSS MiB | above its base MiB | before the first row ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, runs in results.items():
        rate = statistics.median(run["rows_per_second"] for run in runs)
        peak = max(run["peak_rss_bytes"] for run in runs) / 2**20
        above = max(run["peak_rss_bytes"] - run.get("base_rss_bytes", 0) for run in runs) / 2**20
        opened = statistics.median(run.get("open_ms", 0.0) for run in runs)
        shown = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}" if rate else ""
        based = f"{above:.0f}" if all("base_rss_bytes" in run for run in runs) else ""
        lines.append(f"| {name} | {shown} | {peak:.0f} | {based} | {opened:,.1f} |")
    return "\n".join(lines)


def main():
    options = arguments()
    if options.make:
        return make_file(options)
    if options.worker:
        return work(options)
    shared = ["--file", str(options.file), "--seconds", str(options.seconds)]
    commands = [[word.replace("{file}", str(options.file)) for word in shlex.split(text)] for text in options.bench]
    commands += [[sys.executable, __file__, "--worker", name, *shared] for name in options.readers]
    measured_machine.warn_if_busy()
    machine = measured_machine.describe(REPOSITORY, ["pyarrow", "datasets"])
    results = {}
    for number in range(options.rounds):
        for command in commands if number % 2 == 0 else commands[::-1]:
            for result in run_child(command):
                results.setdefault(result["name"], []).append(result)
                rate = result["rows_per_second"]
                print(f"round {number + 1}: {result['name']}: {rate:,.0f} rows/s", file=sys.stderr, flush=True)
    size = options.file.stat().st_size / 1e6
    print(f"{options.file.name}, {size:.0f} MB; {options.rounds} rounds\n{machine}\n\n{table(results)}")
    if options.json:
        kept = {"command": sys.argv[1:], "machine": machine, "runs": results}
        options.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
