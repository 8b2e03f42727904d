"""Compares a run's TensorBoard event file with its metrics.jsonl, through TensorBoard's own reader.

    python3 scripts/check_tensorboard.py RUN

Every step that counts must be there once, with the same numbers as f32, and nothing else.
"""

import json
import math
import struct
import sys
from pathlib import Path

import tensorboard
from tensorboard.backend.event_processing import event_accumulator

TRAIN = {"train/loss": "loss", "train/learning_rate": "lr", "train/grad_norm": "grad_norm", "speed/tokens_per_second": "tokens_per_second",
         "memory/rss_bytes": "rss_bytes", "memory/peak_rss_bytes": "peak_rss_bytes", "memory/predicted_peak_bytes": "predicted_peak_bytes"}


def as_f32(value):
    value = float(value)
    return value if not math.isfinite(value) else struct.unpack("<f", struct.pack("<f", value))[0]


def events_that_count(path):
    """The events of metrics.jsonl, without those that a resumed run wrote again."""
    kept = []
    for line in path.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "resume":
            kept = [other for other in kept if other.get("step", 0) <= event["step"]]
        if event["event"] == "start":
            kept = []
        kept.append(event)
    return kept


def main(run):
    version = tuple(int(part) for part in tensorboard.__version__.split(".")[:2])
    assert version >= (2, 16), f"tensorboard {tensorboard.__version__}"
    events = events_that_count(run / "metrics.jsonl")
    reader = event_accumulator.EventAccumulator(str(run), size_guidance={event_accumulator.SCALARS: 0})
    reader.Reload()
    tags = reader.Tags()["scalars"]
    compared = 0

    def compare(tag, expected):
        nonlocal compared
        found = [(scalar.step, scalar.value) for scalar in reader.Scalars(tag)]
        same = len(found) == len(expected) and all(
            a[0] == b[0] and (a[1] == b[1] or (math.isnan(a[1]) and math.isnan(b[1]))) for a, b in zip(found, expected))
        assert same, f"{tag}: {len(found)} scalars, {len(expected)} expected; {[pair for pair in zip(found, expected) if pair[0] != pair[1]][:3]}"
        compared += len(found)

    steps = [event for event in events if event["event"] == "step"]
    for tag, key in TRAIN.items():
        compare(tag, [(event["step"], as_f32(event[key])) for event in steps])
    evaluations = [event for event in events if event["event"] == "eval"]
    for tag in (tag for tag in tags if tag.startswith("eval/")):
        key = tag.removeprefix("eval/")
        compare(tag, [(event["step"], as_f32(event[key])) for event in evaluations if key in event])
    assert not evaluations or {"eval/loss", "eval/bleu", "eval/exact_match"} <= set(tags), tags
    print(f"{run}: {compared} scalars under {len(tags)} tags are those of metrics.jsonl (tensorboard {tensorboard.__version__})")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(Path(name))
