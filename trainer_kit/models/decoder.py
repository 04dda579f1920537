"""`Decoder`: a decoder-only transformer, pre-norm, with rotary positions and SwiGLU. Llama 3, Qwen3 and Qwen3-MoE are settings of it.

    ids -> embedding -> [ x + attention(norm(x)), x + feed_forward(norm(x)) ] * layers -> norm -> head -> logits

Shapes: B batch, T sequence, D hidden, V vocabulary.
Before editing: names carry global layer numbers (`layers.7.` is the eighth layer on any stage); weights are saved under them.
"""

# ruff: noqa: N803, N806  (shape suffixes are upper case)
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from trainer_kit.exceptions import ConfigurationError, UnsupportedError
from trainer_kit.model.provider import StageInfo
from trainer_kit.model.stage_layers import distribute_layers
from trainer_kit.models.config import DecoderConfig
from trainer_kit.models.experts import MixtureOfExperts
from trainer_kit.models.heads import build_head
from trainer_kit.models.inputs import DecoderInputs
from trainer_kit.models.layers import PLAIN, Attention, FeedForward, TokenEmbedding, TokenInfo
from trainer_kit.models.rotary import RotaryTable
from trainer_kit.models.tensor_plan import decoder_tensor_plan

if TYPE_CHECKING:
    from trainer_kit.mesh.context import DistributedContext
    from trainer_kit.parallel.context import SequenceParts
    from trainer_kit.parallel.context_attention import Way
    from trainer_kit.parallel.tensor import Style


class DecoderBlock(nn.Module):
    """One layer: attention and feed-forward, each on the normalised residual stream and added back to it."""

    def __init__(self, config: DecoderConfig, number: int, context: DistributedContext | None = None) -> None:
        super().__init__()
        # 2 * num_layers projections add up in the residual stream; so scaled, its variance does not grow with the depth (GPT-2).
        residual_std = config.init_std / (2 * config.num_layers) ** 0.5
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config, residual_std)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.has_experts = config.has_experts(number)
        self.feed_forward = MixtureOfExperts(config, residual_std, context) if self.has_experts else FeedForward(config, residual_std)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x_BTD: torch.Tensor, rotary: RotaryTable, tokens: TokenInfo = PLAIN) -> torch.Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), rotary, tokens))
        normed_BTD = self.feed_forward_norm(x_BTD)
        y_BTD = self.feed_forward(normed_BTD, tokens) if self.has_experts else self.feed_forward(normed_BTD)
        return x_BTD + self.dropout(y_BTD)


