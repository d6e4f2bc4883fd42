#!/usr/bin/env python3
"""Writes tests/golden/report/{report,baseline}.json: made-up figures of the size that SmolLM2-135M has.

    python reference/make_sample_report.py tests/golden/report
"""

import hashlib
import json
import math
import random
import sys
from pathlib import Path

LAYERS, HEADS = 30, 3
EDGES = [m * 10.0**e for e in range(-7, 1) for m in (1, 2, 5)] + [10.0]
EDGES = [float(f"{edge:.0e}") for edge in EDGES]


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def identity(name, form, files, **rest):
    files = [{"file": file, "bytes": size, "sha256": sha(name + file)} for file, size in files]
    lines = "".join(f"{f['sha256']}  {f['file']}\n" for f in sorted(files, key=lambda f: f["file"]))
    return {"name": name, "format": form, **rest, "files": files, "sha256": sha(lines)}


def corpus(name, windows, window=512, convention="gptq"):
    counted = window - 1 if convention == "gptq" else window // 2 - 1
    return {
        "name": name, "sha256": sha("text of " + name), "convention": convention, "window": window,
        "windows": windows, "bos": "once", "tokens": windows * counted,
    }


def perplexity(rng, on, reference, increase, error, control):
    nll, n = math.log(reference * (1 + increase)), on["tokens"] // on["windows"]
    # The text's difficulty is the same for all artifacts.
    text, windows = random.Random(on["name"]), []
    for _ in range(on["windows"]):
        windows.append({"nats": round(n * (nll + text.gauss(0, 0.25) + rng.gauss(0, 0.006)), 6), "tokens": n})
    shift = nll - sum(w["nats"] for w in windows) / on["tokens"]
    for w in windows:
        w["nats"] = round(w["nats"] + n * shift, 6)
    return {
        "corpus": on,
        "artifact": reference * (1 + increase), "artifact_stderr": reference * (1 + increase) * 0.011,
        "reference": reference, "reference_stderr": reference * 0.0108,
        "ratio": 1 + increase, "ratio_stderr": error,
        "control": {
            "method": "rtn", "perplexity": reference * (1 + control), "ratio": 1 + control,
            "ratio_stderr": error * 1.6,
        },
        "windows": windows,
    }


def divergence(rng, on, scale, ppl):
    values = sorted(min(rng.lognormvariate(math.log(scale) - 1.1, 1.48), 9.0) for _ in range(on["tokens"]))
    n = len(values)
    mean = sum(values) / n
    stderr = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)

    def at(share, of=values):
        place = share * (len(of) - 1)
        low = int(place)
        return of[low] + (place - low) * (of[min(low + 1, len(of) - 1)] - of[low])

    deltas = sorted(rng.gauss(-0.003, 0.02) * (1 + 4 * (rng.random() < 0.1)) for _ in range(n))
    mean_delta = sum(deltas) / n
    rms = math.sqrt(sum(d * d for d in deltas) / n)
    same = 1 - 2.2 * math.sqrt(mean) * 0.25
    counts = [0] * (len(EDGES) - 1)
    below = sum(v < EDGES[0] for v in values)
    for v in values:
        place = sum(edge <= v for edge in EDGES) - 1
        if 0 <= place < len(counts):
            counts[place] += 1
    return {
        "corpus": on,
        "figures": {
            "kl": {
                "mean": mean, "stderr": stderr, "median": at(0.5), "p90": at(0.9), "p95": at(0.95), "p99": at(0.99),
                "p99_9": at(0.999), "max": values[-1],
            },
            "same_top": {"share": same, "stderr": math.sqrt(same * (1 - same) / n)},
            "delta_p": {
                "mean": mean_delta, "stderr": rms / math.sqrt(n), "rms": rms, "rms_stderr": rms / math.sqrt(2 * n),
                "min": deltas[0], **{k: at(s, deltas) for k, s in (("p1", 0.01), ("p5", 0.05), ("p10", 0.1))},
                "median": at(0.5, deltas), **{k: at(s, deltas) for k, s in (("p90", 0.9), ("p95", 0.95), ("p99", 0.99))},
                "max": deltas[-1],
            },
            "perplexity": {
                "reference": ppl["reference"], "artifact": ppl["artifact"], "ratio": ppl["ratio"],
                "ratio_stderr": ppl["ratio_stderr"], "log_ratio": math.log(ppl["ratio"]),
                "log_ratio_stderr": ppl["ratio_stderr"] / ppl["ratio"],
            },
            "positions": n,
        },
        "histogram": {"edges": EDGES, "counts": counts, "below": below, "above": 0, "not_finite": 0},
    }


KINDS = [
    ("self_attn.q_proj", 0.075), ("self_attn.k_proj", 0.07), ("self_attn.v_proj", 0.11), ("self_attn.o_proj", 0.10),
    ("mlp.gate_proj", 0.09), ("mlp.up_proj", 0.105), ("mlp.down_proj", 0.13),
]


