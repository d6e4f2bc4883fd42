"""GGUF key-value lists as llama.cpp's own converter writes them, for tiny models of every family.

For each case OUT/<case>/ gets config.json, the tokenizer and side files made here, and golden.json with
`folder` (the name the model folder had, which the converter reads), `weights` (the family fixture whose
model.safetensors stood in it), and `pairs`: key, type and value in file order. Arrays of more than 32
elements are given as their length and the SHA-256 of their elements in GGUF encoding. OUT/smollm2-135m.json
and OUT/demo.json are the same for whole models; the first is left as it is without SMOLLM2.

The fingerprints of tiny vocabularies are unknown to the converter, so the pre-tokenizer's name is given to
it; everything else is its own doing. CONVERTER is the llama.cpp tree of llama-cpp-python 0.3.36's sdist.

usage: make_gguf_metadata.py CONVERTER PROJECT [SMOLLM2]
needs: torch, transformers, sentencepiece, protobuf, pyyaml as in requirements.txt
"""
import hashlib, json, shutil, sys, tempfile
from pathlib import Path

CONVERTER, PROJECT = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
SMOLLM2 = Path(sys.argv[3]).resolve() if len(sys.argv) > 3 else None
OUT = PROJECT / "tests/golden/gguf/metadata"
sys.path[:0] = [str(CONVERTER), str(CONVERTER / "gguf-py")]

import convert_hf_to_gguf, gguf
from conversion.base import TextModel
from sentencepiece import sentencepiece_model_pb2 as spm

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ġ a", "e r", "o n", "a n", "Ġa n", "Ġan d", "n d", "Ġ s", "in g"]
ALPHABET = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
SPM_MERGES = ["▁ t", "h e", "▁t he", "i n", "▁ a", "e r", "o n", "a n", "▁a n", "in g", "▁ s", "▁the r"]
SPM_LETTERS = ["▁", *"etaoinsrhdlucmfywgpbvk.,'TAI0123456789"]


def split(regex):
    return {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}


DIGITS = {"type": "Sequence", "pretokenizers": [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]}


def template(first, last=None):
    one = lambda t: [{"SpecialToken": {"id": t, "type_id": 0}}] if t else []
    sequence = lambda s, n: [{"Sequence": {"id": s, "type_id": n}}]
    single = one(first) + sequence("A", 0) + one(last)
    return {"single": single, "pair": single + [{**p, **{k: {**v, "type_id": 1} for k, v in p.items()}} for p in
                                                one(first) + sequence("B", 1) + one(last)]}


def post(ids, first, last=None):
    special = {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in (first, last) if t}
    return {"type": "TemplateProcessing", **template(first, last), "special_tokens": special}


def added(content, id, special=True, normalized=False):
    return {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": normalized, "special": special}


def bpe(pre, tokens, *, ignore_merges=False, normalizer=None, pairs=True, first=None, last=None, at_front=False):
    """Byte-level BPE; `tokens` are (text, special) added tokens, before or after the vocabulary."""
    pieces = ALPHABET + [m.replace(" ", "") for m in MERGES]
    texts = [t for t, _ in tokens]
    order = texts + pieces if at_front else pieces + texts
    vocab = {t: i for i, t in enumerate(order)}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges,
             "vocab": {t: vocab[t] for t in (order if at_front else pieces)},
             "merges": [m.split(" ") for m in MERGES] if pairs else MERGES}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [added(t, vocab[t], s) for t, s in tokens], "normalizer": normalizer, "pre_tokenizer": pre,
            "post_processor": post(vocab, first, last) if first else byte_level,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": model}


def sentencepiece(control):
    """A SentencePiece model and the tokenizer.json that Hugging Face makes of one; `control` are its first pieces."""
    proto = spm.ModelProto()
    proto.trainer_spec.model_type = spm.TrainerSpec.BPE
    proto.trainer_spec.byte_fallback = True
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = True
    proto.normalizer_spec.remove_extra_whitespaces = False
    Type = spm.ModelProto.SentencePiece
    def add(text, score, kind):
        proto.pieces.add(piece=text, score=score, type=kind)
    for text in control:
        add(text, 0.0, Type.UNKNOWN if text == "<unk>" else Type.CONTROL)
    for byte in range(256):
        add(f"<0x{byte:02X}>", 0.0, Type.BYTE)
    merged = [m.replace(" ", "") for m in SPM_MERGES]
    for i, text in enumerate(merged + SPM_LETTERS):
        add(text, -float(i), Type.NORMAL)
    vocab = {p.piece: i for i, p in enumerate(proto.pieces)}
    return proto.SerializeToString(deterministic=True), vocab


