"""Quantize a checkpoint with llm-compressor on the CPU and say what it cost.

Recipes (--recipe), each with lm_head left alone and everything else as llm-compressor has it:
  w8a8       SmoothQuant of strength 0.8, then GPTQ to bytes, one scale an output channel; inputs by token
  w8a8-rtn   the same form by plain rounding; no calibration
  w4a16      GPTQ, 4 bits, symmetric, groups of --group-size
  awq        AWQ, 4 bits, asymmetric, groups of --group-size
  fp8        FP8_DYNAMIC: E4M3, one scale an output channel; inputs by token; no calibration
  fp8-static FP8: E4M3, one scale a weight; inputs by one scale that calibration finds
  fp8-block  FP8_BLOCK: E4M3, one scale a block of 128 x 128; inputs in groups of 128; no calibration

Calibration: the text is tokenized once without special tokens; the first --nsamples consecutive
windows of --seqlen tokens are used, in order. One line of JSON on stdout: wall and CPU seconds
(user + system, all threads) of the quantization alone and of the whole process (imports, loading
and saving included), and the peak resident memory. Everything else goes to stderr. AWQ pins its
cache for a GPU and fails where there is none; pinning is left out here, which changes no number.

usage: peer_llmcompressor.py MODEL OUT --recipe NAME --calib FILE [--nsamples 32] [--seqlen 512]
                             [--group-size 64] [--dtype auto|float32|float16|bfloat16]
"""
import argparse, json, os, resource, sys, time
from pathlib import Path

START = time.time()
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, AutoTokenizer

def cpu_seconds():
    use = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in use)

def four_bits(group_size, symmetric):
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group_size}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}

def recipe(name, group_size):
    whole = {"targets": "Linear", "ignore": ["lm_head"]}
    return {
        "w8a8": lambda: [SmoothQuantModifier(smoothing_strength=0.8), GPTQModifier(scheme="W8A8", **whole)],
        "w8a8-rtn": lambda: [QuantizationModifier(scheme="W8A8", **whole)],
        "w4a16": lambda: [GPTQModifier(**four_bits(group_size, True))],
        "awq": lambda: [AWQModifier(), QuantizationModifier(**four_bits(group_size, False))],
        "fp8": lambda: [QuantizationModifier(scheme="FP8_DYNAMIC", **whole)],
        "fp8-static": lambda: [QuantizationModifier(scheme="FP8", **whole)],
        "fp8-block": lambda: [QuantizationModifier(scheme="FP8_BLOCK", **whole)],
    }[name]()

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model", type=Path)
    ap.add_argument("out", type=Path)
    ap.add_argument("--recipe", choices=["w8a8", "w8a8-rtn", "w4a16", "awq", "fp8", "fp8-static", "fp8-block"], required=True)
    ap.add_argument("--calib", type=Path, required=True)
    ap.add_argument("--nsamples", type=int, default=32)
    ap.add_argument("--seqlen", type=int, default=512)
    ap.add_argument("--group-size", type=int, default=64)
    ap.add_argument("--dtype", default="auto", help="of the unquantized weights and the arithmetic")
    args = ap.parse_args()

    tok = AutoTokenizer.from_pretrained(args.model)
    ids = tok(args.calib.read_bytes().decode(), add_special_tokens=False)["input_ids"]
    if len(ids) < args.nsamples * args.seqlen:
        sys.exit(f"{args.calib}: {len(ids)} tokens are fewer than {args.nsamples} x {args.seqlen}")
    windows = [ids[i * args.seqlen:(i + 1) * args.seqlen] for i in range(args.nsamples)]
    calibration = Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * args.seqlen] * args.nsamples})
    data = {} if args.recipe in ("w8a8-rtn", "fp8", "fp8-block") else {
        "dataset": calibration, "num_calibration_samples": args.nsamples, "max_seq_length": args.seqlen,
        "shuffle_calibration_samples": False}

    if not torch.cuda.is_available():
        IntermediatesCache.pin_memory = lambda *_, **__: None
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=args.dtype if args.dtype == "auto" else getattr(torch, args.dtype))
    wall, cpu = time.time(), cpu_seconds()
    oneshot(model=model, processor=tok, recipe=recipe(args.recipe, args.group_size), **data)
    wall, cpu = time.time() - wall, cpu_seconds() - cpu
    model.save_pretrained(args.out, save_compressed=True)
    tok.save_pretrained(args.out)
    facts = {"group_size": args.group_size} if args.recipe in ("w4a16", "awq") else {}
    facts |= {"nsamples": args.nsamples, "seqlen": args.seqlen} if data else {}
    json.dump({"tool": "llm-compressor", "recipe": args.recipe} | facts
              | {"dtype": str(model.dtype).removeprefix("torch."),
                 "quantize_wall_s": round(wall, 1), "quantize_cpu_s": round(cpu, 1),
                 "process_wall_s": round(time.time() - START, 1), "process_cpu_s": round(cpu_seconds(), 1),
                 "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}, answer)
    answer.write("\n")
    answer.flush()

if __name__ == "__main__":
    main()
