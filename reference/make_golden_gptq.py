"""Golden GPTQ results in float64, plain loops, one column at a time: codes, scales, zeros, groups, loss.

The definition (Frantar et al. 2022, algorithm 1, unblocked):
  H = 2/n X'X + damp*mean(diag) I ; U = upper Cholesky factor of inverse(H)
  for each column i in processing order: q_i = grid(w_i); e = (w_i - deq(q_i)) / U_ii; w_j -= e U_ij for j > i
Grid of a group, found from the weights as updated when its first column is reached (static groups: from the originals):
  sym : scale = f16(2*max|w| / (2^b-1)), zero = 2^(b-1)
  asym: lo = min(w,0), hi = max(w,0); scale = f16((hi-lo)/(2^b-1)), zero = clamp(rint(-lo/scale), 0, 2^b-1)
  an all-zero group has scale 1; code = clamp(rint(w/scale) + zero, 0, 2^b-1), rint = ties to even
Orders: natural; desc_act = columns by falling diag(H) (stable), groups formed in that order; desc_act_static = the same
order, groups of the original columns; gar = within each group by falling diag(H), groups by falling max diag(H) (stable).

OUT/golden.safetensors: W f16 [rows, cols], H f32 [cols, cols], and for each setting NAME: NAME.codes u8 [rows, cols],
NAME.scales f16 [groups, rows], NAME.zeros u8 [groups, rows], NAME.g_idx i32 [cols] (all in the original column order).
OUT/index.json: NAME -> bits, group_size (-1 = all columns), sym, order, damp, loss (sum of e^2/2) and output_error
(the trace of D H D', D = W - dequantized without the dead column). With --check DIR the results are first compared with
stored ones (NAME.npz, W.npy, H.npy, index.json), which are then written in place of the computed ones.

usage: make_golden_gptq.py OUT [--check DIR]      (in the project: tests/golden/gptq)
"""
import argparse, json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SETTINGS = [(4, 64, True, "natural"), (4, 64, False, "natural"), (4, 128, True, "gar"), (4, 64, True, "desc_act"),
            (4, 64, False, "desc_act"), (4, 64, True, "desc_act_static"), (3, 32, False, "natural"), (2, 64, False, "gar"),
            (8, -1, True, "natural"), (4, 32, True, "gar"), (3, 64, True, "desc_act"), (2, 32, False, "desc_act_static")]
DEAD = 17

def problem():
    rng = np.random.default_rng(7)
    rows, cols, tokens = 48, 256, 2048
    mix = rng.standard_normal((cols, cols)) * (rng.random((cols, cols)) < 0.1) + np.eye(cols)
    X = (rng.standard_normal((tokens, cols)) @ mix * np.exp(rng.standard_normal(cols))).astype(np.float32)
    X[:, DEAD] = 0                                      # a dead input channel
    W = (rng.standard_t(4, (rows, cols)) * 0.03).astype(np.float16)
    W[5, 64:128] = np.abs(W[5, 64:128])                 # a group without negative weights
    W[6, 0:64] = 0                                      # an all-zero group
    H = 2.0 / tokens * X.astype(np.float64).T @ X.astype(np.float64)
    return W, H.astype(np.float32)

def grid(w, bits, sym):
    top = 2**bits - 1
    if sym:
        scale, zero = 2 * np.abs(w).max(1) / top, np.full(len(w), 2 ** (bits - 1))
    else:
        lo, hi = np.minimum(w.min(1), 0), np.maximum(w.max(1), 0)
        scale = (hi - lo) / top
    scale = np.where(scale == 0, 1.0, scale).astype(np.float16).astype(np.float64)
    if not sym:
        zero = np.clip(np.rint(-lo / scale), 0, top)
    return scale, zero.astype(np.float64)

def processing_order(diag, G, order):
    cols = len(diag)
    if order == "natural":
        return np.arange(cols)
    if order == "gar":
        blocks = [np.arange(s, min(s + G, cols)) for s in range(0, cols, G)]
        inner = [b[np.argsort(-diag[b], kind="stable")] for b in blocks]
        return np.concatenate([inner[k] for k in np.argsort([-diag[b].max() for b in blocks], kind="stable")])
    return np.argsort(-diag, kind="stable")

