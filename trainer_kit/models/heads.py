"""The heads of a `Decoder` other than that for language modelling, which is a `Projection`.

Shapes: B batch, T sequence, D hidden. Before editing: with tensor parallelism a head gets the whole sequence on every rank.
"""

# ruff: noqa: N803, N806  (shape suffixes are upper case)
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trainer_kit.models.config import DecoderConfig
from trainer_kit.models.config_parts import Embedding, LanguageModeling, SequenceClassification, TokenClassification
from trainer_kit.models.layers import Projection


class TokenClassifier(nn.Module):
    """(B, T, D) to scores (B, T, labels)."""

    def __init__(self, width: int, head: TokenClassification, std: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(head.dropout)
        self.score = Projection(width, head.num_labels, std=std, bias=head.bias)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.score(self.dropout(x_BTD))


class SequenceClassifier(nn.Module):
    """(B, T, D) to scores (B, labels)."""

    def __init__(self, width: int, head: SequenceClassification, std: float) -> None:
        super().__init__()
        self.score = Projection(width, head.num_labels, std=std)

    def forward(self, x_BTD: torch.Tensor, is_real_BT: torch.Tensor | None) -> torch.Tensor:
        return self.score(last_real(x_BTD, is_real_BT))


class Pooler(nn.Module):
    """(B, T, D) to vectors (B, D)."""

    def __init__(self, head: Embedding) -> None:
        super().__init__()
        self.pooling, self.normalizes = head.pooling, head.normalize

    def forward(self, x_BTD: torch.Tensor, is_real_BT: torch.Tensor | None) -> torch.Tensor:
        pooled_BD = last_real(x_BTD, is_real_BT) if self.pooling == "last" else mean_of_real(x_BTD, is_real_BT)
        return F.normalize(pooled_BD, dim=-1) if self.normalizes else pooled_BD


def last_real(x_BTD: torch.Tensor, is_real_BT: torch.Tensor | None) -> torch.Tensor:
    """The hidden state of the last token that is no padding, on whichever side that is; of the first one if all are."""
    if is_real_BT is None:
        return x_BTD[:, -1]
    B, T = is_real_BT.shape
    places = torch.arange(T, device=x_BTD.device)
    return x_BTD[torch.arange(B, device=x_BTD.device), (places * is_real_BT).argmax(-1)]


def mean_of_real(x_BTD: torch.Tensor, is_real_BT: torch.Tensor | None) -> torch.Tensor:
    """The mean hidden state of the tokens that are no padding; zeros if all are."""
    if is_real_BT is None:
        return x_BTD.mean(1)
    weights_BT1 = is_real_BT.to(x_BTD.dtype).unsqueeze(-1)
    return (x_BTD * weights_BT1).sum(1) / weights_BT1.sum(1).clamp(min=1)


def build_head(config: DecoderConfig) -> nn.Module:
    """The module that `config.head` describes."""
    head, width, std = config.head, config.hidden_size, config.init_std
    if isinstance(head, LanguageModeling):
        return Projection(width, config.vocab_size, std=std)
    if isinstance(head, TokenClassification):
        return TokenClassifier(width, head, std)
    return SequenceClassifier(width, head, std) if isinstance(head, SequenceClassification) else Pooler(head)
