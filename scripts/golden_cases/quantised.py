"""Quantised weights as bitsandbytes makes them: NF4 in blocks of 64 with double quantisation, and int8 by rows.

`quantised.safetensors`:
  `map`: the 256 values of the dynamic map;
  `CASE.weight` (out, in);
  `CASE.codes`, `CASE.absmax` (u8), `CASE.scales`, `CASE.offset`: `quantize_4bit` with `compress_statistics`;
  `CASE.dequantised`: the result of `dequantize_4bit` for these;
  `CASE.int8` (their bytes), `CASE.int8_absmax`: `int8_vectorwise_quant`.
"""

import sys

import torch
from safetensors.torch import save_file

VERSION = "0.50"


def cases():
    generator = torch.Generator().manual_seed(25)

    def normal(*shape):
        return torch.empty(shape).normal_(generator=generator)

    yield "two_groups", normal(33, 512) * 0.05
    yield "ragged", normal(7, 101)
    holes = normal(6, 128)
    holes[2] = 0.0
    holes[3, 64:] *= 1e-4
    yield "holes", holes
    yield "wild", normal(9, 192) * torch.logspace(-6, 3, 9)[:, None]


def write(folder):
    import bitsandbytes
    from bitsandbytes import functional

    if not bitsandbytes.__version__.startswith(VERSION + "."):
        sys.exit(f"error: bitsandbytes: expected {VERSION}.*, got {bitsandbytes.__version__}")
    tensors = {"map": functional.create_dynamic_map()}
    for name, weight in cases():
        codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        int8, int8_absmax, _ = functional.int8_vectorwise_quant(weight.half())
        tensors |= {
            f"{name}.weight": weight,
            f"{name}.codes": codes.flatten(),
            f"{name}.absmax": state.absmax,
            f"{name}.scales": state.state2.absmax,
            f"{name}.offset": state.offset.reshape(1),
            f"{name}.dequantised": functional.dequantize_4bit(codes, state),
            f"{name}.int8": int8.view(torch.uint8),
            f"{name}.int8_absmax": int8_absmax,
        }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "quantised.safetensors")
