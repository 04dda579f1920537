"""`DecoderConfig`: the sizes of a `Decoder`, and what follows from them (parameters, arithmetic). No torch in here."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_kit.exceptions import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder-only transformer.

    num_kv_heads: heads of keys and values, shared by groups of query heads; 0: as many as `num_heads`.
    intermediate_size: width of the feed-forward block; 0: 8/3 of `hidden_size`, rounded up to a multiple of 64 (the three matrices of
    SwiGLU then have about the parameters of two matrices of width 4, Shazeer 2020, arXiv:2002.05202).
    init_std: standard deviation of the initial weights; projections back into the residual stream get it divided by sqrt(2 * num_layers).
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    hidden_size: int
    num_kv_heads: int = 0
    intermediate_size: int = 0
    max_seq_len: int = 1024
    dropout: float = 0.0
    tie_embeddings: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "num_heads", "hidden_size", "max_seq_len"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "intermediate_size", self.intermediate_size or -(-8 * self.hidden_size // (3 * 64)) * 64)
        self._check("intermediate_size", self.intermediate_size >= 1, "at least 1, or 0 for the default")
        self._check("hidden_size", self.hidden_size % self.num_heads == 0, f"a multiple of num_heads={self.num_heads}")
        self._check("hidden_size", self.head_size % 2 == 0, f"an even size per head, found {self.head_size}; rotary positions turn pairs")
        divides = self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads == 0
        self._check("num_kv_heads", divides, f"a divisor of num_heads={self.num_heads}")
        self._check("dropout", 0.0 <= self.dropout < 1.0, "0 <= dropout < 1")
        self._check("rope_theta", self.rope_theta > 1.0, "more than 1")
        self._check("init_std", self.init_std > 0.0, "more than 0")

    def _check(self, name: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            raise ConfigurationError(f"DecoderConfig({name}={getattr(self, name)!r}): expected {expected}")

    @classmethod
    def small(cls, vocab_size: int = 256, max_seq_len: int = 256) -> DecoderConfig:
        """About 10M parameters: for benchmarks, and for text by characters on one device."""
        return cls(vocab_size=vocab_size, num_layers=6, num_heads=6, hidden_size=384, max_seq_len=max_seq_len)

    @property
    def head_size(self) -> int:
        """The width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def num_parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        width, kv_width = self.hidden_size, self.num_kv_heads * self.head_size
        layer = 2 * width * width + 2 * width * kv_width + 3 * width * self.intermediate_size + 2 * width
        return self.num_layers * layer + width + self.vocab_size * width * (1 if self.tie_embeddings else 2)


def num_flops_per_token(config: DecoderConfig, seq_len: int) -> int:
    """Floating-point operations of forward and backward per token, `6N + 12 * layers * heads * head size * seq_len`.

    Appendix B of PaLM (Chowdhery et al. 2022, arXiv:2204.02311): each weight is used in one multiplication and one addition, and the
    backward costs twice the forward; attention is counted in full, as if it were not causal. N is the number of parameters less
    the input embedding, which is looked up and not multiplied (a tied one is multiplied as the head, and counts).
    """
    num_multiplied = config.num_parameters - (0 if config.tie_embeddings else config.vocab_size * config.hidden_size)
    return 6 * num_multiplied + 12 * config.num_layers * config.hidden_size * seq_len
