"""Golden logits and tokenizations of the demo target checkpoint, by transformers and tokenizers.

OUT/logits.safetensors: `tokens` (int32 [n], begin token first) and `logits` (float32 [n, vocab],
float32 arithmetic on the stored FP16 weights, eager attention).
OUT/tokens.json: a list of {text, ids, ids_with_special}. Run again whenever the weights change.

usage: make_demo_logits.py MODEL OUT      (in the project: calib/demo/target tests/golden/demo)
"""
import json, sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

TEXT = ("It was the best of times, it was the worst of times; and the old whale-ship lay at anchor in the harbour.\n\n"
        "\"My dear fellow,\" said Holmes, \"you see, but you do not observe.\" I looked at him.")
TRICKY = [
    "",
    " ",
    "Hello world",
    " leading and trailing ",
    "two  spaces,   three,    four",
    "line one\nline two\n\n\n  indented\r\nand\ttabs\t\t.",
    "It's they're we've I'm you'll he'd o'clock IT'S DON'T",
    "1 22 333 4444 12,345.67 -0.5e-3",
    "café naïve Éclair — “quoted” … ½ £5",
    "日本語 текст עברית ελληνικά",
    "emoji 🙂👩‍👩‍👧 end",
    "x\u00a0y\u200bz e\u0301 \ufeff",
    "if (a[i] != b) { return -1; } // why?!",
    "<|begin|>special<|end|> and <|other|>",
    "\n",
    "MOBY DICK; OR, THE WHALE. CHAPTER 1. Loomings.",
]

def main():
    model_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    tok = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    rows = [{"text": t, "ids": tok.encode(t, add_special_tokens=False).ids, "ids_with_special": tok.encode(t).ids} for t in TRICKY]
    (out / "tokens.json").write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")

    tokens = torch.tensor(tok.encode(TEXT).ids, dtype=torch.int32)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(input_ids=tokens[None].long(), use_cache=False).logits[0].contiguous()
    save_file({"tokens": tokens, "logits": logits}, out / "logits.safetensors")
    nll = torch.nn.functional.cross_entropy(logits[:-1].double(), tokens[1:].long())
    print(len(tokens), "tokens, perplexity of the text", round(nll.exp().item(), 3))

if __name__ == "__main__":
    main()
