"""Goldens of AdamW with moments in a byte a value: twelve steps of `bitsandbytes.optim.AdamW8bit` on the CPU.

Its library for the CPU looks a value up on a grid of 1/65535, so that small moments become zero. Its kernels for GPUs and its own code in
torch take the nearest number of the map, and so do these goldens: the update is the package's, `nearest` is in place of the look-up. The
parameter that the look-up leads to is kept as well, to say how far apart the two are.

`adamw8bit.safetensors`: `signed` and `unsigned`, the maps; `initial.P` and `gradient.P` of the parameters `matrix` and `small` (fewer than
4096 values: f32 moments). The gradient of step N is `gradient` rolled by 37 N places, times 2^(N % 4 - 2). `step_N.P`; of `matrix` also
`step_N.exp_avg`, `.exp_avg_absmax`, `.exp_avg_sq`, `.exp_avg_sq_absmax`; `library.matrix`: the parameter at the end by the library's look-up.
"""

import torch
from safetensors.torch import save_file

STEPS = 12
STEPS_KEPT = [1, 12]
SHAPES = {"matrix": (67, 65), "small": (11, 7)}
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def nearest(values, code, largest_out, codes_out, block):
    """`bitsandbytes.backends.default.ops` on flat values."""
    flat = values.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % block)).reshape(-1, block)
    largest = padded.abs().amax(dim=1)
    scaled = (padded * (1.0 / largest.clamp(min=1e-38))[:, None]).clamp(-1, 1)
    codes = torch.bucketize(scaled, (code[:-1] + code[1:]) / 2).to(torch.uint8)
    codes_out.copy_(codes.reshape(-1)[: len(flat)].reshape(values.shape))
    largest_out.copy_(largest)


def write(folder):
    import bitsandbytes as bnb
    from bitsandbytes.backends.cpu import ops

    assert bnb.__version__.startswith("0.50."), bnb.__version__
    generator = torch.Generator().manual_seed(58)
    tensors = {
        "signed": bnb.functional.create_dynamic_map(signed=True),
        "unsigned": bnb.functional.create_dynamic_map(signed=False),
    }
    for name, shape in SHAPES.items():
        tensors[f"initial.{name}"] = torch.empty(shape).normal_(generator=generator)
        spread = torch.exp(2 * torch.empty(shape).normal_(generator=generator))
        tensors[f"gradient.{name}"] = torch.empty(shape).normal_(generator=generator) * spread
    library = ops._quant_blockwise_fp32_direct
    tensors["library.matrix"] = run(bnb, tensors)["step_12.matrix"]
    ops._quant_blockwise_fp32_direct = nearest
    tensors |= run(bnb, tensors)
    ops._quant_blockwise_fp32_direct = library
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adamw8bit.safetensors")


def run(bnb, tensors):
    parameters = {name: torch.nn.Parameter(tensors[f"initial.{name}"].clone()) for name in SHAPES}
    optimizer = bnb.optim.AdamW8bit(parameters.values(), **OPTIONS)
    kept = {}
    for step in range(1, STEPS + 1):
        for name, parameter in parameters.items():
            parameter.grad = tensors[f"gradient.{name}"].flatten().roll(37 * step).reshape(parameter.shape)
            parameter.grad *= 2.0 ** (step % 4 - 2)
        optimizer.step()
        if step in STEPS_KEPT:
            kept |= {f"step_{step}.{name}": parameter.detach().clone() for name, parameter in parameters.items()}
            state = optimizer.state[parameters["matrix"]]
            names = {"exp_avg": "state1", "exp_avg_absmax": "absmax1", "exp_avg_sq": "state2", "exp_avg_sq_absmax": "absmax2"}
            kept |= {f"step_{step}.{ours}": state[theirs].clone() for ours, theirs in names.items()}
    return kept
