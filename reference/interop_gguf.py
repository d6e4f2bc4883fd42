"""Perplexity of quantkit's GGUF files in llama.cpp beside quantkit's own.

For each type it writes a file with `quantkit gguf`, runs it in llama.cpp, and prints three numbers:
  quantkit   `quantkit eval ppl FILE --convention llamacpp`: float32 arithmetic on the weights as stored
  expanded   llama.cpp on `quantkit gguf FILE --type F32`, float32 keys and values: the weights and nothing else.
             Every tensor of that file is first compared with what the Python package gguf decodes
             from the quantized one, bit for bit
  llama.cpp  llama.cpp on FILE itself, as its users run it: 16-bit keys and values, and activations
             rounded to 8 bits where the weights are quantized
Convention, that of llama-perplexity: the whole text is tokenized once (by llama.cpp here), windows of 512 that do not
overlap, BOS at the start of each if the model wants one, the second half scored.
Exits with 1 if `expanded`, or for F32, F16 and BF16 `llama.cpp` too, is more than 0.2 % away from `quantkit`, or if a
tensor differs. The column `llama.cpp` of other types is shown, not judged.

A TYPE may be followed by +im (with --imatrix FILE) and +ef (--error-feedback too): Q4_K_M+im, Q4_0+im+ef. pure:TYPE
gives every tensor that type, and --calib and --chunks are what error feedback calibrates on.

usage: interop_gguf.py QUANTKIT MODEL --text FILE [--imatrix FILE] [--calib FILE] [--chunks 32] [--windows 16] TYPE ...
"""
import argparse, ctypes, json, math, os, subprocess, sys, tempfile
from pathlib import Path

import llama_cpp
import numpy as np
from gguf import GGUFReader, dequantize

TOLERANCE = 0.002
silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))

def windows_nll(path, text, window, count, cache, threads):
    """-> each window's sum of negative log likelihoods over its second half."""
    llm = llama_cpp.Llama(str(path), n_ctx=window, n_batch=window, n_ubatch=window, logits_all=True, verbose=False,
                          n_threads=threads, n_threads_batch=threads, type_k=cache, type_v=cache)
    tokens = llm.tokenize(text, add_bos=True, special=False)
    bos = llm.tokenize(b"", add_bos=True, special=False)    # what the model has put before a text: [] or [BOS]
    if len(tokens) < window * count:
        sys.exit(f"only {len(tokens)} tokens")
    first, sums = window // 2, []
    for w in range(count):
        ids = tokens[w * window:(w + 1) * window]
        llm.reset()
        llm.eval(bos + ids[len(bos):])
        logits = llm.scores[first:window - 1].astype(np.float64)
        top = logits.max(-1)
        log_z = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        sums.append(float((log_z - logits[np.arange(len(logits)), ids[first + 1:]]).sum()))
    llm.close()
    return sums

def perplexity(sums, window):
    return math.exp(sum(sums) / (len(sums) * (window - window // 2 - 1)))

def different_tensors(file, expanded):
    """Names of tensors whose values in `expanded` are not bit for bit those the package gguf decodes from `file`."""
    other = {t.name: t for t in GGUFReader(expanded).tensors}
    tensors = GGUFReader(file).tensors
    if {t.name for t in tensors} != other.keys():
        return ["their names"]
    def same(t):
        mine = other[t.name].data
        theirs = dequantize(t.data, t.tensor_type)
        return mine.dtype == np.float32 and mine.shape == theirs.shape and (mine.view(np.uint32) == theirs.astype(np.float32).view(np.uint32)).all()
    return [t.name for t in tensors if not same(t)]

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("quantkit")
    ap.add_argument("model")
    ap.add_argument("types", nargs="+", metavar="TYPE")
    ap.add_argument("--text", type=Path, required=True)
    ap.add_argument("--imatrix")
    ap.add_argument("--calib")
    ap.add_argument("--chunks", default="32")
    ap.add_argument("--windows", type=int, default=16)
    ap.add_argument("--window", type=int, default=512)
    ap.add_argument("--threads", type=int, default=os.cpu_count(), help="of llama.cpp")
    ap.add_argument("--json", type=Path, help="also write every window's figures here")
    args = ap.parse_intermixed_args()
    text, record, failures = args.text.read_bytes(), {}, []

    def quantkit(*arguments):
        run = subprocess.run([args.quantkit, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
        if run.returncode:
            sys.exit(f"quantkit {' '.join(map(str, arguments))}: exit code {run.returncode}")
        return run.stdout

    print("| type | bytes | quantkit | expanded, in llama.cpp | | file, in llama.cpp | |\n|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file, wide = Path(folder, "file.gguf"), Path(folder, "wide.gguf")
        for spec in args.types:
            kind, *extras = spec.split("+")
            options = ["--pure"] if kind.startswith("pure:") else []
            kind = kind.removeprefix("pure:")
            if "im" in extras:
                options += ["--imatrix", args.imatrix]
            if "ef" in extras:
                options += ["--error-feedback", "--chunks", args.chunks] + (["--calib", args.calib] if args.calib else [])
            quantkit("gguf", args.model, "--type", kind, "--out", file, "-q", *options)
            own = json.loads(quantkit("eval", "ppl", file, "--convention", "llamacpp", "--text", args.text, "--window", args.window,
                                      "--max-windows", args.windows, "--json", "-q"))["perplexity"]
            sums = windows_nll(file, text, args.window, args.windows, llama_cpp.GGML_TYPE_F16, args.threads)
            theirs = perplexity(sums, args.window)
            bytes_ = file.stat().st_size
            quantkit("gguf", file, "--type", "F32", "--out", wide, "-q")
            wrong = different_tensors(file, wide)
            file.unlink()
            wide_sums = windows_nll(wide, text, args.window, args.windows, llama_cpp.GGML_TYPE_F32, args.threads)
            expanded = perplexity(wide_sums, args.window)
            wide.unlink()
            record[spec] = {"bytes": bytes_, "quantkit": own, "expanded": expanded, "llama.cpp": theirs, "nll": sums, "nll_expanded": wide_sums}
            print(f"| {spec} | {bytes_} | {own:.4f} | {expanded:.4f} | {expanded / own - 1:+.3%} | {theirs:.4f} | {theirs / own - 1:+.2%} |", flush=True)
            judged = [expanded] + [theirs] * (kind in ("F32", "F16", "BF16"))
            if any(not abs(p / own - 1) <= TOLERANCE for p in judged):
                failures.append(f"{spec}: perplexities differ by more than {TOLERANCE:.1%}")
            if wrong:
                failures.append(f"{spec}: quantkit and gguf decode differently: {', '.join(wrong[:5])} ({len(wrong)} tensors)")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit("\n".join(failures) or 0)

if __name__ == "__main__":
    main()