class Decoder(nn.Module):
    """The layers of one stage: the embedding on the first, the norm and the head on the last, all of it without pipeline stages.

    Called as `model(input_ids)` with token ids (B, T), T at most `config.max_seq_len`, or with a mapping, see `DecoderInputs`; gives what
    `config.head` says, such as logits (B, T, V). `DecoderProvider(config)` is its model provider. context: of the run, in which routers
    keep their balance; needed if `config.moe` asks for that.
    """

    def __init__(self, config: DecoderConfig, stage: StageInfo | None = None, context: DistributedContext | None = None) -> None:
        super().__init__()
        stage = stage or StageInfo()
        self.config, self._stage = config, stage
        self._num_sequence_parts = 1  # of tensor parallelism, between modules
        self._parts: SequenceParts | None = None  # of context parallelism
        if config.moe is not None and config.moe.is_balanced and context is None:
            raise ConfigurationError(
                "MoEConfig(aux_loss_coef or balance_bias) needs the context of the run, to which losses and counts go; pass "
                "DecoderProvider(config) to the Trainer, or context= to Decoder, or set aux_loss_coef=0 and balance_bias=False"
            )
        self.rotary = RotaryTable(config.head_size, config.max_seq_len, config.rope_theta, config.rope_scaling)
        if stage.is_first:
            self.embedding = TokenEmbedding(config.vocab_size, config.hidden_size, std=config.init_std)
            self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.layers = nn.ModuleDict({str(number): DecoderBlock(config, number, context) for number in layers_of_stage(config, stage)})
        if stage.is_last:
            self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
            self.head = build_head(config)
            if config.ties and stage.is_first:
                self.head.weight = self.embedding.weight

    def forward(self, inputs: Any, shared: None = None) -> Any:
        """Token ids (B, T), alone or as `input_ids` of a mapping, to the outputs of the head; a stage in the middle takes and gives hidden
        states (B, T, D), in a mapping if masks or positions go with them."""
        is_first = self._stage.is_first
        given = self._given(inputs).with_positions(self._parts) if is_first else DecoderInputs.of_stage(inputs)
        x_BTD: Any = self.dropout(self.embedding(given.input_ids)) if is_first else given.hidden
        tokens = self._token_info(given)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD, self.rotary, tokens)
        if not self._stage.is_last:
            return given.passed_on(x_BTD, self.config)
        x_BTD = self.norm(x_BTD)
        return self.head(x_BTD, given.is_real_BT(self.config)) if self.config.head.pools else self.head(x_BTD)

    def _given(self, inputs: Any) -> DecoderInputs:
        return DecoderInputs.of_model(inputs, self.config, 1 if self._parts is None else self._parts.num_ranks)

    def _token_info(self, given: DecoderInputs) -> TokenInfo:
        positions_BT = given.position_ids
        if positions_BT is None and self._parts is not None:
            positions_BT = self._parts.positions(given.num_positions(self._num_sequence_parts), device=given.device).unsqueeze(0)
        return TokenInfo.of(given.attention_mask, positions_BT, given.document_ids, has_mask=self._parts is None)

    def stage_transfer_spec(self, inputs: Any, boundary: Literal["incoming", "outgoing"]) -> Any:
        """Between stages go hidden states (B, T, D), or this rank's part of the sequence, and what the inputs have besides ids."""
        given = self._given(inputs).on_meta().with_positions(self._parts)
        assert given.input_ids is not None
        B, T = given.input_ids.shape
        dtype = next(self.parameters()).dtype
        hidden = torch.empty(B, T // self._num_sequence_parts, self.config.hidden_size, dtype=dtype, device="meta")
        return given.passed_on(hidden, self.config)

    def set_sequence_parts(self, parts: SequenceParts, attention: Way) -> None:
        """See `parallelize_context`."""
        if self.config.head.pools:
            raise UnsupportedError(
                f"the head {self.config.head!r} works on whole sequences, which cp={parts.num_ranks} of MeshStrategy cuts; "
                "set cp_shard=1 and cp_replicate=1, or take a head that works on every token"
            )
        self._parts = parts

    def tied_parameters(self) -> dict[str, str]:
        """The head is the embedding of the first stage, if they are tied."""
        is_tie = self.config.ties and self._stage.is_last and not self._stage.is_first
        return {"head.weight": "embedding.weight"} if is_tie else {}

    def expert_modules(self) -> list[MixtureOfExperts]:
        """The layers of experts, which `parallelize_expert` shares out."""
        return [layer.feed_forward for layer in self.layers.values() if layer.has_experts]  # type: ignore[misc]

    def tensor_plan(self, num_ranks: int) -> dict[str, Style]:
        """The plan of `parallelize_tensor` over this many ranks, with sequence parallelism: T is a multiple of the ranks."""
        plan = decoder_tensor_plan(self.config, self._stage, [int(number) for number in self.layers], num_ranks)
        self._num_sequence_parts = num_ranks
        return plan


def layers_of_stage(config: DecoderConfig, stage: StageInfo) -> range:
    """The numbers of its layers. With experts in some of them, layers cost what one token meets there."""
    costs = [config.num_layer_parameters(number, active=True) for number in range(config.num_layers)]
    return distribute_layers(config.num_layers, stage.num_stages, costs=costs if len(set(costs)) > 1 else None)[stage.index]
