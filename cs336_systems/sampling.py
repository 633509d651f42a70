"""What a model would write: a sample of text, byte by byte."""

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def sample_text(
    model: Callable[[Tensor], Tensor],
    device: torch.device,
    context: int,
    prompt: str,
    length: int,
    seed: int,
    temperature: float = 0.8,
) -> str:
    """`length` bytes drawn after the prompt, seeing `context` tokens, as text that is safe to print.

    `model` gives logits (1 seq vocab_size) of tokens (1 seq), without dropout.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode(errors="surrogateescape") or b"\n")], device=device)
    for _ in range(length):
        logits = model(tokens[:, -context:])[:, -1, :256] / temperature
        tokens = torch.cat((tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)), dim=1)
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)
