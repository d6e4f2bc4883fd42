"""Perplexity of a compressed-tensors, AWQ or FP8 artifact folder, read by others than quantkit.

Two readings, float32 on the CPU, each with its perplexity in the JSON on stdout:
  consumer  what loads the format elsewhere: compressed-tensors through transformers, whose own
            forward rounds the inputs of linears, and keys and values, where the artifact says so;
            GPTQModel and its torch kernel (in float16) for awq; transformers for fp8, which on a
            CPU dequantizes the weights and leaves inputs as they are. compressed-tensors 0.20.1
            with transformers 5.24 refuses zero points of packed weights (--dequantize takes them)
            and leaves scales of keys and values out; 0.19 with 5.17 does both, in the environment
            of requirements-llmcompressor.txt
  layout    this script dequantizes the tensors as the published layout says, in numpy, rounds
            inputs, keys and values by arithmetic of its own, and transformers runs the dense
            model; with --float-inputs only the weights are as in the artifact
With --jitter N the layout is read N times more, each embedding changed by a random millionth at
most. Where inputs are rounded, the last digits of a sum decide which way a number goes, and later
layers amplify it: two right readers may differ by as much as these readings do.
With --like vllm the layout is read once more with the scales of vLLM's kernels (csrc/quantization/
w8a8: int8/scaled_quant.cu, fp8/common.cu, fp8/per_token_group_quant.cu), in float32.
`weights` counts the linears whose weights are the same numbers in both readings, and gives the
largest difference, relative to the largest weight of its linear. `linears` gives both readings of
single linears: each linear of the layout gets the very inputs that the consumer's linear gets in
the first window; the differences of a token's outputs are relative to their norm. `differences`
compares whole models window by window: mean, standard error and root mean square of the
differences of the windows' mean log-likelihoods, in per cent of the perplexity.
Convention: the whole text is tokenized once without special tokens, consecutive windows that do
not overlap, every next token inside a window scored, summed in float64. With quantkit: `eval ppl
--window WINDOW --max-windows WINDOWS --bos none`.

usage: interop_formats.py ARTIFACT --text FILE [--windows 16] [--window 512] [--only layout|consumer]
                          [--float-inputs] [--jitter N] [--like vllm] [--dequantize] [--kernel torch]
"""
import argparse, json, math, os, re, sys, traceback
from pathlib import Path

answer = os.fdopen(os.dup(1), "w")                          # GPTQModel prints to stdout: keep it clean
os.dup2(2, 1)
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")        # its own choice fails on two cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")           # compiled dequantization is slower than running it here

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig, DynamicCache

@torch.no_grad()
def perplexity(model, windows, cache=None):
    nlls = []
    for w in windows:
        past = {"past_key_values": cache(), "use_cache": True} if cache else {"use_cache": False}
        logits = model(input_ids=w[None], **past).logits[0].float()
        nlls.append(torch.nn.functional.cross_entropy(logits[:-1], w[1:], reduction="none").double().sum().item())
    count = windows.shape[0] * (windows.shape[1] - 1)
    nll = sum(nlls) / count
    each = [n / (windows.shape[1] - 1) for n in nlls]
    return {"perplexity": math.exp(nll), "mean_nll": nll, "tokens_scored": count, "window_nlls": each}

def difference(of, to):
    """The difference between two readings, window by window, in per cent of the perplexity."""
    d = 100 * (np.array(of["window_nlls"]) - np.array(to["window_nlls"]))
    error = d.std(ddof=1) / math.sqrt(d.size) if d.size > 1 else math.nan
    return {"mean": d.mean(), "standard_error": error, "root_mean_square": math.sqrt((d ** 2).mean())}

# Layouts, in numpy.