def spm_json(vocab, tokens, *, gemma=False, bos):
    normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    steps = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [added(t, i, s, normalized=not s) for t, i, s in tokens],
            "normalizer": normalizer if gemma else {"type": "Sequence", "normalizers": [prepend, normalizer]},
            "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                              "invert": False} if gemma else None,
            "post_processor": post(vocab, bos),
            "decoder": {"type": "Sequence", "decoders": steps if gemma else steps + [strip]},
            "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                      "vocab": vocab, "merges": [m.split(" ") for m in SPM_MERGES]}}


CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
LLAMA3 = bpe(split(CONTRACTIONS + WORDS + r"\p{N}{1,3}" + TAIL),
             [("<|begin_of_text|>", True), ("<|end_of_text|>", True), ("<tool>", False), ("<|looks|>", False)],
             ignore_merges=True, first="<|begin_of_text|>")
QWEN2 = bpe(split(CONTRACTIONS + WORDS + r"\p{N}" + TAIL),
            [("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<think>", False)],
            normalizer={"type": "NFC"}, pairs=False)
MISTRAL = bpe(split(TEKKEN), [("<unk>", True), ("<s>", True), ("</s>", True), ("[INST]", True)], ignore_merges=True,
              first="<s>", last="</s>", at_front=True)
SMOL = bpe(DIGITS, [("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True)], pairs=False, at_front=True)
SMOL["post_processor"] = None
LLAMA_MODEL, LLAMA_VOCAB = sentencepiece(["<unk>", "<s>", "</s>"])
LLAMA_SPM = spm_json(LLAMA_VOCAB, [("<unk>", 0, True), ("<s>", 1, True), ("</s>", 2, True)], bos="<s>")
ROWS = len(LLAMA_VOCAB)
GEMMA_MODEL, GEMMA_VOCAB = sentencepiece(["<pad>", "<eos>", "<bos>", "<unk>"])
GEMMA_TOKENS = [("<pad>", 0, True), ("<eos>", 1, True), ("<bos>", 2, True), ("<unk>", 3, True),
                ("<start_of_turn>", len(GEMMA_VOCAB), True), ("▁▁", len(GEMMA_VOCAB) + 1, False)]
GEMMA_SPM = spm_json(GEMMA_VOCAB, GEMMA_TOKENS, gemma=True, bos="<bos>")
GEMMA = dict(vocab_size=len(GEMMA_VOCAB) + 5, bos_token_id=2, eos_token_id=1, pad_token_id=0)
GEMMA_CONFIG = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>",
                "pad_token": "<pad>", "add_bos_token": True, "add_eos_token": False, "chat_template": CHAT,
                "added_tokens_decoder": {str(i): {"content": t, "special": s} for t, i, s in GEMMA_TOKENS}}
GEMMA_FILES = {"tokenizer.model": GEMMA_MODEL, "tokenizer.json": GEMMA_SPM, "tokenizer_config.json": GEMMA_CONFIG}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", **{
    k: v for k, v in added("</s>", 0).items() if k != "id"}}, "unk_token": "<unk>"}
CARD = """---
license: apache-2.0
language:
- en
- no
tags: [tiny, "a: b"]
pipeline_tag: text-generation
base_model:
- some-org/Base-Model-7B-v0.2
datasets:
- some-org/texts
- https://huggingface.co/datasets/x
model_creator: A Person
---
# A model
"""