def modules(rng, factor):
    out = []
    for layer in range(LAYERS):
        depth = 0.75 + 0.5 * layer / LAYERS + (0.5 if layer in (0, LAYERS - 1) else 0)
        for kind, size in KINDS:
            bits = 8.5 if kind.endswith("down_proj") and layer < 2 else 4.5
            error = size * factor * depth * rng.lognormvariate(0, 0.16) * (0.06 if bits > 8 else 1)
            out.append({
                "module": f"model.layers.{layer}.{kind}", "layer": layer, "kind": kind.split(".")[1],
                "output_error": error, "weight_error": error * 0.9 + 0.004, "bits": bits,
            })
    return out


def grid(rng, size, hot=()):
    return [
        [size * rng.lognormvariate(0, 0.3) * (0.8 + 0.5 * layer / LAYERS) * (9 if (layer, head) in hot else 1)
         for head in range(HEADS)]
        for layer in range(LAYERS)
    ]


def cache(rng, on):
    hot = {(0, 1), (0, 2), (1, 1), (27, 0)}
    rows = [
        ("fp8", "unit", 0.0009, 1.0031, 0.041, hot), ("fp8", "calibrated", 0.00031, 1.0007, 0.026, ()),
        ("fp8_e5m2", "unit", 0.0017, 1.0042, 0.062, ()), ("int8", "dynamic", 0.00006, 1.0002, 0.0061, ()),
    ]
    size = {"fp8": 1.0, "fp8_e5m2": 1.0, "int8": 1.0625}
    types = [
        {
            "kind": kind, "scales": scales, "bytes_per_token": 2 * LAYERS * HEADS * 64 * size[kind],
            "mean_kl": kl, "mean_kl_stderr": kl * 0.03, "perplexity": 23.98 * ratio, "ratio": ratio,
            "ratio_stderr": 0.0004, "greedy_agreement": 1 - 0.9 * math.sqrt(kl),
            "errors": {
                "keys": grid(rng, error, where), "values": grid(rng, error * 1.1), "output": grid(rng, error * 0.7, where),
            },
        }
        for kind, scales, kl, ratio, error, where in rows
    ]
    return {
        "corpus": on, "baseline": "f16", "baseline_perplexity": 23.98, "layers": LAYERS, "kv_heads": HEADS, "types": types,
    }


def acceptance(role, target, draft, alpha, k, cost, factor):
    drafts = 4_000
    steps = [alpha * (1 - 0.02 * i) for i in range(k)]
    positions = [math.prod(steps[: i + 1]) for i in range(k)]
    counts = [round(p * drafts) for p in positions]
    accepted, drafted = sum(counts), drafts * k
    speedups = []
    for n in range(1, 9):
        length = (1 - alpha ** (n + 1)) / (1 - alpha)
        expected = length / (n * cost + 1)
        speedups.append({
            "k": n, "expected_length": length, "measured_length": 1 + (length - 1) * 0.96, "expected": expected,
            "measured": expected * factor,
        })
    return {
        "role": role, "target": target, "draft": draft, "k": k, "temperature": 1.0, "drafted": drafted,
        "accepted": accepted, "drafts": drafts, "rate": accepted / drafted, "rate_stderr": 0.0042,
        "mean_length": 1 + accepted / drafts, "per_position": [c / drafts for c in counts], "alpha": alpha,
        "alpha_stderr": 0.0019, "greedy_agreement": alpha - 0.021, "cost": cost, "speedups": speedups, "prompts": 64,
        "tokens": 2048, "looped_tokens": 3, "text_sha256": sha("prompts"),
    }


