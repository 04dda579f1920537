"""`CausalLMTask`: next-token prediction, weighted by tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from trainer_kit.exceptions import ConfigurationError
from trainer_kit.metrics import Metric, Perplexity
from trainer_kit.task import ForwardInputs, Task
from trainer_kit.torch_private import whole_tensor

if TYPE_CHECKING:
    from trainer_kit.parallel.context import SequenceParts

IGNORE_INDEX = -100


@dataclass(slots=True)
class TokenTargets:
    """Targets (B, T), the number of those that count, and the loss once it is known."""

    targets: torch.Tensor
    num_tokens: int | torch.Tensor
    loss: torch.Tensor | None = None


class CausalLMTask(Task):
    """Mean cross-entropy over all tokens of the step, whatever the lengths of its microbatches.

    A batch is a tensor of tokens (B, T), or a mapping with `input_ids` and optionally `labels` (B, T), in the layout that
    transformers uses: not shifted, -100 where nothing is predicted; without labels, tokens at which an `attention_mask` (B, T) is 0
    or `document_ids` (B, T) are -1 are padding and not predicted, nor is the first token of a document that is packed behind another one.
    All entries but the labels go to the model as they are. The model returns logits (B, T, V), or an object
    that has them as `.logits`.
    """

    def build_forward_inputs(self, batch: Any) -> ForwardInputs:
        if isinstance(batch, torch.Tensor):
            tokens, labels, inputs = batch, batch, batch  # type: tuple[torch.Tensor, torch.Tensor, Any]
        elif isinstance(batch, Mapping) and "input_ids" in batch:
            tokens = batch["input_ids"]
            given = batch.get("labels")
            labels = labels_of(tokens, batch.get("attention_mask"), batch.get("document_ids")) if given is None else given
            inputs = {name: value for name, value in batch.items() if name != "labels"}
        else:
            found = f"a mapping with {sorted(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise ConfigurationError(f"CausalLMTask takes a tensor of tokens or a mapping with 'input_ids', but the batch is {found}")
        if tokens.ndim != 2 or labels.shape != tokens.shape:
            raise ConfigurationError(
                "CausalLMTask takes tokens of shape (batch, length) and labels of the same shape, "
                f"found {tuple(tokens.shape)} and {tuple(labels.shape)}"
            )
        # Shifted here rather than in the loss, so that each position keeps its target when a sequence is cut into parts.
        targets = torch.full_like(labels, IGNORE_INDEX)
        targets[:, :-1] = labels[:, 1:]
        if labels is tokens:
            num_tokens: int | torch.Tensor = tokens.shape[0] * (tokens.shape[1] - 1)
        else:  # counted where the labels are, so that nothing waits for the device
            num_tokens = (targets != IGNORE_INDEX).sum()
        return ForwardInputs(inputs=inputs, state=TokenTargets(targets, num_tokens), weight=num_tokens)

    def cut_sequences(self, given: ForwardInputs, parts: SequenceParts) -> ForwardInputs:
        """Inputs (B, T, ...) or (1, T, ...) are cut; what has another shape goes to the model as it is."""
        if not isinstance(given.state, TokenTargets) or given.weight is not given.state.num_tokens:  # of a subclass
            return super().cut_sequences(given, parts)
        whole = given.state.targets
        targets = parts.take(whole)
        num_tokens = (targets != IGNORE_INDEX).sum()
        return replace(
            given,
            inputs=parts.take_all(given.inputs, whole.shape),
            shared=parts.take_all(given.shared, whole.shape),
            state=replace(given.state, targets=targets, num_tokens=num_tokens),
            weight=num_tokens,
        )

    def compute_loss(self, pipeline_results: Any, state: TokenTargets) -> torch.Tensor:
        logits = pipeline_results if isinstance(pipeline_results, torch.Tensor) else pipeline_results.logits
        # A sum over a clamped count stays finite, with zero gradients, when no label counts.
        logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))  # a bf16 softmax loses digits
        total = F.cross_entropy(logits, state.targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        total = whole_tensor(total)  # with tensor parallelism the logits are cut over the vocabulary, and stay so
        count = state.num_tokens.clamp(min=1) if isinstance(state.num_tokens, torch.Tensor) else max(state.num_tokens, 1)
        loss = total / count
        state.loss = loss.detach()
        return loss

    def metrics(self) -> dict[str, Metric]:
        return {"perplexity": Perplexity()}

    def update_metrics(self, metrics: dict[str, Metric], pipeline_results: Any, state: TokenTargets) -> None:
        metrics["perplexity"].update(state.loss, state.num_tokens)

    def process_outputs(self, pipeline_results: Any, state: Any) -> Any:
        return whole_tensor(pipeline_results if isinstance(pipeline_results, torch.Tensor) else pipeline_results.logits)


def labels_of(tokens: torch.Tensor, mask: torch.Tensor | None, document_ids: torch.Tensor | None) -> torch.Tensor:
    """The labels of tokens that come without; the tokens themselves if all of them are predicted."""
    return without_starts(without_padding(tokens, mask), document_ids)


def without_padding(tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Labels that leave the masked tokens out. A mask of another shape, as for packed sequences, does not tell of padding."""
    if mask is None or mask.shape != tokens.shape:
        return tokens
    return tokens.masked_fill(mask == 0, IGNORE_INDEX)


def without_starts(labels: torch.Tensor, document_ids: torch.Tensor | None) -> torch.Tensor:
    """Labels that leave out padding and what no token of the same document foretells."""
    if document_ids is None:
        return labels
    labels = labels.masked_fill(document_ids < 0, IGNORE_INDEX)
    labels[:, 1:].masked_fill_(document_ids[:, 1:] != document_ids[:, :-1], IGNORE_INDEX)
    return labels
