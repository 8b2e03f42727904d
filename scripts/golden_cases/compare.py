"""Reports where two folders of goldens differ by more than the rounding of another machine."""

import json

import torch
from safetensors.torch import load_file

TOLERANCE = 1e-5


def differences(committed, fresh):
    """Yields one line per difference between the two folders."""
    names = {path.relative_to(committed) for path in committed.rglob("*") if path.is_file()}
    new_names = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    for name in sorted(names ^ new_names):
        yield f"{name}: only {'committed' if name in names else 'freshly made'}"
    for name in sorted(names & new_names):
        if name.suffix == ".safetensors":
            yield from tensors_differ(name, committed / name, fresh / name)
        elif name.suffix == ".json":
            old, new = (json.loads((folder / name).read_text()) for folder in (committed, fresh))
            yield from values_differ(str(name), old, new)
        elif (committed / name).read_bytes() != (fresh / name).read_bytes():
            yield f"{name}: other bytes"


def tensors_differ(name, committed, fresh):
    old, new = load_file(committed), load_file(fresh)
    for key in sorted(old.keys() ^ new.keys()):
        yield f"{name}: {key} is in one of them only"
    for key in sorted(old.keys() & new.keys()):
        if old[key].shape != new[key].shape:
            yield f"{name}: {key}: shape {list(old[key].shape)} became {list(new[key].shape)}"
            continue
        distance = relative_difference(old[key], new[key])
        if distance > TOLERANCE:
            yield f"{name}: {key}: relative difference {distance:.1e}"


def relative_difference(expected, actual):
    """|expected - actual| / |expected|, both as L2 norms over the whole tensor."""
    expected, actual = expected.to(torch.float64), actual.to(torch.float64)
    scale = expected.norm().item()
    distance = (expected - actual).norm().item()
    return distance / scale if scale > 0 else distance


def values_differ(where, old, new):
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if key == "f32_noise":  # a measurement of rounding, not a golden
                continue
            if key not in old or key not in new:
                yield f"{where}: {key} is in one of them only"
            else:
                yield from values_differ(f"{where}: {key}", old[key], new[key])
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new)):
            yield from values_differ(f"{where}[{index}]", a, b)
    elif isinstance(old, float) and isinstance(new, float):
        if abs(old - new) > TOLERANCE * max(abs(old), 1e-12):
            yield f"{where}: {old} became {new}"
    elif old != new:
        yield f"{where}: {old!r} became {new!r}"
