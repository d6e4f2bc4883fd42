"""Train the two demo checkpoints (a target and a smaller draft) on public-domain books.

Both share one 2,048-entry byte-level BPE tokenizer, so that the draft can serve the target in
speculative decoding; it is trained on first use and kept in OUT/tokenizer.json. Held out:
alice-in-wonderland.txt (seen neither by the models nor by the tokenizer).

The schedule counts steps: warm-up, constant rate, then a linear decay over the last --decay
steps. Every step draws its randomness from (seed, step), so a run that was interrupted and
continued with --resume ends with the same weights as one that was not. Until the decay begins
the state does not depend on --steps, which may therefore still be changed at a --resume.

The layers' matrices are trained by Muon, embeddings and norms by AdamW; the data is about 1.56
million tokens, so several epochs are made and dropout is what keeps the held-out loss falling.

With --teacher the model learns the teacher's distributions in place of the text: the mean of KL(teacher || model) and of
the total variation between them, which is the share of proposals that speculative sampling rejects. --init starts
from finished weights.

usage: train_demo.py BOOKS_DIR OUT_DIR {target,draft} --steps N [--decay N] [--stop-at N] [--resume] [--bf16]
                     [--teacher DIR] [--init DIR]
       (calib/demo/README.md has the options that made the checkpoints there)
"""
import argparse, math, time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HELD_OUT = "alice-in-wonderland.txt"
VOCAB, SEQ, BATCH, WARMUP = 2048, 256, 16, 100
SHAPES = {
    "target": dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2),
    "draft": dict(hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1),
}
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")

def tokenizer(path, books):
    if path.exists():
        return Tokenizer.from_file(str(path))
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(pattern=Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<|begin|>", "<|end|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tok.train([str(p) for p in books], trainer)
    tok.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    path.parent.mkdir(parents=True, exist_ok=True)
    tok.save(str(path))
    return tok

def encode(tok, path):
    return torch.tensor(tok.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids)

def with_begin(target):
    """Inputs that predict `target`: the begin token, then the target shifted right by one."""
    return torch.cat([torch.zeros(len(target), 1, dtype=torch.int64), target[:, :-1]], 1)

@torch.no_grad()
def held_out_ppl(model, ids, windows=64):
    model.eval()
    ids = ids[: len(ids) // SEQ * SEQ].view(-1, SEQ)[:windows]
    nll = [F.cross_entropy(model(input_ids=with_begin(b)).logits.flatten(0, 1), b.flatten(), reduction="sum").item() for b in ids.split(BATCH)]
    model.train()
    return math.exp(sum(nll) / ids.numel())

def draw(train, step, seed):
    """Batch number `step`: each epoch walks a shuffle of all windows cut at an offset of its own."""
    per_epoch = (len(train) - SEQ) // SEQ // BATCH
    rng = torch.Generator().manual_seed(seed + step // per_epoch)
    offset = torch.randint(SEQ, (1,), generator=rng).item()
    order = torch.randperm(per_epoch * BATCH, generator=rng)
    at = order[step % per_epoch * BATCH:][:BATCH] * SEQ + offset
    return torch.stack([train[i:i + SEQ] for i in at.tolist()])

def from_teacher(logits, wanted):
    """KL and total variation to the teacher's distribution, added up, and the latter alone."""
    p, log_q = wanted.softmax(-1), logits.log_softmax(-1)
    variation = (p - log_q.exp()).abs().sum(-1).mean() / 2
    return F.kl_div(log_q, wanted.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean() + variation, variation

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("books", type=Path)
    ap.add_argument("out", type=Path)
    ap.add_argument("which", choices=SHAPES)
    ap.add_argument("--steps", type=int, required=True)
    ap.add_argument("--decay", type=int, help="steps of falling learning rate at the end (default half)")
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--dropout", type=float, default=0.1, help="after the embedding and on each residual branch")
    ap.add_argument("--weight-decay", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--bf16", action="store_true", help="multiply in bfloat16")
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--stop-at", type=int, help="stop after this step, with a checkpoint")
    ap.add_argument("--teacher", type=Path, help="checkpoint whose distributions are learnt")
    ap.add_argument("--init", type=Path, help="checkpoint to start from")
    args = ap.parse_args()
    decay = args.decay or args.steps // 2

    books = [p for p in sorted(args.books.glob("*.txt")) if p.name != HELD_OUT]
    tok = tokenizer(args.out / "tokenizer.json", books)
    train, held = torch.cat([encode(tok, p) for p in books]), encode(tok, args.books / HELD_OUT)
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=SEQ, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0, eos_token_id=1, initializer_range=0.02, **SHAPES[args.which]))
    if args.init:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32).state_dict())
    teacher = args.teacher and LlamaForCausalLM.from_pretrained(args.teacher, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(lambda m, _, out: F.dropout(out, args.dropout, m.training))
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [model.model.embed_tokens.weight] + [p for p in model.parameters() if p.ndim == 1]
    optimizers = [torch.optim.Muon(matrices, lr=args.lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"),
                  torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay)]
    print(args.which, sum(p.numel() for p in model.parameters()), "parameters,", len(train), "training tokens,",
          " ".join(f"{k}={v}" for k, v in vars(args).items() if k not in ("books", "out", "which", "resume", "teacher", "init") and v is not None), flush=True)

    state = args.out / f"{args.which}.state.pt"
    step, start = 0, time.time()
    if args.resume and state.exists():
        saved = torch.load(state)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        for o, s in zip(optimizers, saved["optimizers"]):
            o.load_state_dict(s)
        print("resumed after step", step, flush=True)
    while step < min(args.steps, args.stop_at or args.steps):
        lr = args.lr * min(1, (step + 1) / WARMUP, (args.steps - step) / decay)
        target = draw(train, step, args.seed)
        torch.manual_seed((args.seed << 32) + step)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            logits = model(input_ids=with_begin(target)).logits.float()
            if teacher:
                with torch.no_grad():
                    wanted = teacher(input_ids=with_begin(target)).logits.float()
        if teacher:
            loss, variation = from_teacher(logits, wanted)
        else:
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in optimizers:
            for g in o.param_groups:
                g["lr"] = lr
            o.step()
            o.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0 or step == args.stop_at:
            overlap = f"overlap {1 - variation.item():.3f} " if teacher else ""
            print(f"step {step} tokens {step * BATCH * SEQ} lr {lr:.2e} loss {loss.item():.3f} {overlap}"
                  f"held-out ppl {held_out_ppl(model, held):.2f} {time.time() - start:.0f}s", flush=True)
            partial = state.with_suffix(".partial")
            torch.save({"step": step, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}, partial)
            partial.replace(state)
    if step < args.steps:
        return
    model.half()
    out = args.out / args.which
    model.save_pretrained(out)
    PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<|begin|>", eos_token="<|end|>").save_pretrained(out)
    model.float()
    print(f"held-out ppl (fp32 of fp16 weights): first 64 windows {held_out_ppl(model, held):.4f}, whole book "
          f"{held_out_ppl(model, held, None):.4f}; steps {step} tokens {step * BATCH * SEQ}", flush=True)

if __name__ == "__main__":
    main()
