"""Tiny random checkpoints of every supported family, with golden logits by transformers.

For each family OUT/<name>/ gets config.json, model.safetensors and golden.safetensors with
`tokens` (int32 [24]) and `logits` (float32 [24, vocab]): float32 arithmetic on the stored
weights, eager attention, no begin token. Weights are scaled so that the logits are far from
uniform; biases and norms are random too, so that a forgotten one shows. `config_legacy.json`
spells the same configuration the way transformers 4 did; `llama_sharded` holds the weights of
`llama` in three shards. The legacy and sharded forms are loaded and compared before the end.

usage: make_family_fixtures.py OUT      (in the project: tests/golden/families)
"""
import json, shutil, sys, tempfile
from pathlib import Path

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

VOCAB, LENGTH = 128, 24
COMMON = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=None)

def rope(kind, theta, **more):
    return {"rope_type": kind, "rope_theta": theta, **more}

# name: (model class, stored dtype, configuration). Thetas and head sizes are chosen so that each
# rope type has frequencies in all of its bands within the short original context.
FAMILIES = {
    "llama": (tf.LlamaForCausalLM, torch.float16, tf.LlamaConfig(
        **COMMON, attention_bias=True, mlp_bias=True, tie_word_embeddings=False, rope_parameters=rope("default", 10000.0))),
    "llama3": (tf.LlamaForCausalLM, torch.float16, tf.LlamaConfig(
        **COMMON, tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters=rope(
            "llama3", 100.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=2.0, original_max_position_embeddings=16))),
    "llama_linear": (tf.LlamaForCausalLM, torch.float16, tf.LlamaConfig(
        **COMMON, tie_word_embeddings=True, rope_parameters=rope("linear", 10000.0, factor=2.0))),
    "llama_yarn": (tf.LlamaForCausalLM, torch.float32, tf.LlamaConfig(
        **COMMON | dict(num_attention_heads=2, num_key_value_heads=1), tie_word_embeddings=True,
        rope_parameters=rope("yarn", 100.0, factor=4.0, original_max_position_embeddings=16))),
    "mistral": (tf.MistralForCausalLM, torch.float16, tf.MistralConfig(
        **COMMON, sliding_window=8, tie_word_embeddings=False, rope_parameters=rope("default", 10000.0))),
    "qwen2": (tf.Qwen2ForCausalLM, torch.float16, tf.Qwen2Config(
        **COMMON, tie_word_embeddings=True, rope_parameters=rope("default", 1000000.0))),
    "qwen3": (tf.Qwen3ForCausalLM, torch.float16, tf.Qwen3Config(
        **COMMON | dict(max_position_embeddings=32), head_dim=32, tie_word_embeddings=False,
        rope_parameters=rope("yarn", 1000.0, factor=2.0, original_max_position_embeddings=16))),
    "gemma3_text": (tf.Gemma3ForCausalLM, torch.bfloat16, tf.Gemma3TextConfig(
        **COMMON | dict(num_hidden_layers=3), head_dim=16, sliding_window=8, query_pre_attn_scalar=24, tie_word_embeddings=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": rope("default", 1000000.0), "sliding_attention": rope("default", 10000.0)})),
    "smollm2": (tf.LlamaForCausalLM, torch.float16, tf.LlamaConfig(
        **COMMON | dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3), rms_norm_eps=1e-5,
        tie_word_embeddings=True, rope_parameters=rope("default", 100000.0))),
}

def randomize(model, rng):
    gemma = model.config.model_type.startswith("gemma3")
    for name, p in model.named_parameters():
        values = torch.randn(p.shape, generator=rng)
        if gemma and name == "model.norm.weight":
            values = 0.25 * values + 1.0
        elif "norm" in name:
            values = 0.25 * values + (0.0 if gemma else 1.0)        # gemma multiplies by 1 + weight
        elif name.endswith("bias"):
            values = 0.25 * values
        elif "embed_tokens" in name or "lm_head" in name:
            values = (0.15 if gemma else 0.3) * values              # gemma scales embeddings by sqrt(hidden)
        else:
            values = 1.5 * values / p.shape[1] ** 0.5
        p.data.copy_(values)

@torch.no_grad()
def logits(folder, tokens):
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return model(input_ids=tokens[None].long(), use_cache=False).logits[0].contiguous()

def legacy(config):
    """The transformers 4 spelling of a transformers 5 config.json."""
    config = json.loads(json.dumps(config))
    ropes = config.pop("rope_parameters")
    if config["model_type"] == "gemma3_text":
        kinds = config.pop("layer_types")
        config.pop("_sliding_window_pattern", None)
        config["sliding_window_pattern"] = kinds.index("full_attention") + 1
        config["rope_theta"] = ropes["full_attention"]["rope_theta"]
        config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        config["rope_scaling"] = None
    else:
        config.pop("layer_types", None)
        config["rope_theta"] = ropes.pop("rope_theta")
        config["rope_scaling"] = {"type": ropes.pop("rope_type"), **ropes}
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.51.3"
    return dict(sorted(config.items()))

def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")

def loads_the_same(folder, config_name, tokens, expected):
    with tempfile.TemporaryDirectory() as tmp:
        for p in folder.glob("model*"):
            shutil.copy(p, tmp)
        shutil.copy(folder / config_name, Path(tmp) / "config.json")
        assert torch.equal(logits(tmp, tokens), expected), (folder, config_name)

def main():
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(20)
    for name, (cls, dtype, config) in FAMILIES.items():
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        model = cls(config)
        randomize(model, rng)
        model.to(dtype).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokens = torch.randint(3, VOCAB, (LENGTH,), generator=rng, dtype=torch.int32)
        golden = logits(folder, tokens)
        save_file({"tokens": tokens, "logits": golden}, folder / "golden.safetensors")
        probs = golden.softmax(-1)
        print(f"{name}: {sum(f.stat().st_size for f in folder.iterdir())} bytes, logit std {golden.std():.2f}, "
              f"mean top probability {probs.max(-1).values.mean():.2f}")
        if name in ("qwen3", "gemma3_text"):
            write_json(folder / "config_legacy.json", legacy(json.loads((folder / "config.json").read_text())))
            loads_the_same(folder, "config_legacy.json", tokens, golden)

    whole, sharded = out / "llama", out / "llama_sharded"
    shutil.rmtree(sharded, ignore_errors=True)
    sharded.mkdir()
    shutil.copy(whole / "config.json", sharded)
    tensors = load_file(whole / "model.safetensors")
    names, index = sorted(tensors), {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        part = names[i * len(names) // 3:(i + 1) * len(names) // 3]
        save_file({n: tensors[n] for n in part}, sharded / file, metadata={"format": "pt"})
        index |= {n: file for n in part}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(sharded / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": index})
    golden = load_file(whole / "golden.safetensors")
    loads_the_same(sharded, "config.json", golden["tokens"], golden["logits"])

if __name__ == "__main__":
    main()