def gptq(W, H, bits, group, sym, order, damp=0.01):
    rows, cols = W.shape
    G = cols if group == -1 else group
    diag = H.diagonal().copy()
    W, H = W.astype(np.float64), H.astype(np.float64)
    dead = diag == 0
    H[dead, dead] = 1
    W[:, dead] = 0
    H[np.diag_indices(cols)] += damp * H.diagonal().mean()
    perm = processing_order(diag, G, order)
    original, W, H = W.copy(), W[:, perm], H[np.ix_(perm, perm)]
    U = np.linalg.cholesky(np.linalg.inv(H)).T
    group_of = np.arange(cols) // G if order in ("natural", "desc_act") else perm // G
    grids, codes, loss = {}, np.zeros((rows, cols)), 0.0
    for i in range(cols):
        g = group_of[i]
        if g not in grids:
            source = original[:, g * G:(g + 1) * G] if order == "desc_act_static" else W[:, group_of == g]
            grids[g] = grid(source, bits, sym)
        scale, zero = grids[g]
        codes[:, i] = np.clip(np.rint(W[:, i] / scale) + zero, 0, 2**bits - 1)
        err = (W[:, i] - (codes[:, i] - zero) * scale) / U[i, i]
        loss += 0.5 * (err**2).sum()
        W[:, i + 1:] -= np.outer(err, U[i, i + 1:])
    back = np.argsort(perm)
    found = [grids[g] for g in sorted(grids)]
    return {"codes": codes[:, back].astype(np.uint8), "scales": np.stack([s for s, _ in found]).astype(np.float16),
            "zeros": np.stack([z for _, z in found]).astype(np.uint8), "g_idx": group_of[back].astype(np.int32)}, loss

def output_error(W, H, r):
    g = r["g_idx"]
    D = W.astype(np.float64) - (r["codes"] - r["zeros"].T.astype(np.float64)[:, g]) * r["scales"].T.astype(np.float64)[:, g]
    D[:, DEAD] = 0
    return float(np.einsum("ij,jk,ik->", D, H.astype(np.float64), D))

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out", type=Path)
    ap.add_argument("--check", type=Path, help="stored results to compare with and to keep")
    args = ap.parse_args()
    W, H = problem()
    if args.check:
        stored_H = np.load(args.check / "H.npy")
        print("W differs in", (np.load(args.check / "W.npy") != W).sum(), "values, H in", (stored_H != H).sum(),
              "values, by at most", np.abs(stored_H - H).max() / H.max(), "of its maximum")
        W, H = np.load(args.check / "W.npy"), stored_H
    tensors, index = {"W": W, "H": H}, {}
    for bits, group, sym, order in SETTINGS:
        name = f"w{bits}-g{group}-{'sym' if sym else 'asym'}-{order}"
        result, loss = gptq(W, H, bits, group, sym, order)
        note = ""
        if args.check:
            stored = dict(np.load(args.check / f"{name}.npz"))
            note = "differing values: " + " ".join(f"{k} {(stored[k] != v).sum()}" for k, v in result.items())
            assert all(stored[k].dtype == v.dtype and stored[k].shape == v.shape for k, v in result.items())
            result = stored
        index[name] = {"bits": bits, "group_size": group, "sym": sym, "order": order, "damp": 0.01, "loss": loss,
                       "output_error": output_error(W, H, result)}
        tensors |= {f"{name}.{k}": np.ascontiguousarray(result[k]) for k in ("codes", "scales", "zeros", "g_idx")}
        print(name, round(loss, 4), round(index[name]["output_error"], 4), note)
    if args.check:
        stored = json.loads((args.check / "index.json").read_text())
        assert stored.keys() == index.keys()
        worst = max(abs(stored[n][k] / index[n][k] - 1) for n in index for k in ("loss", "output_error"))
        print("stored losses and errors differ by at most", worst, "relative")
        index = stored
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, args.out / "golden.safetensors")
    (args.out / "index.json").write_text(json.dumps(index, indent=1) + "\n")

if __name__ == "__main__":
    main()
