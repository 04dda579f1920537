"""`NonFiniteGuard`: whether a step may update the parameters.

On a CPU the answer is there at once, so a bad step changes nothing. On an accelerator `nonfinite="error"` never waits: the flag
goes to fused optimizers as `found_inf`, which leaves the parameters alone, and is read some steps later, always before anything
is saved. `nonfinite="skip"` waits once per step there, because the LR schedule counts executed updates.
"""

from __future__ import annotations

import logging
from collections import deque

import torch

from trainer_kit.exceptions import NonFiniteError
from trainer_kit.gradients.accumulated import Gradients
from trainer_kit.records import Deferred
from trainer_kit.torch_private import read_cpu_scalar

logger = logging.getLogger("trainer_kit")


class NonFiniteGuard:
    """Checks the gradients of each step under the policy `"error"`, `"skip"` or `"ignore"`.

    deferred: read the flag later (accelerators); else at once.
    """

    def __init__(self, gradients: Gradients, optimizer: torch.optim.Optimizer, policy: str, *, device: torch.device, delay: int) -> None:
        self._gradients = gradients
        self._optimizer = optimizer
        self._policy = policy
        self._deferred = device.type != "cpu"
        self._delay = delay
        self._flag = torch.zeros((), dtype=torch.float32, device=device)
        self._pending: deque[tuple[int, Deferred, list[str]]] = deque()
        self.num_skipped = 0
        self._fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def permits(self, step: int, weight: float | torch.Tensor) -> bool:
        """Whether this step updates the parameters; raises NonFiniteError under `"error"`."""
        if not isinstance(weight, torch.Tensor) or not self._deferred:
            if float(weight if not isinstance(weight, torch.Tensor) else read_cpu_scalar(weight.double())) == 0:
                logger.warning("step %d: the weight of its pack is 0 (no sample or token counts), so nothing was updated", step)
                return False
        elif self._fused:
            self._flag.copy_(weight == 0)
        if self._policy == "ignore":
            return True
        if self._deferred and self._policy == "error":
            self._check_later(step)
            return True
        self._flag.zero_()
        self._gradients.flag_non_finite(self._flag)
        bad = bool(float(Deferred([self._flag]))) if self._deferred else read_cpu_scalar(self._flag) != 0
        if not bad:
            return True
        if self._policy == "error":
            self._raise(step, self._gradients.norm_per_parameter(1.0).tolist(), self._gradients.names_in_groups())
        self.num_skipped += 1
        logger.warning("step %d: a gradient is not finite, so the step was skipped (%d skipped so far)", step, self.num_skipped)
        return False

    def _check_later(self, step: int) -> None:
        norms = self._gradients.norm_per_parameter(2.0)
        if self._fused:
            # Sticky: after a bad step nothing is updated until the host knows.
            self._flag.logical_or_(~torch.isfinite(norms).all())
            self._optimizer.found_inf = self._flag  # type: ignore[attr-defined]
        self._pending.append((step, Deferred(list(norms)), self._gradients.names_in_groups()))
        while len(self._pending) > self._delay:
            self._resolve_one()

    def resolve(self) -> None:
        """Read every flag that is still on its way; called before anything is saved or returned."""
        while self._pending:
            self._resolve_one()

    def _resolve_one(self) -> None:
        step, deferred, names = self._pending.popleft()
        norms = deferred.values()
        if not all(abs(norm) < float("inf") for norm in norms):  # false for nan too
            self._pending.clear()
            self._raise(step, norms, names)

    def _raise(self, step: int, norms: list[float], names: list[str]) -> None:
        bad = [name for name, norm in zip(names, norms, strict=True) if not abs(norm) < float("inf")]
        first = f"the first parameter with one is {bad[0]!r} ({len(bad)} of {len(norms)} have one)" if bad else "only their norm overflows"
        raise NonFiniteError(
            f"step {step}: a gradient is inf or nan; {first}. No parameter was changed by it and nothing was saved since. Usual causes: a too high lr, "
            "a division by zero or a log of zero in the loss, broken samples. Clip with GradientClipping, or set nonfinite='skip'"
        )