def report(label, seed, increase, kl, worse=1.0):
    rng = random.Random(seed)
    name = "SmolLM2-135M-gptq-w4g64"
    wiki, code = corpus("heldout", 48), corpus("code", 16)
    ppl = [perplexity(rng, wiki, 23.5371, increase, 0.0021, 0.0719), perplexity(rng, code, 8.412, increase * 0.8, 0.0018, 0.055)]
    source = identity("SmolLM2-135M", "safetensors", [
        ("config.json", 704), ("generation_config.json", 111), ("model.safetensors", 269_060_552),
        ("tokenizer.json", 2_104_556), ("tokenizer_config.json", 3_764)], family="Llama 1 to 3, SmolLM2")
    embed = 49_152 * 576
    quantized = 106_168_320
    artifact_bytes = quantized * 45 // 80 + (embed + 35_136) * 2
    checks = [
        ("integrity", "pass", "all 7 files have the hashes that quantkit.json says"),
        ("side-files", "pass", "5 side files are those of the source, byte for byte"),
        ("chat-template", "pass", "the chat template is the source's"),
        ("scales", "pass", "210 modules: no scale is zero, NaN or infinite"),
        ("f16-range", "warn", "model.layers.1.mlp.down_proj reaches 41 216, 63 % of what f16 can hold; engines that "
                              "compute in f16 have little room"),
        ("label", "pass", "zero points are those of the format that is named"),
        ("cache-scales", "warn", "vLLM takes a scale of 1.0 for an fp8 cache where the artifact stores none: perplexity "
                                 "+0.31 % instead of +0.07 %; quantize with --kv-cache fp8"),
        ("source", "skipped", "the source's shards are not here to be hashed"),
    ]
    return {
        "schema": "quantkit-report/1", "tool": "quantkit 0.1.0", "label": label,
        "artifact": identity(name, "gptq", [
            ("config.json", 1_204), ("generation_config.json", 111), ("model.safetensors", artifact_bytes + 30_000),
            ("quantize_config.json", 271), ("tokenizer.json", 2_104_556), ("tokenizer_config.json", 3_764)],
            method="gptq", scheme="4 bits, group size 64, symmetric", bits=4.0, family="Llama 1 to 3, SmolLM2",
            options={"bits": 4, "group_size": 64, "sym": True, "grid": "hessian", "order": "group-aware", "sweeps": 1}),
        "reference": source,
        "draft": identity("quantkit-demo-draft", "safetensors", [("model.safetensors", 7_400_112)]),
        "device": "cpu", "seconds": 412.7,
        "accounting": {
            "quantized": {"tensors": 210, "parameters": quantized, "source_bytes": quantized * 2,
                          "artifact_bytes": quantized * 45 // 80},
            "copied": {"tensors": 62, "parameters": embed + 35_136, "source_bytes": (embed + 35_136) * 2,
                       "artifact_bytes": (embed + 35_136) * 2},
            "folded": {"tensors": 0, "parameters": 0, "source_bytes": 0, "artifact_bytes": 0},
            "dropped": {"tensors": 1, "parameters": embed, "source_bytes": embed * 2, "artifact_bytes": 0},
            "missing": {"tensors": 0, "parameters": 0, "source_bytes": 0, "artifact_bytes": 0},
            "source_bytes": 269_026_176, "artifact_bytes": artifact_bytes,
            "bits_per_weight": 8 * artifact_bytes / (quantized + embed + 35_136), "bits_per_quantized_weight": 4.5,
            "exceptions": [{"tensor": "lm_head.weight", "fate": "dropped", "note": "tied to the embedding"}],
            "tokens_seen": [
                {"module": f"model.layers.{layer}.{kind}", "inputs": 1_536 if kind == "mlp.down_proj" else 576,
                 "tokens": 65_536}
                for layer in range(LAYERS) for kind, _ in KINDS
            ],
            "weights_memory_bytes": artifact_bytes,
            "cache_memory": [
                {"kind": "f16", "bytes_per_token": 2 * LAYERS * HEADS * 64 * 2.0},
                {"kind": "fp8", "bytes_per_token": 2 * LAYERS * HEADS * 64 * 1.0},
                {"kind": "int8", "bytes_per_token": 2 * LAYERS * HEADS * 64 * 1.0625},
            ],
        },
        "perplexity": ppl,
        "divergence": [divergence(rng, wiki, kl, ppl[0]), divergence(rng, code, kl * 0.7, ppl[1])],
        "module_corpus": corpus("heldout", 8), "modules": modules(rng, worse),
        "cache": cache(rng, corpus("heldout", 16)),
        "acceptance": [
            acceptance("target", name, "quantkit-demo-draft", 0.712, 4, 0.21, 0.93),
            acceptance("draft", "SmolLM2-135M", name, 0.913, 4, 0.97, 0.95),
        ],
        "checks": [{"id": id, "status": status, "message": message} for id, status, message in checks],
        "consumers": [
            {"name": "vllm-0.33", "title": "vLLM 0.33", "loads": True},
            {"name": "vllm-0.10", "title": "vLLM 0.10", "loads": True},
            {"name": "sglang-0.5", "title": "SGLang 0.5", "loads": True},
            {"name": "transformers-5", "title": "transformers 5", "loads": True},
            {"name": "autoawq-0.2", "title": "AutoAWQ 0.2", "loads": False,
             "refusals": ["it reads AWQ artifacts alone, and this is GPTQ"]},
        ],
        "calibration": {"description": "builtin, 128 windows of 512 tokens, in order", "tokens_sha256": sha("calibration"),
                        "tokens": 65_536},
    }


def main():
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, made in (
        ("baseline", report("3f8c2d1", 1, 0.0187, 0.031)),
        ("report", report("a91e07b", 2, 0.0231, 0.036, 1.06)),
    ):
        (out / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")


main()
