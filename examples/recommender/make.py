"""Train a small recommender that thinks before it searches, and write it with its catalogue and its test users.

    python examples/recommender/make.py FOLDER [--steps N] [--rec DATA --dataset Beauty]
    segue bench two-stage FOLDER

Without `--rec`, the data is synthetic. It needs transformers, for training alone. FOLDER gets: `model/`, a Hugging Face folder;
`catalogue.json`; `task.json`, with the items' texts and those that sell best; `users.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path

import sources
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

THINK, END, BEGIN = "<think>", "</think>", "<|sid_begin|>"
SUFFIX = f"{END}\n{BEGIN}"


def make_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Every word is one token, wherever it stands: text made of them is cut in one way only. All else is bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    known = ["<pad>", "<eos>", "<user>", THINK, END, BEGIN, *words]
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in known])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def prompt_of(history: list[str]) -> str:
    return f"<user>{''.join(history)}{THINK}"


def rows_of(examples: list[sources.Example], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    texts = [f"{prompt_of(one.history)}{one.thought}{SUFFIX}{one.target_text}<eos>" for one in examples]
    return tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False).input_ids


def train(model: LlamaForCausalLM, rows: torch.Tensor, steps: int, batch: int, pad: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    began, total = time.monotonic(), 0.0
    for step in range(steps):
        ids = rows[torch.randint(len(rows), (batch,))]
        loss = model(ids, labels=ids.masked_fill(ids == pad, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += float(loss.detach())
        if step % 100 == 99:
            print(f"step {step + 1} of {steps}: loss {total / 100:.3f}, {time.monotonic() - began:.0f} s", flush=True)
            total = 0.0


def write(folder: Path, data: sources.Data, tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder / "model", max_shard_size="1GB")
    tokenizer.save_pretrained(folder / "model")
    ids = {name: tokenizer.encode(text, add_special_tokens=False) for name, text in data.items.items()}
    (folder / "catalogue.json").write_text(json.dumps(ids))
    sold = Counter(one.target for one in data.train)
    task = {
        "suffix": SUFFIX,
        "stop": END,
        "max_thought_tokens": 16,
        "item_tokens": max(len(own) for own in ids.values()),
        "popular": [name for name, _ in sold.most_common(100)],
        "items": data.items,
    }
    (folder / "task.json").write_text(json.dumps(task))
    with (folder / "users.jsonl").open("w") as file:
        for one in data.test:
            file.write(json.dumps({"prompt": prompt_of(one.history), "targets": [one.target]}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rec", type=Path, metavar="FOLDER", help="with DATASET.index.json.gz and its histories")
    parser.add_argument("--dataset", default="Beauty")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    pick = random.Random(given.seed)
    data = sources.synthetic(pick) if given.rec is None else sources.recorded(given.rec, given.dataset, pick)
    tokenizer = make_tokenizer(data.words)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=given.hidden,
        intermediate_size=given.hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // 32,
        num_key_value_heads=given.hidden // 32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config).to(given.device)
    print(f"{len(data.items):,} items, {len(data.train):,} examples, {model.num_parameters():,} parameters")
    train(model, rows_of(data.train, tokenizer).to(given.device), given.steps, given.batch, tokenizer.pad_token_id)
    write(given.folder, data, tokenizer, model)
    print(f"Try it: segue bench two-stage {given.folder}")


if __name__ == "__main__":
    main()
