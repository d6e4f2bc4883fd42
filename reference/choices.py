"""What each choice of method, grid and order gives: runs quantkit, measures, prints a Markdown table.

Each row is quantized, re-opened and measured on every text (16 windows of 512 by default, convention
gptq, no BOS unless the tokenizer adds one). Rows already in the cache file are not run again.

usage: choices.py QUANTKIT MODEL --group-size 64 --text test.txt --text wiki.test.raw [--calib valid.txt]
                   [--nsamples 32] [--seqlen 512] [--bits 4,3,2] [--rows NAME,...] [--cache FILE]
"""
import argparse, json, subprocess, sys, tempfile
from pathlib import Path

ROWS = {
    "RTN, max-abs grid": ["rtn", "--grid", "max-abs"],
    "RTN, least squared error": ["rtn", "--grid", "mse"],
    "RTN, Hessian-weighted": ["rtn", "--grid", "hessian"],
    "GPTQ, max-abs grid": ["gptq", "--grid", "max-abs", "--sweeps", "0"],
    "GPTQ, Hessian-weighted": ["gptq", "--sweeps", "0"],
    "+ 1 sweep": ["gptq", "--sweeps", "1"],
    "+ drift correction": ["gptq", "--sweeps", "0", "--drift-correction"],
    "+ both": ["gptq", "--sweeps", "1", "--drift-correction"],
    "+ both, asymmetric": ["gptq", "--sweeps", "1", "--drift-correction", "--asym"],
    "static groups, activation order, + both": ["gptq", "--order", "activation", "--static-groups", "--sweeps", "1", "--drift-correction"],
}

def run(args, command):
    answer = subprocess.run([args.quantkit, "--quiet", *command, "--json"], capture_output=True, text=True)
    if answer.returncode:
        sys.exit(f"{command}: {answer.stderr}")
    return json.loads(answer.stdout)

def measure(args, model):
    found = []
    for text in args.text:
        r = run(args, ["eval", "ppl", model, "--text", text, "--window", str(args.window), "--max-windows", str(args.windows)])
        found.append(r["perplexity"])
    return found

def main():
    p = argparse.ArgumentParser()
    p.add_argument("quantkit"); p.add_argument("model"); p.add_argument("--group-size", default="64")
    p.add_argument("--text", action="append", required=True); p.add_argument("--calib"); p.add_argument("--nsamples", default="32")
    p.add_argument("--seqlen", default="512"); p.add_argument("--bits", default="4,3,2"); p.add_argument("--rows")
    p.add_argument("--window", type=int, default=512); p.add_argument("--windows", type=int, default=16); p.add_argument("--cache", type=Path)
    args = p.parse_args()
    cache = json.loads(args.cache.read_text()) if args.cache and args.cache.exists() else {}
    names = args.rows.split(";") if args.rows else list(ROWS)
    texts = " | ".join(Path(t).name for t in args.text)
    if "FP" not in cache:
        cache["FP"] = measure(args, args.model)
    print(f"| bits | method | {texts} |\n|{'---|' * (2 + len(args.text))}")
    print("| 16 | source | " + " | ".join(f"{x:.3f}" for x in cache["FP"]) + " |", flush=True)
    for bits in args.bits.split(","):
        for name in names:
            key = f"{bits} {name}"
            if key not in cache:
                sees_data = "gptq" in ROWS[name] or "hessian" in ROWS[name]
                data = [] if not sees_data else ["--nsamples", args.nsamples, "--seqlen", args.seqlen] + (["--calib", args.calib] if args.calib else [])
                with tempfile.TemporaryDirectory() as dir:
                    out = str(Path(dir) / "artifact")
                    run(args, [*ROWS[name], args.model, "--bits", bits, "--group-size", args.group_size, "--out", out, "--no-eval", *data])
                    cache[key] = measure(args, out)
                if args.cache:
                    args.cache.write_text(json.dumps(cache, indent=1))
            print(f"| {bits} | {name} | " + " | ".join(f"{x:.3f}" for x in cache[key]) + " |", flush=True)

main()
