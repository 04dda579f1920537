"""`generate`: sample tokens from a decoder, one forward of the whole window per token. No cache: short and right, for a look at a model."""

# ruff: noqa: N803, N806  (shape suffixes are upper case)
from __future__ import annotations

import torch

from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.model.modes import eval_modes
from trainer_kit.models.config_parts import LanguageModeling
from trainer_kit.models.decoder import Decoder
from trainer_kit.parallel.context import works_on_parts
from trainer_kit.torch_private import whole_tensor


@torch.no_grad()
def generate(
    model: Decoder,
    tokens: torch.Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Continue token ids (B, T), T at least 1, by `max_new_tokens`; gives ids (B, T + max_new_tokens).

    The model sees the last `max_seq_len` tokens. temperature: 0 takes the most probable token. top_k: sample among the k most
    probable ones. The model runs in eval mode and gets its mode back.
    """
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ConfigurationError(f"generate(tokens=...) has the shape {tuple(tokens.shape)}, expected (batch, length), length >= 1")
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ConfigurationError(f"generate(temperature={temperature}, top_k={top_k}): expected temperature >= 0 and top_k >= 1")
    if works_on_parts(model):
        raise UnsupportedError("generate(model=...) got a model that sees parts of sequences; build it with cp_shard=1 and cp_replicate=1")
    if not isinstance(model.config.head, LanguageModeling):
        raise ConfigurationError(f"generate(model=...) has the head {model.config.head!r}, expected LanguageModeling()")
    with eval_modes([model]):
        for _ in range(max_new_tokens):
            logits_BV = whole_tensor(model(tokens[:, -model.config.max_seq_len :])[:, -1]).float()
            tokens = torch.cat((tokens, _sample(logits_BV, temperature, top_k, generator)), dim=1)
    return tokens


def _sample(logits_BV: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> torch.Tensor:
    """One token (B, 1) per row."""
    if temperature == 0:
        return logits_BV.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits_BV.shape[-1]:
        # By position rather than by value: tokens that tie with the k-th would come in as well.
        kept = logits_BV.topk(top_k, dim=-1)
        logits_BV = torch.full_like(logits_BV, -torch.inf).scatter(-1, kept.indices, kept.values)
    return torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)