# case: (weights, model folder, pre-tokenizer's name, changes to the fixture's config, files)
CASES = {
    "llama": ("llama", "llama", "default", dict(vocab_size=ROWS + 6), {
        "tokenizer.model": LLAMA_MODEL, "tokenizer.json": LLAMA_SPM, "added_tokens.json": {"<extra>": ROWS + 2},
        "tokenizer_config.json": {**LLAMA_TOKENS, "tokenizer_class": "LlamaTokenizer", "add_prefix_space": True,
                                  "add_bos_token": True, "add_eos_token": False}}),
    "llama_hf": ("llama", "Tiny-Chat", "default", dict(vocab_size=ROWS), {
        "tokenizer.json": LLAMA_SPM,
        "tokenizer_config.json": {**FAST, **LLAMA_TOKENS, "add_bos_token": True, "add_eos_token": False}}),
    "llama3": ("llama3", "Tiny-Llama-3.1-8B-Instruct", "llama-bpe", {}, {
        "tokenizer.json": LLAMA3, "chat_template.jinja": CHAT,
        "generation_config.json": {"bos_token_id": 1, "temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1},
        "tokenizer_config.json": {**FAST, "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}}),
    "llama_linear": ("llama_linear", "linear", "tekken", {}, {
        "tokenizer.json": MISTRAL, "tokenizer_config.json": {**FAST, **LLAMA_TOKENS}}),
    "llama_yarn": ("llama_yarn", "some model", "smollm", {}, {
        "tokenizer.json": SMOL, "tokenizer_config.json": {**FAST, "unk_token": "<|endoftext|>"},
        "chat_template.json": {"chat_template": CHAT}}),
    "mistral": ("mistral", "Mistral-Tiny-v0.3", "tekken", {}, {
        "tokenizer.json": MISTRAL, "tokenizer_config.json": {**FAST, **LLAMA_TOKENS, "add_bos_token": True}}),
    "qwen2": ("qwen2", "Qwen2.5-0.1M-Instruct", "qwen2", {}, {
        "tokenizer.json": QWEN2, "README.md": CARD,
        "tokenizer_config.json": {**FAST, "add_bos_token": False, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                                  "chat_template": [{"name": "default", "template": CHAT},
                                                    {"name": "tool-use", "template": CHAT + "!"}]}}),
    "qwen3": ("qwen3", "Qwen3", "qwen2", {}, {
        "tokenizer.json": QWEN2, "chat_template.jinja": CHAT,
        "tokenizer_config.json": {**FAST, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}}),
    "qwen3_legacy": ("qwen3", "Qwen3", "qwen2", "config_legacy.json", {
        "tokenizer.json": QWEN2, "tokenizer_config.json": {**FAST, "eos_token": "<|im_end|>"}}),
    "gemma3_text": ("gemma3_text", "gemma-3-tiny-it", "default", GEMMA, GEMMA_FILES),
    "gemma3": ("gemma3_text", "gemma-3-tiny-it", "default", "nested", GEMMA_FILES),
    "smollm2": ("smollm2", "SmolLM2-Tiny-Instruct", "smollm", dict(vocab_size=49152), {
        "tokenizer.json": SMOL,
        "tokenizer_config.json": {**FAST, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
                                  "add_bos_token": True, "chat_template": CHAT}}),
}


def element(value):
    if isinstance(value, str):
        return len(value.encode()).to_bytes(8, "little") + value.encode()
    return value.tobytes()


def pairs(path):
    reader = gguf.GGUFReader(path)
    for field in reader.fields.values():
        if field.name.startswith("GGUF."):
            continue
        kinds = [t.name.lower() for t in field.types]
        if kinds[0] != "array":
            value = field.contents()
            yield {"key": field.name, "type": kinds[0], "value": value}
            continue
        parts = [field.parts[i] for i in field.data]
        values = [str(bytes(p), "utf-8") if kinds[1] == "string" else p[0] for p in parts]
        found = {"key": field.name, "type": f"array<{kinds[1]}>"}
        if len(values) <= 32:
            found["value"] = [v if isinstance(v, str) else v.item() for v in values]
        else:
            found |= {"length": len(values), "sha256": hashlib.sha256(b"".join(map(element, values))).hexdigest()}
        yield found


def convert(model, pre):
    if pre:
        TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    with tempfile.TemporaryDirectory() as tmp:
        sys.argv = ["convert", str(model), "--outtype", "f16", "--outfile", f"{tmp}/out.gguf"]
        convert_hf_to_gguf.main()
        reader = gguf.GGUFReader(f"{tmp}/out.gguf")
        factors = [t.data.tolist() for t in reader.tensors if t.name == "rope_freqs.weight"]
        return {"pairs": list(pairs(f"{tmp}/out.gguf")), **({"rope_freqs": factors[0]} if factors else {})}


def write(path, value):
    if isinstance(value, bytes):
        path.write_bytes(value)
    elif isinstance(value, str):
        path.write_text(value)
    else:
        path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def main():
    known = TextModel.get_vocab_base_pre
    for name, model in (("smollm2-135m", SMOLLM2), ("demo", PROJECT / "calib/demo/target")):
        if model:
            # The demo's own vocabulary has no fingerprint there either.
            found = convert(model, "qwen2" if name == "demo" else None)
            write(OUT / f"{name}.json", {"folder": model.name, **found})
            TextModel.get_vocab_base_pre = known
    for case, (weights, folder, pre, changes, files) in CASES.items():
        fixture = PROJECT / "tests/golden/families" / weights
        out = OUT / case
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        config = json.loads((fixture / (changes if isinstance(changes, str) and changes != "nested" else "config.json")).read_text())
        if isinstance(changes, dict):
            config |= changes
        elif changes == "nested":
            text = {**config, **GEMMA}
            text.pop("architectures")
            config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
                      "bos_token_id": 2, "eos_token_id": [1, 3], "tie_word_embeddings": True}
        write(out / "config.json", config)
        for file, value in files.items():
            write(out / file, value)
        with tempfile.TemporaryDirectory() as tmp:
            model = Path(tmp) / folder
            shutil.copytree(out, model)
            shutil.copy(fixture / "model.safetensors", model)
            found = convert(model, pre)
        write(out / "golden.json", {"weights": weights, "folder": folder, **found})


main()
