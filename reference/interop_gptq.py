"""Perplexity of a GPTQ artifact folder, read by others than quantkit.

Two readings, float32 on the CPU, each with its perplexity in the JSON on stdout:
  gptqmodel  GPTQModel loads the folder and runs its own kernel (--kernel torch by default); its
             float16 model is then widened to float32, which changes no weight
  layout     this script dequantizes the tensors as the published layout says, in numpy, and
             transformers runs the dense model
Supports checkpoint formats gptq (zero points stored minus one) and gptq_v2, 2, 3, 4 and 8 bits,
any g_idx. Convention: the whole text is tokenized once without special tokens, consecutive
windows that do not overlap, every next token inside a window scored, summed in float64.

usage: interop_gptq.py ARTIFACT --text FILE [--windows 16] [--window 512] [--only layout|gptqmodel] [--kernel torch]
"""
import argparse, json, math, os, sys, traceback
from pathlib import Path

answer = os.fdopen(os.dup(1), "w")                          # GPTQModel prints to stdout: keep it clean
os.dup2(2, 1)
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")        # its own choice fails on two cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")           # GPTQModel compiles its dequantization: slower than running it here

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

@torch.no_grad()
def perplexity(model, windows):
    nll = 0.0
    for w in windows:
        logits = model(input_ids=w[None], use_cache=False).logits[0].float()
        nll += torch.nn.functional.cross_entropy(logits[:-1], w[1:], reduction="none").double().sum().item()
    count = windows.shape[0] * (windows.shape[1] - 1)
    return {"perplexity": math.exp(nll / count), "mean_nll": nll / count, "tokens_scored": count}

def fields(words, bits):
    """int32 [..., n] -> the unsigned `bits`-wide values of each row, least significant bits first."""
    bytes_ = np.ascontiguousarray(words).astype("<i4").view(np.uint8)
    stream = np.unpackbits(bytes_, axis=-1, bitorder="little")
    values = stream.reshape(*stream.shape[:-1], -1, bits)
    return (values * (1 << np.arange(bits))).sum(-1).astype(np.int32)

def dequantize(t, shape, config):
    """One Linear's tensors (qweight, qzeros, scales, perhaps g_idx) -> float32 [out, in]."""
    out, k = shape
    qweight, qzeros = t["qweight"].numpy(), t["qzeros"].numpy()
    bits = qweight.shape[0] * 32 // k
    q = fields(qweight.T, bits)                             # packed along the input
    z = fields(qzeros, bits)                                # packed along the output
    if config.get("checkpoint_format", config.get("format", "gptq")) == "gptq":
        z = (z + 1) % 2**bits
    size = config["group_size"] if config["group_size"] > 0 else k
    g = t["g_idx"].numpy() if "g_idx" in t else np.arange(k) // size
    scales = t["scales"].float().numpy()
    assert q.shape == (out, k) and z.shape == scales.shape == (scales.shape[0], out) and g.max() < len(scales)
    if "dynamic" not in config:
        assert bits == config["bits"] and len(scales) == -(-k // size), (bits, scales.shape)
    return torch.from_numpy((q - z[g].T) * scales[g].T)

def dense_model(folder):
    raw = json.loads((folder / "config.json").read_text())
    quant = raw.get("quantization_config") or json.loads((folder / "quantize_config.json").read_text())
    if quant["quant_method"] != "gptq" or quant.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        sys.exit(f"not a GPTQ artifact this script can read: {quant}")
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    shapes = {n: p.shape for n, p in model.named_parameters()}
    quantized = sorted(n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight"))
    state = {n: t.float() for n, t in tensors.items() if n.rpartition(".")[2] not in ("qweight", "qzeros", "scales", "g_idx")}
    widths = {}
    for name in quantized:
        parts = {s: tensors[f"{name}.{s}"] for s in ("qweight", "qzeros", "scales", "g_idx") if f"{name}.{s}" in tensors}
        shape = shapes[f"{name}.weight"]
        state[f"{name}.weight"] = dequantize(parts, shape, quant)
        bits = parts["qweight"].shape[0] * 32 // shape[1]
        widths[bits] = widths.get(bits, 0) + 1
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [n for n in missing if not (n == "lm_head.weight" and config.tie_word_embeddings)]
    if missing or unexpected:
        sys.exit(f"tensors missing: {missing}, unexpected: {unexpected}")
    model.tie_weights()
    return model, {"quantized_linears": len(quantized), "linears_by_bits": widths}

def gptqmodel(folder, kernel):
    from gptqmodel import BACKEND, GPTQModel
    loaded = GPTQModel.load(str(folder), device="cpu", backend=BACKEND(kernel), dtype=torch.float16)
    kinds = sorted({type(m).__name__ for m in loaded.model.modules() if hasattr(m, "qweight")})
    return loaded.model.float().eval(), {"kernel": kinds}

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("artifact", type=Path)
    ap.add_argument("--text", type=Path, required=True)
    ap.add_argument("--windows", type=int, default=16)
    ap.add_argument("--window", type=int, default=512)
    ap.add_argument("--only", choices=["layout", "gptqmodel"])
    ap.add_argument("--kernel", default="torch", help="GPTQModel's name of a backend")
    args = ap.parse_args()
    tok = Tokenizer.from_file(str(args.artifact / "tokenizer.json"))
    ids = tok.encode(args.text.read_bytes().decode(), add_special_tokens=False).ids
    if len(ids) < args.windows * args.window:
        sys.exit(f"{args.text}: only {len(ids)} tokens")
    windows = torch.tensor(ids[:args.windows * args.window]).view(args.windows, args.window)
    result = {"windows": args.windows, "window": args.window}
    loaders = {"layout": lambda: dense_model(args.artifact), "gptqmodel": lambda: gptqmodel(args.artifact, args.kernel)}
    for name, load in loaders.items():
        if args.only in (None, name):
            try:
                model, facts = load()
                result[name] = perplexity(model, windows) | facts
            except Exception as error:                      # one reader's refusal is a result too
                traceback.print_exc()
                result[name] = {"error": f"{type(error).__name__}: {error}"}
    answer.write(json.dumps(result, indent=1) + "\n")
    answer.flush()
    sys.exit(any("error" in r for r in result.values() if isinstance(r, dict)))

if __name__ == "__main__":
    main()
