"""`DecoderConfig`: the sizes and options of a `Decoder`, and what follows from them (parameters, arithmetic). No torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer_kit.models.config_parts import Embedding, Head, LanguageModeling, MoEConfig, TokenClassification, check

if TYPE_CHECKING:
    from trainer_kit.models.rotary_scaling import RotaryScaling


_LANGUAGE_MODELING = LanguageModeling()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a decoder-only transformer. Llama 3, Qwen3 and Qwen3-MoE are settings of it.

    num_kv_heads: heads of keys and values, shared by groups of query heads; 0: as many as `num_heads`.
    head_size: width of one attention head; 0: `hidden_size / num_heads`.
    intermediate_size: width of the feed-forward block; 0: 8/3 of `hidden_size`, rounded up to a multiple of 64 (the three matrices of
    SwiGLU then have about the parameters of two matrices of width 4, Shazeer 2020, arXiv:2002.05202).
    attention_bias, mlp_bias: whether the projections of attention, and of feed-forwards without experts, have a bias.
    qk_norm: RMS norm of each query and key head before the rotation (Qwen3).
    rope_scaling: how rotary positions are stretched for long sequences; None: not.
    moe: experts in place of some feed-forwards. head: what comes out; `tie_embeddings` is about the head for language modelling alone.
    init_std: standard deviation of the initial weights; projections back into the residual stream get it divided by sqrt(2 * num_layers).
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    hidden_size: int
    num_kv_heads: int = 0
    head_size: int = 0
    intermediate_size: int = 0
    max_seq_len: int = 1024
    dropout: float = 0.0
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RotaryScaling | None = None
    norm_eps: float = 1e-6
    init_std: float = 0.02
    moe: MoEConfig | None = None
    head: Head = _LANGUAGE_MODELING

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "num_heads", "hidden_size", "max_seq_len"):
            check(self, name, getattr(self, name) >= 1, "at least 1")
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "intermediate_size", self.intermediate_size or -(-8 * self.hidden_size // (3 * 64)) * 64)
        check(self, "intermediate_size", self.intermediate_size >= 1, "at least 1, or 0 for the default")
        self._set_head_size()
        divides = self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads == 0
        check(self, "num_kv_heads", divides, f"a divisor of num_heads={self.num_heads}")
        check(self, "dropout", 0.0 <= self.dropout < 1.0, "0 <= dropout < 1")
        check(self, "rope_theta", self.rope_theta > 1.0, "more than 1")
        check(self, "init_std", self.init_std > 0.0, "more than 0")
        check(self, "moe", self.moe is None or isinstance(self.moe, MoEConfig), "a MoEConfig, or None")
        check(self, "head", isinstance(self.head, Head), "LanguageModeling(), or another head of trainer_kit.models")

    def _set_head_size(self) -> None:
        turns = "; rotary positions turn pairs"
        if self.head_size:
            check(self, "head_size", self.head_size > 0 and self.head_size % 2 == 0, f"an even number, or 0 for the default{turns}")
            return
        size, rest = divmod(self.hidden_size, self.num_heads)
        check(self, "hidden_size", not rest, f"a multiple of num_heads={self.num_heads}, or head_size=")
        check(self, "hidden_size", size % 2 == 0, f"an even size per head, found {size}{turns}")
        object.__setattr__(self, "head_size", size)

    @classmethod
    def small(cls, vocab_size: int = 256, max_seq_len: int = 256) -> DecoderConfig:
        """About 10M parameters: for benchmarks, and for text by characters on one device."""
        return cls(vocab_size=vocab_size, num_layers=6, num_heads=6, hidden_size=384, max_seq_len=max_seq_len)

    @property
    def ties(self) -> bool:
        """Whether the head is the embedding."""
        return self.tie_embeddings and isinstance(self.head, LanguageModeling)

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward of this layer is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers and (layer + 1) % self.moe.every == 0

    @property
    def num_expert_layers(self) -> int:
        """How many layers have experts."""
        return sum(map(self.has_experts, range(self.num_layers)))

    @property
    def num_parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        layers = sum(self.num_layer_parameters(layer) for layer in range(self.num_layers))
        embedding = self.vocab_size * self.hidden_size
        return layers + self.hidden_size + embedding + (0 if self.ties else self._num_head_parameters)

    def num_layer_parameters(self, layer: int, *, active: bool = False) -> int:
        """Parameters of a layer. active: only those that one token meets, which are fewer with experts."""
        width, heads, kv_heads = self.hidden_size, self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        attention = 2 * width * (heads + kv_heads)
        attention += (heads + 2 * kv_heads + width) if self.attention_bias else 0
        attention += 2 * self.head_size if self.qk_norm else 0
        if self.moe is not None and self.has_experts(layer):
            num_experts = self.moe.num_experts_per_token if active else self.moe.num_experts
            feed_forward = self.moe.num_experts * width + num_experts * 3 * width * self.moe.intermediate_size
        else:
            feed_forward = 3 * width * self.intermediate_size + ((2 * self.intermediate_size + width) if self.mlp_bias else 0)
        return attention + feed_forward + 2 * width

    @property
    def _num_head_parameters(self) -> int:
        if isinstance(self.head, LanguageModeling):
            return self.vocab_size * self.hidden_size
        if isinstance(self.head, Embedding):
            return 0
        bias = self.head.num_labels if isinstance(self.head, TokenClassification) and self.head.bias else 0
        return self.head.num_labels * self.hidden_size + bias


def num_flops_per_token(config: DecoderConfig, seq_len: int) -> int:
    """Floating-point operations of forward and backward per token, `6N + 12 * layers * heads * head size * seq_len`.

    Appendix B of PaLM (Chowdhery et al. 2022, arXiv:2204.02311): each weight is used in one multiplication and one addition, and the
    backward costs twice the forward; attention is counted in full, as if it were not causal. N is the number of parameters that a token
    meets: of the experts those that it is sent to, not the input embedding, which is looked up and not multiplied (a tied one is
    multiplied as the head, and counts), and no head that works once per sequence.
    """
    layers = sum(config.num_layer_parameters(layer, active=True) for layer in range(config.num_layers))
    num_multiplied = layers + config.hidden_size + (0 if config.head.pools else config._num_head_parameters)
    return 6 * num_multiplied + 12 * config.num_layers * config.num_heads * config.head_size * seq_len
