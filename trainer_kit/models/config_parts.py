"""What a `DecoderConfig` is put together from: a mixture of experts, and the head that turns hidden states into outputs. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from trainer_kit.exceptions import ConfigurationError


def check(config: object, name: str, is_valid: bool, expected: str) -> None:
    """Raise ConfigurationError for a field of a config that is not what was expected."""
    if not is_valid:
        raise ConfigurationError(f"{type(config).__name__}({name}={getattr(config, name)!r}): expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """A mixture of experts in place of the feed-forward of some layers.

    num_experts_per_token: how many experts each token is sent to. intermediate_size: width of one expert.
    normalize_weights: the weights of the chosen experts are divided by their sum.
    every, dense_layers: layer i has experts if `(i + 1) % every == 0` and i is not in `dense_layers`.
    aux_loss_coef: coefficient of the load-balancing loss, see `load_balancing_loss`; 0: none.
    balance_bias: a bias for the choice of experts, which the callback `RouterBias` moves toward balance.
    capacity_factor: an expert takes at most this times its even share of the tokens that one rank routes at once, which are those of a
    microbatch, or of its part of the sequence; the later ones are dropped, add nothing and are counted (`Router.num_dropped`). 0: no limit.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalize_weights: bool = False
    dense_layers: tuple[int, ...] = ()
    every: int = 1
    aux_loss_coef: float = 0.0
    balance_bias: bool = False
    capacity_factor: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        for name in ("num_experts", "intermediate_size", "every"):
            check(self, name, getattr(self, name) >= 1, "at least 1")
        within = 1 <= self.num_experts_per_token <= self.num_experts
        check(self, "num_experts_per_token", within, f"1 to num_experts={self.num_experts}")
        for name in ("aux_loss_coef", "capacity_factor"):
            check(self, name, getattr(self, name) >= 0.0, "at least 0")

    @property
    def is_balanced(self) -> bool:
        """Whether the load of the experts is counted."""
        return self.balance_bias or self.aux_loss_coef > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModeling:
    """Logits over the vocabulary for every token, (B, T, V)."""

    pools: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClassification:
    """Scores of labels for every token, (B, T, labels), after dropout."""

    num_labels: int
    dropout: float = 0.1
    bias: bool = True
    pools: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check(self, "num_labels", self.num_labels >= 1, "at least 1")
        check(self, "dropout", 0.0 <= self.dropout < 1.0, "0 <= dropout < 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceClassification:
    """Scores of labels for every sequence, (B, labels), from its last token that is not padding.

    pad_token_id: tokens with this id are padding. None: those that the attention mask leaves out; without a mask none are.
    """

    num_labels: int
    pad_token_id: int | None = None
    pools: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self, "num_labels", self.num_labels >= 1, "at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """A vector for every sequence, (B, D): the last hidden state that is not padding, or the mean of those that are not.

    normalize: to length 1. pad_token_id: as for `SequenceClassification`.
    """

    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True
    pad_token_id: int | None = None
    pools: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self, "pooling", self.pooling in ("last", "mean"), "'last' or 'mean'")


Head = LanguageModeling | TokenClassification | SequenceClassification | Embedding
