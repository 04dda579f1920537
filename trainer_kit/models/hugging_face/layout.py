"""The names of Hugging Face and ours: one description of a stage, read forwards at load and backwards at export.

Layers carry global numbers on both sides. Rotary positions turn the same halves of a head in both, so no row is moved. Experts are stored
in two ways, a matrix per expert (`list`) or all of a layer in one tensor with gate and up side by side (`fused`); ours are in between.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from trainer_kit.model.provider import StageInfo
from trainer_kit.models.config import DecoderConfig
from trainer_kit.models.config_parts import Embedding, Head, LanguageModeling, TokenClassification
from trainer_kit.models.decoder import layers_of_stage
from trainer_kit.weights.mapper import StateMapper
from trainer_kit.weights.mappers import Chunk, Copy, Drop, Parallel, Prefix, Rename, Stack, expand, for_each

ExpertLayout = Literal["list", "fused"]

PREFIX = "model."  # before the names of the base model in a model with a head
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

# Buffers that old versions stored though they follow from the configuration.
NEVER_USED = ("*rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which of the ways of Hugging Face to write the same model.

    prefix: before the names of the base model. head: the stored head; None: none that fits, so ours is not mapped. unties: there is no
    stored head because it is the embedding, and ours is a matrix of its own.
    """

    prefix: str = PREFIX
    experts: ExpertLayout = "list"
    head: Head | None = None
    unties: bool = False


def stage_mapper(config: DecoderConfig, stage: StageInfo, layout: Layout) -> StateMapper:
    """From the names of Hugging Face to those of a stage of a `Decoder`."""
    base = _layers(config, layers_of_stage(config, stage), layout.experts)
    if stage.is_last:
        base.append(Rename("norm.weight", "norm.weight"))
    outer: list[StateMapper] = []
    if layout.unties and stage.is_last:
        outputs = ["embedding.weight", "head.weight"] if stage.is_first else ["head.weight"]
        outer.append(Copy(layout.prefix + EMBEDDING, outputs))
    elif stage.is_last:
        outer += [Rename(theirs, ours) for theirs, ours in head_names(layout.head).items()]
    if stage.is_first and not (layout.unties and stage.is_last):
        base.append(Rename(EMBEDDING, "embedding.weight"))
    return Parallel([Prefix(Parallel(base), inputs=layout.prefix), *outer])


def export_mapper(config: DecoderConfig, stage: StageInfo, experts: ExpertLayout) -> StateMapper:
    """From a stage to what `from_pretrained` reads: a tied head is not written, and neither are the router's balance biases."""
    head = None if config.ties else config.head
    layout = Layout("" if isinstance(config.head, Embedding) else PREFIX, experts, head)
    dropped = balance_biases(config, stage)
    mapper = stage_mapper(config, stage, layout).inverse()
    return Parallel([mapper, Drop(dropped)]) if dropped else mapper


def balance_biases(config: DecoderConfig, stage: StageInfo) -> list[str]:
    """Our buffers of a stage that Hugging Face has no place for."""
    if config.moe is None or not config.moe.balance_bias:
        return []
    return [f"layers.{number}.feed_forward.router.balance_bias" for number in layers_of_stage(config, stage) if config.has_experts(number)]


def head_names(head: Head | None) -> dict[str, str]:
    """The stored names of a head, and ours."""
    if head is None or isinstance(head, Embedding):
        return {}
    if isinstance(head, LanguageModeling):
        return {HEAD: "head.weight"}
    names = ("weight", "bias") if isinstance(head, TokenClassification) and head.bias else ("weight",)
    return {f"score.{name}": f"head.score.{name}" for name in names}


def find_layout(names: Collection[str]) -> Layout:
    """The prefix and the layout of experts of stored names."""
    prefix = PREFIX if any(name.startswith(PREFIX) for name in names) else ""
    is_fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
    return Layout(prefix, "fused" if is_fused else "list")


def _layers(config: DecoderConfig, layers: Sequence[int], experts: ExpertLayout) -> list[StateMapper]:
    """Mappers of the layers with these numbers; names without the prefix."""
    dense = [number for number in layers if not config.has_experts(number)]
    mixed = [number for number in layers if config.has_experts(number)]
    num_experts = config.moe.num_experts if config.moe is not None else 0
    feed_forward = _linears("mlp", "feed_forward", ("gate_proj", "up_proj", "down_proj"), config.mlp_bias)
    found: list[StateMapper] = [for_each({"i": layers}, Parallel(_in_layer(_attention(config))))]
    if dense:
        found.append(for_each({"i": dense}, Parallel(_in_layer(feed_forward))))
    if mixed:
        found.append(for_each({"i": mixed}, Parallel(_experts(num_experts, experts))))
    return found


def _in_layer(names: Sequence[tuple[str, str]]) -> list[Rename]:
    return [Rename(f"layers.{{i}}.{theirs}", f"layers.{{i}}.{ours}") for theirs, ours in names]


def _attention(config: DecoderConfig) -> list[tuple[str, str]]:
    """The names of what all layers have: attention, and the norms."""
    norms = ("q_norm", "k_norm") if config.qk_norm else ()
    return [
        ("input_layernorm.weight", "attention_norm.weight"),
        ("post_attention_layernorm.weight", "feed_forward_norm.weight"),
        *_linears("self_attn", "attention", ("q_proj", "k_proj", "v_proj", "o_proj"), config.attention_bias),
        *((f"self_attn.{name}.weight", f"attention.{name}.weight") for name in norms),
    ]


def _linears(theirs: str, ours: str, names: Sequence[str], bias: bool) -> list[tuple[str, str]]:
    kinds = ("weight", "bias") if bias else ("weight",)
    return [(f"{theirs}.{name}.{kind}", f"{ours}.{name}.{kind}") for name in names for kind in kinds]


def _experts(num_experts: int, layout: ExpertLayout) -> list[StateMapper]:
    """The router and the experts of layer {i}. Shapes: ours (experts, out, in); fused gate and up (experts, 2 * out, in)."""
    theirs, ours = "layers.{i}.mlp.experts", "layers.{i}.feed_forward.experts"
    router = Rename("layers.{i}.mlp.gate.weight", "layers.{i}.feed_forward.router.weight")
    if layout == "fused":
        halves = [f"{ours}.gate_proj", f"{ours}.up_proj"]
        return [router, Chunk(f"{theirs}.gate_up_proj", halves, dim=1), Rename(f"{theirs}.down_proj", f"{ours}.down_proj")]
    names = ("gate_proj", "up_proj", "down_proj")
    return [router, *(Stack(expand(f"{theirs}.{{e}}.{name}.weight", e=range(num_experts)), f"{ours}.{name}") for name in names)]
