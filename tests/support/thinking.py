"""A tiny target that thinks before it answers: a real model, taught in seconds to write the tags."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny import save_tiny_target
from tests.support.tiny_tokenizer import STRIPPING, tiny_tokenizer

QUESTIONS = [f"question {number}" for number in range(24)]


def save_thinking_target(folder: Path, steps: int = 150) -> Path:
    """A target with Qwen3's kind of template that, asked one of `QUESTIONS`, thinks and then answers.

    Every fourth question is answered without thinking.
    """
    save_tiny_target(folder, "qwen3", layers=2, template=STRIPPING)
    tokenizer = tiny_tokenizer(STRIPPING)
    texts = []
    for number, question in enumerate(QUESTIONS):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        thought = "" if number % 4 == 3 else f"<think>\nhm {'so ' * (number % 5)}{number}\n</think>\n\n"
        texts.append((tokenizer.encode(prompt), tokenizer.encode(f"{thought}It is {number}.<|im_end|>")))
    length = max(len(prompt) + len(answer) for prompt, answer in texts)
    ids = torch.full((len(texts), length), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(texts):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder
