"""The transformer and its parts."""

from cs336_systems.model.transformer import TransformerLM, lm_loss

__all__ = ["TransformerLM", "lm_loss"]
