"""`LossStarts`: the tensors from which the backward of a loss starts, and what is said once about weights that look wrong.

Weights repeat from step to step, so the tensors of host numbers are kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from trainer_kit.pipeline.loss_terms import Term
from trainer_kit.torch_private import read_cpu_scalar


class LossStarts:
    """For one run. several: whether there are other ranks."""

    def __init__(self, several: bool) -> None:
        self._several = several
        self._kept: dict[tuple[float, torch.dtype, int], torch.Tensor] = {}
        self._warned: set[str] = set()

    def of(self, term: Term) -> torch.Tensor:
        """The gradient of the loss of a term."""
        loss, start = term.loss, term.start
        if isinstance(start, torch.Tensor):
            return start.to(loss.device, loss.dtype).reshape(loss.shape)
        key = (start, loss.dtype, loss.dim())
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) > 1000:
                self._kept.clear()
            if loss.dtype.itemsize < 4 and read_cpu_scalar(torch.tensor(start, dtype=loss.dtype)) != start:
                self._warn_once(f"the weight {start} is no {loss.dtype}, the dtype of the loss: return the loss in fp32", key="dtype")
            kept = self._kept[key] = torch.full_like(loss, float(start), requires_grad=False)
        return kept

    def warn_of_sizes(self, sizes: Sequence[int | None]) -> None:
        """Microbatches of these sizes counted alike, because no weight was given."""
        others = " on this rank and others on others" if self._several and len(set(sizes)) == 1 else ""
        self._warn_once(
            f"the microbatches of a step have {sizes} samples{others} but each counts 1, because the task declares no weight; "
            "set weight= of ForwardInputs, or return Loss(loss, weight), to make the loss the mean over samples",
            key="sizes",
        )

    def _warn_once(self, text: str, *, key: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, stacklevel=3)


def counted(terms: Sequence[Term]) -> list[Term]:
    """Those that a backward starts from. One of weight 0 may be nan (a mean over nothing), which 0 times nan would bring into gradients."""
    return [term for term in terms if isinstance(term.start, torch.Tensor) or term.start]