def fields(words, bits):
    """int32 [..., n] -> the unsigned `bits`-wide values of each row, least significant bits first."""
    bytes_ = np.ascontiguousarray(words).astype("<i4").view(np.uint8)
    stream = np.unpackbits(bytes_, axis=-1, bitorder="little")
    stream = stream[..., :stream.shape[-1] // bits * bits]
    values = stream.reshape(*stream.shape[:-1], -1, bits)
    return (values * (1 << np.arange(bits))).sum(-1).astype(np.int32)

def e4m3():
    """The 256 numbers of E4M3 without infinities; 0x7f and 0xff are no numbers."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0 ** -9)
    value = np.where(code & 0x7f == 0x7f, np.nan, value)
    return np.where(code >= 128, -value, value).astype(np.float32)

def spread(scales, shape, tile):
    """One scale a tile -> one a weight."""
    return np.repeat(np.repeat(scales, tile[0], 0), tile[1], 1)[:shape[0], :shape[1]]

def whole_or_rows(scales, shape):
    """One scale for all, or one a row."""
    assert scales.size in (1, shape[0]), scales.shape
    return np.broadcast_to(scales.reshape(-1, 1), shape)

def number(tensor):
    return tensor.float().numpy()

class CompressedTensors:
    suffixes = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale",
                "input_zero_point")

    def __init__(self, config):
        self.groups, self.ignore = list(config["config_groups"].values()), config.get("ignore") or []
        self.kv = config.get("kv_cache_scheme")

    @staticmethod
    def matches(target, name):
        return re.match(target[3:], name) if target.startswith("re:") else target in (name, "Linear")

    def group(self, name):
        if any(self.matches(t, name) for t in self.ignore if t != "Linear"):
            return None
        exact = [g for g in self.groups if any(t != "Linear" and self.matches(t, name) for t in g["targets"])]
        return (exact or [g for g in self.groups if "Linear" in g["targets"]] or [None])[0]

    def is_quantized(self, name, tensors):
        return f"{name}.weight_packed" in tensors or f"{name}.weight_scale" in tensors

    def weight(self, name, t, shape):
        args = self.group(name)["weights"]
        scales = number(t["weight_scale"])
        if "weight_packed" not in t:
            raw = t["weight"]
            values = e4m3()[raw.view(torch.uint8).numpy()] if args["type"] == "float" else number(raw)
            if args["strategy"] == "block":
                return values * spread(scales, shape, args["block_structure"])
            if args["strategy"] == "group":
                return values * spread(scales, shape, (1, args["group_size"]))
            return values * whole_or_rows(scales, shape)
        bits = args["num_bits"]
        assert tuple(t["weight_shape"].tolist()) == tuple(shape), (name, t["weight_shape"])
        assert t["weight_packed"].shape == (shape[0], -(-shape[1] * bits // 32)), t["weight_packed"].shape
        values = fields(t["weight_packed"].numpy(), bits)[:, :shape[1]] - 2 ** (bits - 1)
        if args["symmetric"]:
            assert "weight_zero_point" not in t
            zeros = np.zeros(scales.shape, np.int32)
        else:
            zeros = fields(t["weight_zero_point"].numpy().T, bits)[:, :shape[0]].T - 2 ** (bits - 1)
        assert zeros.shape == scales.shape, (zeros.shape, scales.shape)
        size = args["group_size"] if args["strategy"] == "group" else shape[1]
        g = t["weight_g_idx"].numpy() if "weight_g_idx" in t else np.arange(shape[1]) // size
        assert scales.shape == (shape[0], g.max() + 1), scales.shape
        return (values - zeros[:, g]) * scales[:, g]

    def inputs(self, name, t):
        args = self.group(name)["input_activations"]
        if not args:
            return None
        static = None if args.get("dynamic") else t["input_scale"].float()
        zero = None if args["symmetric"] or static is None else t["input_zero_point"].float()
        return Rounding(args["type"], args["strategy"], args.get("group_size"), args["symmetric"], static, zero)

class Awq:
    suffixes = ("qweight", "qzeros", "scales")
    kv = None

    def __init__(self, config):
        assert config.get("bits", config.get("w_bit")) == 4 and config.get("version", "gemm").lower() == "gemm", config
        self.group_size = config.get("group_size", config.get("q_group_size"))

    def is_quantized(self, name, tensors):
        return f"{name}.qweight" in tensors

    def weight(self, name, t, shape):
        out, k = shape
        size = self.group_size if self.group_size > 0 else k
        scales = number(t["scales"])
        order = [0, 4, 1, 5, 2, 6, 3, 7]                    # the nibble of each of eight neighbours
        q, z = (fields(t[n].numpy(), 4).reshape(-1, out // 8, 8)[..., order].reshape(-1, out) for n in ("qweight", "qzeros"))
        assert q.shape == (k, out) and z.shape == scales.shape == (k // size, out)
        g = np.arange(k) // size
        return ((q - z[g]) * scales[g]).T.copy()

    def inputs(self, name, t):
        return None

class Fp8:
    suffixes = ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
    kv = None

    def __init__(self, config):
        assert config.get("fmt", "e4m3") == "e4m3", config
        self.block, self.static = config.get("weight_block_size"), config["activation_scheme"] == "static"

    def is_quantized(self, name, tensors):
        return any(f"{name}.{s}" in tensors for s in self.suffixes[:2])

    def weight(self, name, t, shape):
        values = e4m3()[t["weight"].view(torch.uint8).numpy()]
        scales = number(t["weight_scale_inv"] if "weight_scale_inv" in t else t["weight_scale"])
        return values * (spread(scales, shape, self.block) if self.block else whole_or_rows(scales, shape))

    def inputs(self, name, t):
        static = (t["input_scale"] if "input_scale" in t else t["activation_scale"]).float() if self.static else None
        strategy = "tensor" if self.static else "group" if self.block else "token"
        return Rounding("float", strategy, self.block[1] if self.block else None, True, static, None)

LAYOUTS = {"compressed-tensors": CompressedTensors, "awq": Awq, "fp8": Fp8}

# What becomes of inputs.

class Rounding:
    """Numbers to 8 bits and back: bytes whose scale maps the largest magnitude to 127.5, or E4M3 with 448."""
    like = None                                             # or "vllm"

    def __init__(self, kind, strategy, size, symmetric, scale, zero):
        self.kind, self.strategy, self.size, self.symmetric, self.scale, self.zero = kind, strategy, size, symmetric, scale, zero

    def __call__(self, x):
        if self.strategy != "group" or self.scale is not None:
            return self.round(x)
        return torch.cat([self.round(part) for part in x.split(self.size, -1)], -1)   # the last may be smaller

    def round(self, x):
        if Rounding.like == "vllm":
            return self.as_vllm(x)
        top = 448.0 if self.kind == "float" else 127.5
        zero = torch.zeros(())
        if self.scale is not None:
            scale, zero = self.scale, zero if self.zero is None else self.zero
        elif self.symmetric:
            scale = x.abs().amax(-1, keepdim=True) / top
        else:
            low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
            scale = (high - low) / 255
            zero = torch.where(scale > 0, (-128 - low / scale).clamp(-128, 127).round(), zero)
        scale = torch.where(scale > 0, scale, torch.finfo(torch.float32).eps)
        if self.kind == "float":
            return self.nearest(x / scale) * scale
        return ((x / scale + zero).clamp(-128, 127).round() - zero) * scale

    @staticmethod
    def nearest(y):
        """The nearest E4M3 number, ties to even, at most 448."""
        y = y.clamp(-448, 448)
        step = torch.exp2((torch.frexp(y.abs()).exponent - 1).clamp(min=-6) - 3.0)
        return (y / step).round() * step

    def as_vllm(self, x):
        most = x.abs().amax(-1, keepdim=True)
        if self.kind == "float":
            if self.scale is not None:
                return self.nearest(x * (1 / self.scale)) * self.scale
            if self.strategy == "group":
                scale = most.clamp(min=1e-10) / 448
            else:
                scale = (most / 448).clamp(min=1 / (448 * 512))
            return self.nearest(x / scale) * scale
        if self.scale is not None and self.zero is None:
            return (x / self.scale).round().clamp(-128, 127) * self.scale
        if self.scale is not None:
            return (((x * (1 / self.scale)).round() + self.zero).clamp(-128, 127) - self.zero) * self.scale
        if self.symmetric:
            inverse = torch.where(most > 0, 127 / most, 0)
            return (x * inverse).round().clamp(-128, 127) * (most / 127)
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        scale = (high - low) / 255
        zero = (-128 - low / scale).round()
        return (((x * (1 / scale)).round() + zero).clamp(-128, 127) - zero) * scale

class RoundedCache(DynamicCache):
    """Keys and values go through `rounding[layer]` on their way in."""
    def __init__(self, rounding):
        super().__init__()
        self.rounding = rounding

    def update(self, keys, values, layer, *rest, **named):
        k, v = self.rounding[layer]
        return super().update(k(keys), v(values), layer, *rest, **named)

# Readings.

def quantization_config(folder):
    raw = json.loads((folder / "config.json").read_text())
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config or config.get("quant_method") not in LAYOUTS:
        sys.exit(f"{folder} is no artifact that this script can read: {config}")
    return config

def dense_model(folder, float_inputs):
    quant = quantization_config(folder)
    layout = LAYOUTS[quant["quant_method"]](quant)
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state, used, inputs = {}, set(), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and layout.is_quantized(name, tensors):
            keys = {s: f"{name}.{s}" for s in ("weight", *layout.suffixes) if f"{name}.{s}" in tensors}
            used.update(keys.values())
            parts = {s: tensors[key] for s, key in keys.items()}
            weight = layout.weight(name, parts, module.weight.shape)
            assert weight.shape == tuple(module.weight.shape) and np.isfinite(weight).all(), name
            state[f"{name}.weight"] = torch.from_numpy(np.ascontiguousarray(weight, np.float32))
            inputs[name] = None if float_inputs else layout.inputs(name, parts)
    kv = {n: t.float() for n, t in tensors.items() if re.search(r"self_attn\.[qkv]_(scale|zero_point)$", n)}
    state |= {n: t.float() for n, t in tensors.items() if n not in used and n not in kv}
    if not inputs:
        sys.exit(f"{folder}: no quantized linear")
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [n for n in missing if not (n == "lm_head.weight" and config.tie_word_embeddings)]
    if missing or unexpected:
        sys.exit(f"tensors missing: {missing}, unexpected: {unexpected}")
    model.tie_weights()
    facts = {"quantized_linears": len(inputs), "rounded_inputs": sum(r is not None for r in inputs.values())}
    for name, rounding in inputs.items():
        if rounding:
            model.get_submodule(name).register_forward_pre_hook(lambda _, x, r=rounding: (r(x[0]), *x[1:]))
    cache = None
    if layout.kv and not float_inputs:
        assert layout.kv["type"] == "float" and not layout.kv["dynamic"] and layout.kv["symmetric"], layout.kv
        def of(layer, which):
            scale = kv[f"model.layers.{layer}.self_attn.{which}_scale"]
            heads = config.num_key_value_heads
            assert scale.numel() == (heads if layout.kv["strategy"] == "attn_head" else 1), scale.shape
            return Rounding("float", "tensor", None, True, scale.reshape(1, -1, 1, 1), None)
        rounding = [(of(i, "k"), of(i, "v")) for i in range(config.num_hidden_layers)]
        cache = lambda: RoundedCache(rounding)
        facts["rounded_caches"] = len(rounding)
    return model, facts, cache, inputs

def jittered(model, windows, cache, count):
    readings = []
    for seed in range(count):
        random = torch.Generator().manual_seed(seed)
        hook = model.get_input_embeddings().register_forward_hook(
            lambda _, ids, x: x * (1 + (torch.rand(x.shape, generator=random) - 0.5) * 2e-6))
        readings.append(perplexity(model, windows, cache))
        hook.remove()
    return readings

def through_transformers(folder, args):
    extra = {}
    if args.dequantize:
        extra["quantization_config"] = CompressedTensorsConfig(**quantization_config(folder), dequantize=True)
    # Warnings of missing tensors mean a model that is not the artifact: collect them as errors.
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **extra)
    if (quantization_config(folder).get("kv_cache_scheme") and not args.dequantize
            and not any(hasattr(m, "k_scale") for m in model.modules())):
        raise ValueError("compressed-tensors finds no attention in this transformers: scales of keys and values are left out")
    bad = {k: sorted(map(str, v))[:4] for k, v in info.items() if v and k in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if bad:
        raise ValueError(f"transformers loads the folder but not all of it: {bad}")
    kinds = sorted({type(m).__name__ for n, m in model.named_modules() if n.endswith("_proj")})
    rounds = sum(bool(getattr(getattr(m, "quantization_scheme", None), "input_activations", None))
                 for m in model.modules() if isinstance(m, torch.nn.Linear))
    weight = lambda name: model.get_submodule(name).weight.detach().float()
    return model.eval(), {"linears": kinds, "rounded_inputs": rounds}, weight

def gptqmodel(folder, args):
    from gptqmodel import BACKEND, GPTQModel
    loaded = GPTQModel.load(str(folder), device="cpu", backend=BACKEND(args.kernel), dtype=torch.float16)
    kinds = sorted({type(m).__name__ for m in loaded.model.modules() if hasattr(m, "qweight")})
    def weight(name):
        from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
        m = loaded.model.get_submodule(name)
        return dequantize_gemm(m.qweight, m.qzeros, m.scales, m.bits, m.group_size).T.float()
    return loaded.model.float().eval(), {"kernel": kinds}, weight

CONSUMERS = {"compressed-tensors": through_transformers, "awq": gptqmodel, "fp8": through_transformers}

@torch.no_grad()
def compare(dense, names, weight):
    differences = [((dense.get_submodule(n).weight - weight(n)).abs().max() / dense.get_submodule(n).weight.abs().max()).item()
                   for n in names]
    return {"linears": len(names), "equal": sum(d == 0 for d in differences), "largest_difference": max(differences)}

@torch.no_grad()
def compare_linears(dense, inputs, model, window):
    """Both readings of each linear, of the inputs that the consumer's has in one window."""
    worst, total, count = {}, 0.0, 0
    def look(name):
        linear, rounding = dense.get_submodule(name), inputs[name]
        def hook(module, args, out):
            nonlocal total, count
            x = args[0].float()
            y = torch.nn.functional.linear(rounding(x) if rounding else x, linear.weight, linear.bias)
            away = (y - out).norm(dim=-1) / out.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
            worst[name] = away.max().item()
            total, count = total + away.double().sum().item(), count + away.numel()
        return hook
    model(input_ids=window[None], use_cache=False)          # compressed-tensors decompresses in the first pass
    hooks = [model.get_submodule(name).register_forward_hook(look(name)) for name in inputs]
    model(input_ids=window[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    name = max(worst, key=worst.get)
    return {"linears": len(worst), "mean": total / count, "largest": worst[name], "of": name}

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("artifact", type=Path)
    ap.add_argument("--text", type=Path, required=True)
    ap.add_argument("--windows", type=int, default=16)
    ap.add_argument("--window", type=int, default=512)
    ap.add_argument("--only", choices=["layout", "consumer"])
    ap.add_argument("--float-inputs", action="store_true", help="layout: leave inputs, keys and values as they are")
    ap.add_argument("--jitter", type=int, default=0, help="so many readings of the layout with embeddings a millionth off")
    ap.add_argument("--like", choices=["vllm"], help="layout: read once more with the scales of another engine")
    ap.add_argument("--dequantize", action="store_true", help="consumer: compressed-tensors makes floats of the weights "
                    "while it loads, and leaves inputs as they are")
    ap.add_argument("--kernel", default="torch", help="GPTQModel's name of a backend")
    args = ap.parse_args()
    tok = Tokenizer.from_file(str(args.artifact / "tokenizer.json"))
    ids = tok.encode(args.text.read_bytes().decode(), add_special_tokens=False).ids
    if len(ids) < args.windows * args.window:
        sys.exit(f"{args.text}: only {len(ids)} tokens")
    windows = torch.tensor(ids[:args.windows * args.window]).view(args.windows, args.window)
    method = quantization_config(args.artifact)["quant_method"]
    result = {"quant_method": method, "windows": args.windows, "window": args.window}
    dense = weight = model = None
    differences = {}
    if args.only != "consumer":
        try:
            dense, facts, cache, names = dense_model(args.artifact, args.float_inputs)
            layout = perplexity(dense, windows, cache)
            result["layout"] = layout | facts | {"float_inputs": args.float_inputs}
            if args.jitter:
                readings = jittered(dense, windows, cache, args.jitter)
                values = [reading["perplexity"] for reading in readings]
                result["layout_jittered"] = {"lowest": min(values), "highest": max(values), "readings": values}
                differences["jittered, layout"] = [difference(reading, layout) for reading in readings]
            if args.like:
                Rounding.like = args.like
                result["layout_like"] = perplexity(dense, windows, cache) | {"like": args.like}
                Rounding.like = None
                differences[f"like {args.like}, layout"] = difference(result["layout_like"], layout)
        except Exception as error:                          # one reader's refusal is a result too
            traceback.print_exc()
            result["layout"] = {"error": f"{type(error).__name__}: {error}"}
    if args.only != "layout":
        try:
            model, facts, weight = CONSUMERS[method](args.artifact, args)
            result["consumer"] = perplexity(model, windows) | facts
            if "mean_nll" in result.get("layout", {}):
                differences["consumer, layout"] = difference(result["consumer"], result["layout"])
        except Exception as error:
            traceback.print_exc()
            result["consumer"] = {"error": f"{type(error).__name__}: {error}"}
    if dense is not None and weight is not None:            # a consumer may refuse the inputs, but have the weights
        try:
            result["weights"] = compare(dense, names, weight)
        except Exception as error:
            traceback.print_exc()
            result["weights"] = {"error": f"{type(error).__name__}: {error}"}
    if dense is not None and model is not None and method == "compressed-tensors" and not (args.dequantize or args.float_inputs):
        result["linears"] = compare_linears(dense, names, model, windows[0])
    result["differences"] = differences
    for reading in result.values():
        if isinstance(reading, dict):
            reading.pop("window_nlls", None)
    answer.write(json.dumps(result, indent=1) + "\n")
    answer.flush()
    sys.exit(any("error" in r for r in result.values() if isinstance(r, dict)))

if __name__ == "__main__":
    main()
