"""Quantize a checkpoint with AutoAWQ (4 bits, asymmetric, GEMM layout) on the CPU and say what it cost.

Calibration: the text is tokenized once without special tokens; the first --nsamples consecutive
windows of --seqlen tokens are used, all at once. One line of JSON on stdout: wall and CPU seconds
(user + system, all threads) of the quantization alone and of the whole process (imports, loading
and saving included), and the peak resident memory. Everything else goes to stderr.

On a CPU, AutoAWQ 0.2.9 keeps the original weights of a search in tensors that the search then
multiplies in place, so that scales pile up and the model is destroyed without a word. The class
below gives it copies.

usage: peer_autoawq.py MODEL OUT --calib FILE [--nsamples 32] [--seqlen 512] [--group-size 64] [--no-clip]
                       [--dtype float32|float16|bfloat16]
"""
import argparse, json, os, resource, shutil, sys, time
from pathlib import Path

START = time.time()
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from awq import AutoAWQForCausalLM
from awq.quantize.quantizer import AwqQuantizer
from tokenizers import Tokenizer

def cpu_seconds():
    use = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in use)

class Quantizer(AwqQuantizer):
    def _compute_best_scale(self, x, w_mean, x_mean, module2inspect, *rest, **named):
        inner = module2inspect.state_dict
        module2inspect.state_dict = lambda: {name: t.clone() for name, t in inner().items()}
        try:
            return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *rest, **named)
        finally:
            del module2inspect.state_dict

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model", type=Path)
    ap.add_argument("out", type=Path)
    ap.add_argument("--calib", type=Path, required=True)
    ap.add_argument("--nsamples", type=int, default=32)
    ap.add_argument("--seqlen", type=int, default=512)
    ap.add_argument("--group-size", type=int, default=64)
    ap.add_argument("--no-clip", action="store_true", help="leave out the search for clipped ranges")
    ap.add_argument("--dtype", default="float32", help="of the unquantized weights and the arithmetic")
    args = ap.parse_args()

    tok = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    ids = tok.encode(args.calib.read_bytes().decode(), add_special_tokens=False).ids
    if len(ids) < args.nsamples * args.seqlen:
        sys.exit(f"{args.calib}: {len(ids)} tokens are fewer than {args.nsamples} x {args.seqlen}")
    windows = [ids[i * args.seqlen:(i + 1) * args.seqlen] for i in range(args.nsamples)]

    model = AutoAWQForCausalLM.from_pretrained(
        str(args.model), torch_dtype=getattr(torch, args.dtype), device_map="cpu", safetensors=True)
    wall, cpu = time.time(), cpu_seconds()
    model.quantize(None, quant_config={"w_bit": 4, "q_group_size": args.group_size, "zero_point": True, "version": "GEMM"},
                   calib_data=windows, apply_clip=not args.no_clip, max_calib_samples=args.nsamples,
                   max_calib_seq_len=args.seqlen, quantizer_cls=Quantizer)
    wall, cpu = time.time() - wall, cpu_seconds() - cpu
    model.save_quantized(str(args.out))
    for file in args.model.glob("tokenizer*.json"):
        shutil.copy(file, args.out)
    json.dump({"tool": "autoawq", "bits": 4, "group_size": args.group_size, "clip": not args.no_clip,
               "dtype": args.dtype, "nsamples": args.nsamples, "seqlen": args.seqlen,
               "quantize_wall_s": round(wall, 1), "quantize_cpu_s": round(cpu, 1),
               "process_wall_s": round(time.time() - START, 1), "process_cpu_s": round(cpu_seconds(), 1),
               "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}, answer)
    answer.write("\n")
    answer.flush()

if __name__ == "__main__":
    main()
