"""quantkit's blocks beside ggml's own, byte for byte: every type that quantkit encodes, with importance and without.

Makes blocks of seventeen kinds from a seed (normal, heavy tails, equal values, zeros, one outlier, few levels, tiny, huge,
...) as the gate of a model of one layer, encodes them with `quantkit gguf`, reads them with the Python package gguf,
and compares them with what `ggml_quantize_chunk` writes for the same rows and importance.
Exits with 1 if a block differs, other than two kinds that are meant to (see `intended`); --save keeps those blocks.

ggml: a shared library of ggml-base, called through ctypes. That of the wheel which `pip install llama-cpp-python==0.3.36`
builds from source (LIB/llama_cpp/lib/libggml-base.so; ggml 0.25.3), or only its part: unpack the source archive and run
in vendor/llama.cpp/ggml/src, with a `ggml-version.h` that defines GGML_VERSION and GGML_COMMIT as strings,
    gcc -O3 -DNDEBUG -std=gnu11 -fPIC -D_GNU_SOURCE -DGGML_BUILD -DGGML_SHARED -I. -I../include -c ggml.c ggml-quants.c ggml-alloc.c
    g++ -O3 -DNDEBUG -std=gnu++17 -fPIC -D_GNU_SOURCE -DGGML_BUILD -DGGML_SHARED -I. -I../include -c ggml.cpp ggml-backend.cpp \
        ggml-backend-meta.cpp ggml-threading.cpp ggml-opt.cpp gguf.cpp
    g++ -shared -o libggml-base.so *.o -lm -lpthread
These are the flags of its CMake build: Release, no -march, no -ffast-math. On x86-64 each operation is then rounded by
itself. A build with -march=native may contract products and sums, and differs.

ggml 0.25.3 made the goldens. IQ1_M of ggml 0.21 and before sums in another order and differs in some blocks.

usage: compare_ggml_blocks.py LIBGGML_BASE QUANTKIT [--blocks 100000] [--seed 1] [--save DIR] [TYPE ...]
       compare_ggml_blocks.py LIBGGML_BASE --golden SAVED OUT
The second makes tests/golden/gguf/edges of what --save kept: a block of each kind of each file as edges.npy (f32
[blocks, 2, 256]: values, importance) and what ggml writes for each block alone, TYPE[.imatrix].bin.
"""
import argparse, ctypes, json, shutil, struct, subprocess, sys, tempfile
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from safetensors.numpy import save_file

DEMO = Path(__file__).resolve().parent.parent / "calib/demo/target"
# Type numbers, and which modes exist: without importance, with it.
BOTH, PLAIN, WITH = (False, True), (False,), (True,)
TYPES = {
    "F16": (1, PLAIN), "BF16": (30, PLAIN), "Q4_0": (2, BOTH), "Q4_1": (3, BOTH), "Q5_0": (6, BOTH), "Q5_1": (7, BOTH),
    "Q8_0": (8, BOTH), "Q2_K": (10, BOTH), "Q3_K": (11, BOTH), "Q4_K": (12, BOTH), "Q5_K": (13, BOTH), "Q6_K": (14, BOTH),
    "IQ4_NL": (20, BOTH), "IQ4_XS": (23, BOTH), "IQ3_S": (21, BOTH), "IQ3_XXS": (18, BOTH), "IQ2_S": (22, BOTH),
    "IQ2_XS": (17, WITH), "IQ2_XXS": (16, WITH), "IQ1_S": (19, WITH), "IQ1_M": (29, BOTH), "TQ1_0": (34, PLAIN),
    "TQ2_0": (35, PLAIN), "MXFP4": (39, PLAIN),
}
# quantkit asks for importance where llama-quantize does: these are compared with importance alone.
ASKED = {"IQ3_XXS", "IQ2_S", "IQ1_M"}
COLS = 2048
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 1}


def powers(rng, shape, low, high):
    return np.float32(10) ** rng.uniform(low, high, shape).astype(np.float32)


def kinds(rng):
    """Functions from n to n blocks of 256 values, by name."""
    normal = lambda n: rng.standard_normal((n, 256)).astype(np.float32)
    def outlier(n, rest):
        x = rest * normal(n)
        x[np.arange(n), rng.integers(0, 256, n)] = rng.choice([-3, 3], n)
        return x
    def sparse(n):
        return normal(n) * (rng.random((n, 256)) < 0.05)
    def odd(n):
        """One minus sign in eight, at the largest magnitude."""
        x = np.abs(normal(n)).reshape(n, 32, 8)
        x[:, :, 0] = -4 * x.max(axis=2)
        return x.reshape(n, 256)
    return {
        "normal": lambda n: np.float32(0.02) * normal(n),
        "student": lambda n: np.float32(0.01) * rng.standard_t(2, (n, 256)).astype(np.float32),
        "laplace": lambda n: rng.laplace(0, 0.02, (n, 256)).astype(np.float32),
        "equal": lambda n: np.repeat(normal(n)[:, :1], 256, axis=1),
        "equal32": lambda n: np.repeat(normal(n)[:, ::32], 32, axis=1),
        "zeros": lambda n: np.zeros((n, 256), np.float32) * np.where(rng.random((n, 1)) < 0.5, -1, 1),
        "sparse": sparse,
        "outlier": lambda n: outlier(n, np.float32(0.01)),
        "alone": lambda n: outlier(n, np.float32(0)),
        "positive": lambda n: np.abs(normal(n)),
        "negative": lambda n: -np.abs(normal(n)),
        "odd": odd,
        "levels": lambda n: rng.integers(-9, 10, (n, 256)) * np.float32(2) ** rng.integers(-12, 4, (n, 1)),
        "scales": lambda n: normal(n) * np.repeat(powers(rng, (n, 16), -4, 1), 16, axis=1),
        "tiny": lambda n: normal(n) * powers(rng, (n, 1), -30, -4),
        "huge": lambda n: normal(n) * powers(rng, (n, 1), 1, 4),
        "denormal": lambda n: normal(n) * powers(rng, (n, 1), -44, -36),
    }


def matrix(rng, rows):
    """-> [rows, COLS] values and the kind of each block."""
    made, count = kinds(rng), rows * COLS // 256
    of = rng.integers(0, len(made), count)
    x = np.empty((count, 256), np.float32)
    for k, make in enumerate(made.values()):
        x[of == k] = make(int((of == k).sum()))
    return x.reshape(rows, COLS), of, list(made)


