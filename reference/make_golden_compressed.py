"""Golden linears of compressed-tensors: its own bytes, its own forward.

One module for each scheme of 8 bits whose inputs are rounded. compressed-tensors finds the scales (`calculate_qparams`),
writes the weights (`ModelCompressor`), and, in modules made anew from the files as transformers makes them, computes the
outputs in float32 on the CPU.

What it does with an input x of float32 (compressed-tensors 0.20.1, `calculate_qparams`, `_quantize_dequantize`):
  integers, symmetric   scale = max|x| / 127.5; round(clamp(x / scale, -128, 127)) * scale, ties to even
  integers, asymmetric  scale = (max - min) / 255 with 0 in the range; zero = round(clamp(-128 - min / scale, -128, 127));
                        (round(clamp(x / scale + zero, -128, 127)) - zero) * scale
  E4M3                  scale = max|x| / 448; e4m3(clamp(x / scale, -448, 448)) * scale
A scale of 0 becomes the epsilon of float32. Static scales are used as they are.

OUT/config.json, OUT/model.safetensors: the artifact, modules `model.layers.0.NAME`
OUT/linears.safetensors: x f32 [tokens, inputs]; NAME f32 [tokens, outputs], what NAME makes of x

usage: make_golden_compressed.py OUT      (in the project: tests/golden/compressed)
"""
import argparse, json
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import CompressedTensorsConfig

COLS = 256
PREFIX = "model.layers.0."

def arguments(kind, strategy, dynamic=False, symmetric=True, **more):
    return {"num_bits": 8, "type": kind, "strategy": strategy, "dynamic": dynamic, "symmetric": symmetric} | more

# Name: outputs, weights, inputs, the type of the stored scales.
CASES = {
    "int8_token": (40, arguments("int", "channel"), arguments("int", "token", True), torch.float32),
    "int8_token_asymmetric": (40, arguments("int", "channel"), arguments("int", "token", True, False), torch.bfloat16),
    "int8_tensor": (40, arguments("int", "channel"), arguments("int", "tensor"), torch.float32),
    "int8_tensor_asymmetric": (40, arguments("int", "channel"), arguments("int", "tensor", False, False), torch.float16),
    "int8_one_scale": (24, arguments("int", "tensor"), arguments("int", "token", True), torch.float32),
    "fp8_token": (40, arguments("float", "channel"), arguments("float", "token", True), torch.bfloat16),
    "fp8_tensor": (40, arguments("float", "tensor"), arguments("float", "tensor"), torch.float32),
    "fp8_one_scale": (24, arguments("float", "tensor"), arguments("float", "token", True), torch.float16),
    "fp8_block": (144, arguments("float", "block", block_structure=[128, 128]),
                  arguments("float", "group", True, group_size=128), torch.float32),
}

def inputs():
    """Tokens that show how numbers are rounded: ties, ends of the range, and what has no range at all."""
    torch.manual_seed(11)
    x = torch.randn(14, COLS)
    x[1, 17] = -90.0                                        # an outlier
    x[2] = 0
    x[3] = (torch.arange(COLS) - 128 + 0.5) / 32            # halves of a scale of 1/32, -127.5 and 127.5 among them
    x[4] = -x[3]
    x[5] = x[3].abs()                                       # above zero, halves
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (e4m3[:-1] + e4m3[1:]) / 2                    # between neighbours, the smallest ones too
    x[6, :126], x[6, 126:252], x[6, 252:] = halfway / 16, -halfway / 16, 448 / 16
    x[7] = x[6].flip(0)                                     # the same in other groups
    x[8] = torch.randn(COLS) * 1e-6
    x[9] = torch.randn(COLS) * 1e-30
    x[10] = torch.randn(COLS) * 30                          # beyond static ranges
    x[11] = torch.randn(COLS).exp() - 5
    x[12, :128] = 0                                         # a group of zeros
    x[13] = -torch.rand(COLS)                               # below zero
    return x

def config():
    groups = {f"group_{i}": {"targets": [PREFIX + name], "weights": weights, "input_activations": inputs,
                             "format": f"{weights['type']}-quantized"}
              for i, (name, (_, weights, inputs, _)) in enumerate(CASES.items())}
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "quantization_status": "compressed",
            "config_groups": groups, "ignore": []}

class Block(torch.nn.Module):
    """Modules as in a checkpoint: PREFIX and a name."""
    def __init__(self):
        super().__init__()
        layer = torch.nn.Module()
        for name, (rows, *_) in CASES.items():
            layer.add_module(name, torch.nn.Linear(COLS, rows, bias=False))
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([layer])

    def linear(self, name):
        return self.get_submodule(PREFIX + name)

    def forward(self, x):
        return {name: self.linear(name)(x) for name in CASES}

def parsed(quantization):
    """As transformers reads it from a folder."""
    return ModelCompressor.from_compression_config(CompressedTensorsConfig(**quantization))

def extremes(weight, args):
    if args["strategy"] == "block":
        blocks = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 128, 0, -weight.shape[0] % 128))
        blocks = blocks.unfold(0, 128, 128).unfold(1, 128, 128)
        return blocks.amin((-2, -1)), blocks.amax((-2, -1))
    if args["strategy"] == "tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)

@torch.no_grad()
def artifact(x):
    """The tensors of the artifact, scales in their stored types."""
    torch.manual_seed(12)
    block, compressor = Block(), parsed(config())
    apply_quantization_config(block, compressor.quantization_config)
    types = {}
    for name, (rows, weights, inputs, stored) in CASES.items():
        linear = block.linear(name)
        linear.weight.copy_(torch.randn(rows, COLS) * torch.rand(rows, 1) * 0.1)
        scale, _ = calculate_qparams(*extremes(linear.weight, weights), linear.quantization_scheme.weights)
        linear.weight_scale.copy_(scale.to(stored))         # the stored number, before weights are rounded by it
        types[f"{PREFIX}{name}.weight_scale"] = stored
        if not inputs["dynamic"]:
            seen = x[[0, 11, 13]]                           # a part of the tokens, as calibration is
            scale, zero = calculate_qparams(seen.amin(), seen.amax(), linear.quantization_scheme.input_activations)
            linear.input_scale.copy_(scale.to(stored))
            types[f"{PREFIX}{name}.input_scale"] = stored
            if not inputs["symmetric"]:
                linear.input_zero_point.copy_(zero)
    compressor.compress_model(block)
    return {name: tensor.to(types.get(name, tensor.dtype)).contiguous() for name, tensor in block.state_dict().items()}

@torch.no_grad()
def outputs(folder, x):
    """What modules made from the folder compute, as transformers makes them (`CompressedTensorsHfQuantizer`)."""
    block = Block()
    compressor = parsed(json.loads((folder / "config.json").read_text())["quantization_config"])
    apply_quantization_config(block, compressor.quantization_config, run_compressed=False)
    compressor.compress_model(block)
    block.load_state_dict(load_file(folder / "model.safetensors"))
    assert all(block.linear(name).weight_scale.dtype == torch.float32 for name in CASES)
    return block(x[None])                                   # scales of tokens need three dimensions

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out", type=Path)
    args = ap.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    x = inputs()
    model = {"model_type": "llama", "dtype": "float32", "quantization_config": config()}
    (args.out / "config.json").write_text(json.dumps(model, indent=1) + "\n")
    save_file(artifact(x), args.out / "model.safetensors", metadata={"format": "pt"})
    made = {name: y[0].contiguous() for name, y in outputs(args.out, x).items()}
    assert all(y.isfinite().all() for y in made.values())
    save_file({"x": x} | made, args.out / "linears.safetensors")

if __name__ == "__main__":
    main()
