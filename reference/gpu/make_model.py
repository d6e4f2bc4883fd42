"""Writes a checkpoint of random weights in the shape of a 7B Llama, for timing.

    make_model.py OUT [--layers 32] [--vocab 32000]

bfloat16, one file a block. Weights are noise of a size that keeps activations moderate; the tokenizer knows bytes.
Needs numpy only.
"""

import argparse
import json
import pathlib

import numpy as np

HIDDEN, INNER, HEADS, DIM = 4096, 11008, 32, 128


def noise(rng, rows, cols, scale):
    """Random bfloat16 numbers, as their bits: normal enough for timing, and fast."""
    values = rng.random(rows * cols, dtype=np.float32)
    values -= 0.5
    values *= scale * np.sqrt(12.0)
    return (values.view(np.uint32) >> 16).astype(np.uint16).reshape(rows, cols)


def write(path, tensors):
    header, at = {}, 0
    for name, bits in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [at, at + bits.nbytes]}
        at += bits.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for bits in tensors.values():
            file.write(bits.tobytes())
    return at


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=32000)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    ones = np.full(HIDDEN, 0x3F80, dtype=np.uint16)
    weights, total, count = {}, 0, args.layers + 1

    def save(number, tensors):
        nonlocal total
        file = f"model-{number:05}-of-{count:05}.safetensors"
        total += write(args.out / file, tensors)
        weights.update(dict.fromkeys(tensors, file))

    # One set of random blocks serves all layers: drawing numbers would take longer than everything else.
    block = {
        "self_attn.q_proj": noise(rng, HIDDEN, HIDDEN, HIDDEN**-0.5),
        "self_attn.k_proj": noise(rng, HIDDEN, HIDDEN, HIDDEN**-0.5),
        "self_attn.v_proj": noise(rng, HIDDEN, HIDDEN, HIDDEN**-0.5),
        "self_attn.o_proj": noise(rng, HIDDEN, HIDDEN, 0.1 * HIDDEN**-0.5),
        "mlp.gate_proj": noise(rng, INNER, HIDDEN, HIDDEN**-0.5),
        "mlp.up_proj": noise(rng, INNER, HIDDEN, HIDDEN**-0.5),
        "mlp.down_proj": noise(rng, HIDDEN, INNER, 0.1 * INNER**-0.5),
    }
    for layer in range(args.layers):
        path = f"model.layers.{layer}"
        tensors = {f"{path}.{name}.weight": bits for name, bits in block.items()}
        tensors[f"{path}.input_layernorm.weight"] = ones
        tensors[f"{path}.post_attention_layernorm.weight"] = ones
        save(layer + 1, tensors)
    save(count, {
        "model.embed_tokens.weight": noise(rng, args.vocab, HIDDEN, 1.0),
        "model.norm.weight": ones,
        "lm_head.weight": noise(rng, args.vocab, HIDDEN, HIDDEN**-0.5),
    })
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (args.out / "model.safetensors.index.json").write_text(json.dumps(index))
    (args.out / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": args.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "vocab_size": args.vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
    }, indent=1))
    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocabulary = {character: i for i, character in enumerate(characters)}
    vocabulary["<unk>"] = len(vocabulary)
    (args.out / "tokenizer.json").write_text(json.dumps({
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }))
    (args.out / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>"}))


if __name__ == "__main__":
    main()