def importance(rng):
    """One number a column: ordinary, all equal, some zero, all zero, over many magnitudes, large, small."""
    parts = [rng.standard_gamma(0.5, 256) + 1e-3, np.ones(256), rng.standard_gamma(0.5, 256) * (rng.random(256) < 0.7),
             np.zeros(256), np.exp(4 * rng.standard_normal(256)), rng.standard_gamma(0.2, 256),
             1e6 * rng.standard_gamma(0.5, 256), 1e-9 * rng.standard_gamma(0.5, 256)]
    return np.concatenate([parts[i % len(parts)] for i in range(COLS // 256)]).astype(np.float32)


def model(folder, rng, gate):
    """A checkpoint of one layer in float32 whose gate has the rows."""
    config = json.loads((DEMO / "config.json").read_text())
    inner = len(gate)
    config.update(hidden_size=COLS, intermediate_size=inner, num_hidden_layers=1, dtype="float32", tie_word_embeddings=True,
                  head_dim=COLS // 32, **HEADS)
    g = lambda *shape: (rng.standard_normal(shape) * 0.02).astype(np.float32)
    at, kv = "model.layers.0.", COLS // 32
    tensors = {"model.embed_tokens.weight": g(config["vocab_size"], COLS), "model.norm.weight": np.ones(COLS, np.float32),
               at + "mlp.gate_proj.weight": gate, at + "mlp.up_proj.weight": np.zeros_like(gate),
               at + "mlp.down_proj.weight": np.zeros((COLS, inner), np.float32),
               at + "self_attn.q_proj.weight": g(COLS, COLS), at + "self_attn.o_proj.weight": g(COLS, COLS),
               at + "self_attn.k_proj.weight": g(kv, COLS), at + "self_attn.v_proj.weight": g(kv, COLS)}
    for name in ("input", "post_attention"):
        tensors[f"{at}{name}_layernorm.weight"] = np.ones(COLS, np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)


def write_dat(path, name, values):
    head = struct.pack("<ii", 1, len(name)) + name.encode() + struct.pack("<ii", 1, len(values))
    path.write_bytes(head + values.tobytes() + struct.pack("<ii", 1, 1) + b"x")


def quantkit(binary, folder, name, with_importance):
    out = folder / "out.gguf"
    out.unlink(missing_ok=True)
    command = [binary, "gguf", folder / "model", "--type", "F16", "--tensor-type", f"ffn_gate={name}", "-q", "--out", out]
    if with_importance:
        command += ["--imatrix", folder / "importance.dat"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    found = next(t for t in GGUFReader(out).tensors if t.name == "blk.0.ffn_gate.weight")
    return np.array(found.data).view(np.uint8).reshape(-1)


class Ggml:
    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        pointer, whole = ctypes.c_void_p, ctypes.c_int64
        self.lib.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, whole, whole, whole, pointer]
        self.lib.ggml_row_size.restype = ctypes.c_size_t
        self.lib.ggml_row_size.argtypes = [ctypes.c_int, whole]

    def quantize(self, number, rows, importance):
        out = np.zeros(self.lib.ggml_row_size(number, rows.shape[1]) * len(rows), np.uint8)
        self.lib.ggml_quantize_init(number)
        weights = None if importance is None else importance.ctypes.data
        size = self.lib.ggml_quantize_chunk(number, rows.ctypes.data, out.ctypes.data, 0, len(rows), rows.shape[1], weights)
        assert size == len(out), (number, size, len(out))
        return out


def intended(name, blocks, got, want):
    """Blocks in which quantkit means to differ, where they differ just as told here.

    IQ3_S: ggml's writer does not skip the places of a run of 32 zeros, so that points and signs of the runs after it come
    to lie where decoders look for earlier ones. Moved there, quantkit's bytes are ggml's.
    MXFP4: below 2^-125 the exponent of ggml is negative and wraps in its byte; quantkit writes 0."""
    runs = np.abs(blocks).reshape(-1, 8, 32).max(axis=2)
    if name == "MXFP4":
        return ((runs > 0) & (runs < 2.0 ** -125)).any(axis=1)
    if name != "IQ3_S":
        return np.zeros(len(blocks), bool)
    moved = got.copy()
    moved[:, 2:66] = moved[:, 74:106] = 0
    for block, (filled, own) in enumerate(zip(runs > 0, got)):
        for to, at in enumerate(np.flatnonzero(filled)):
            moved[block, 2 + 8 * to:10 + 8 * to] = own[2 + 8 * at:10 + 8 * at]
            moved[block, 74 + 4 * to:78 + 4 * to] = own[74 + 4 * at:78 + 4 * at]
    return (moved == want).all(axis=1)


def golden(ggml, saved, out):
    """A block of each kind that differed in each type, and what ggml writes for all of them in all types that did."""
    blocks, kinds = [], set()
    for path in sorted(saved.glob("*.npz")):
        name, mode = path.stem.split("_with_importance")[0], "_with_importance" in path.stem
        kinds.add((name, mode))
        with np.load(path) as file:
            for i in np.unique(file["kind"], return_index=True)[1]:
                weights = file["importance"][i] if mode else np.ones(256, np.float32)
                blocks.append(np.stack([file["values"][i], weights]))
    blocks = np.unique(np.array(blocks, np.float32), axis=0)
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / "edges.npy", blocks)
    for name, mode in sorted(kinds):
        rows = [ggml.quantize(TYPES[name][0], np.ascontiguousarray(x[None]), np.ascontiguousarray(w) if mode else None)
                for x, w in blocks]
        (out / f"{name}{'.imatrix' if mode else ''}.bin").write_bytes(np.concatenate(rows).tobytes())
    print(f"{len(blocks)} blocks, {len(kinds)} files")


def main():
    if sys.argv[2:3] == ["--golden"]:
        return golden(Ggml(sys.argv[1]), Path(sys.argv[3]), Path(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("quantkit", type=Path)
    parser.add_argument("types", nargs="*", default=list(TYPES), metavar="TYPE")
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks of 256 values")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="folder for the values and both programs' bytes of blocks that differ")
    args = parser.parse_args()
    ggml, rng, failed = Ggml(args.library), np.random.default_rng(args.seed), False
    rows = -(-args.blocks * 256 // COLS // 256) * 256
    x, of, names = matrix(rng, rows)
    weights = importance(rng)
    print(f"{rows * COLS // 256} blocks of 256 values, seed {args.seed}")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        model(folder / "model", rng, x)
        write_dat(folder / "importance.dat", "blk.0.ffn_gate.weight", weights)
        for name in args.types:
            number, modes = TYPES[name]
            for mode in modes:
                if not mode and name in ASKED:
                    continue
                want = ggml.quantize(number, x, weights if mode else None).reshape(len(of), -1)
                got = quantkit(args.quantkit.resolve(), folder, name, mode).reshape(len(of), -1)
                differs = (want != got).any(axis=1)
                meant = differs & intended(name, x.reshape(-1, 256), got, want)
                wrong = np.flatnonzero(differs & ~meant)
                where = {names[k]: int((of[wrong] == k).sum()) for k in np.unique(of[wrong])}
                label = f"{name}{' with importance' if mode else ''}"
                print(f"{label:24} {len(wrong)} differ{f': {where}' if where else ''}"
                      f"{f', and {meant.sum()} as intended' if meant.any() else ''}", flush=True)
                failed |= len(wrong) > 0
                if args.save and len(wrong):
                    args.save.mkdir(parents=True, exist_ok=True)
                    part = weights.reshape(-1, 256)[wrong % (COLS // 256)] if mode else np.zeros((0, 256))
                    np.savez(args.save / f"{label.replace(' ', '_')}.npz", values=x.reshape(-1, 256)[wrong], importance=part,
                             ggml=want[wrong], quantkit=got[wrong], kind=of[wrong])
    sys.exit(failed)


if __name__ == "__main__":
    main()
