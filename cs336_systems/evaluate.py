"""What a model has learned: its loss on text that it was not trained on, and a sample of what it would write."""

import torch
from torch import nn

from cs336_systems.data import Corpus, lm_batch
from cs336_systems.model import lm_loss


@torch.no_grad()
def validation_loss(
    model: nn.Module, corpus: Corpus, seed: int, batch: int, context: int, device: torch.device
) -> float:
    """Mean loss in nats a token over eight batches of the corpus, without dropout."""
    model.eval()
    batches = [lm_batch(corpus, step, seed, batch, context) for step in range(8)]
    losses = [lm_loss(model, tokens.to(device), targets.to(device)) for tokens, targets in batches]
    model.train()
    return torch.stack(losses).mean().item()


@torch.no_grad()
def sample_text(model: nn.Module, context: int, prompt: str, length: int, seed: int, temperature: float = 0.8) -> str:
    """`length` bytes drawn from the model after the prompt, seeing `context` tokens, as text that is safe to print."""
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode(errors="surrogateescape") or b"\n")], device=device)
    for _ in range(length):
        logits = model(tokens[:, -context:])[:, -1, :256] / temperature
        tokens = torch.cat((tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)), dim=1)
    model.train()
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)
