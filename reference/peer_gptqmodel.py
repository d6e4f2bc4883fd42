"""Quantize a checkpoint with GPTQModel on the CPU, with its default settings, and say what it cost.

Calibration: the text is tokenized once without special tokens; the first --nsamples consecutive
windows of --seqlen tokens are used. Weights become --bits wide, symmetric. One line of JSON on
stdout: wall and CPU seconds (user + system, all threads) of the quantization alone and of the
whole process (imports, loading and saving included), and the peak resident memory. Everything
GPTQModel prints goes to stderr. Its own choice of --dtype is bfloat16 on a CPU, even for an FP16
checkpoint, whose other weights are then rounded to bfloat16 as well.

usage: peer_gptqmodel.py MODEL OUT --calib FILE [--nsamples 32] [--seqlen 512] [--bits 4] [--group-size 64]
                         [--desc-act] [--dtype auto|float32|float16|bfloat16]
"""
import argparse, json, os, resource, sys, time
from pathlib import Path

START = time.time()
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")        # its own choice fails on two cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from tokenizers import Tokenizer

def cpu_seconds():
    use = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in use)

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model", type=Path)
    ap.add_argument("out", type=Path)
    ap.add_argument("--calib", type=Path, required=True)
    ap.add_argument("--nsamples", type=int, default=32)
    ap.add_argument("--seqlen", type=int, default=512)
    ap.add_argument("--bits", type=int, default=4)
    ap.add_argument("--group-size", type=int, default=64)
    ap.add_argument("--desc-act", action="store_true")
    ap.add_argument("--dtype", default="auto", help="of the unquantized weights and the arithmetic")
    args = ap.parse_args()

    tok = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    ids = tok.encode(args.calib.read_bytes().decode(), add_special_tokens=False).ids
    if len(ids) < args.nsamples * args.seqlen:
        sys.exit(f"{args.calib}: {len(ids)} tokens are fewer than {args.nsamples} x {args.seqlen}")
    calibration = [{"input_ids": ids[i * args.seqlen:(i + 1) * args.seqlen], "attention_mask": [1] * args.seqlen}
                   for i in range(args.nsamples)]

    config = QuantizeConfig(bits=args.bits, group_size=args.group_size, sym=True, offload_to_disk=False,
                            **({"desc_act": True, "act_group_aware": False} if args.desc_act else {}))
    model = GPTQModel.load(str(args.model), config, device="cpu",
                              dtype=args.dtype if args.dtype == "auto" else getattr(torch, args.dtype))
    wall, cpu = time.time(), cpu_seconds()
    model.quantize(calibration, batch_size=1, backend=BACKEND.TORCH)
    wall, cpu = time.time() - wall, cpu_seconds() - cpu
    model.save(str(args.out))
    json.dump({"tool": "gptqmodel", "bits": args.bits, "group_size": args.group_size, "desc_act": args.desc_act,
               "dtype": str(model.model.dtype).removeprefix("torch."), "nsamples": args.nsamples, "seqlen": args.seqlen,
               "quantize_wall_s": round(wall, 1), "quantize_cpu_s": round(cpu, 1),
               "process_wall_s": round(time.time() - START, 1), "process_cpu_s": round(cpu_seconds(), 1),
               "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}, answer)
    answer.write("\n")
    answer.flush()

if __name__ == "__main__":
    main()
