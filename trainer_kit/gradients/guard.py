"""`NonFiniteGuard`: whether a step may update the parameters.

On a CPU the answer is there at once, so a bad step changes nothing. On an accelerator `nonfinite="error"` never waits: the flag
goes to fused optimizers as `found_inf`, which then leave the parameters alone, and is read some steps later, always before
anything is saved. `nonfinite="skip"` waits once per step there, because the LR schedule counts executed updates.
"""

from __future__ import annotations

import logging
import math
from collections import deque

import torch

from trainer_kit.exceptions import NonFiniteError
from trainer_kit.gradients.accumulated import Gradients
from trainer_kit.records import Deferred
from trainer_kit.torch_private import cpu_float_view, read_cpu_scalar, takes_found_inf

logger = logging.getLogger("trainer_kit")


class NonFiniteGuard:
    """Checks the gradients of each step under the policy `"error"`, `"skip"` or `"ignore"`.

    deferred: read the flags `delay` steps later, as on accelerators; else at once. tells: whether this rank says what all of them do.
    """

    def __init__(
        self,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        policy: str,
        *,
        device: torch.device,
        deferred: bool,
        delay: int,
        tells: bool = True,
    ) -> None:
        self._gradients = gradients
        self._optimizer = optimizer
        self._policy = policy
        self._deferred = deferred
        self._delay = delay
        self._tells = tells
        self._fused = takes_found_inf(optimizer)
        self._sticky = deferred and policy == "error"  # after a bad step nothing is updated until the host knows
        self._flag = torch.zeros((), dtype=torch.float32, device=device)
        self._host_flag = cpu_float_view(self._flag) if device.type == "cpu" and not self._sticky else None
        self._watching = False
        self._pending: deque[tuple[int, Deferred, torch.Tensor, list[str]]] = deque()
        self.num_skipped = 0

    def flag(self) -> torch.Tensor | None:
        """The element that `Gradients.finish` raises if a gradient is not finite; None if nobody asks."""
        if self._policy == "ignore":
            return None
        if self._host_flag is not None:
            self._host_flag.value = 0.0
        elif not self._sticky:
            self._flag.zero_()
        return self._flag

    def watch(self, watch: bool) -> None:
        """Whether somebody may change the gradients from now on, so that `permits` has to look again."""
        self._watching = watch and self._policy != "ignore"
        if self._watching:
            self._gradients.watch()

    def permits(self, step: int, weight: float | torch.Tensor) -> bool:
        """Whether this step updates the parameters; raises NonFiniteError under `"error"`."""
        if not self._is_on_device(weight) and _host_value(weight) == 0:
            self._tell("step %d: the weight of its pack is 0 (no sample or token counts), so nothing was updated", step)
            return False
        if self._policy == "ignore":
            return True
        if self._watching and (self._gradients.changed() or self._gradients.touched):
            self._gradients.flag_non_finite(self._flag)
        if self._gradients.is_cut:
            self._gradients.share_flag(self._flag)
        if self._sticky:
            self._check_later(step, weight)
            return True
        if (_host_value(self._flag) if self._host_flag is None else self._host_flag.value) == 0:
            return True
        if self._policy == "error":
            self._raise(step, self._gradients.norm_per_parameter(1.0), self._gradients.names_in_groups())
        self.num_skipped += 1
        self._tell("step %d: a gradient is not finite, so the step was skipped (%d skipped so far)", step, self.num_skipped)
        return False

    def _tell(self, text: str, *arguments: object) -> None:
        if self._tells:
            logger.warning(text, *arguments)

    def _is_on_device(self, weight: float | torch.Tensor) -> bool:
        """Whether the weight can stay on the device: its zero is told to the optimizer, or nothing is withheld at all."""
        return isinstance(weight, torch.Tensor) and self._deferred and (self._policy == "ignore" or (self._sticky and self._fused))

    def _check_later(self, step: int, weight: float | torch.Tensor) -> None:
        if self._fused:
            withheld = torch.logical_or(self._flag, weight == 0) if isinstance(weight, torch.Tensor) else self._flag
            self._optimizer.found_inf = withheld.to(torch.float32)  # type: ignore[attr-defined]
        norms = self._gradients.norm_per_parameter(1.0)  # they tell the name, if the flag is up; until then they stay on the device
        self._pending.append((step, Deferred([self._flag]), norms, self._gradients.names_in_groups()))
        while len(self._pending) > self._delay:
            self._resolve_one()

    def resolve(self) -> None:
        """Read every flag that is still on its way; called before anything is saved or returned."""
        while self._pending:
            self._resolve_one()

    def _resolve_one(self) -> None:
        step, flag, norms, names = self._pending.popleft()
        if float(flag):
            self._pending.clear()
            self._flag.zero_()
            self._raise(step, norms, names)

    def _raise(self, step: int, norms: torch.Tensor, names: list[str]) -> None:
        places = self._gradients.places()
        found = [(places[name], name) for name, norm in zip(names, norms.tolist(), strict=True) if not math.isfinite(norm)]
        of_ranks = self._gradients.exchange((found, list(places)))
        bad = list(dict.fromkeys(name for _, name in sorted(item for found, _ in of_ranks for item in found)))
        total = len({name for _, names in of_ranks for name in names})
        first = f"the first parameter with one is {bad[0]!r} ({len(bad)} of {total} have one)" if bad else "it was clipped away since"
        kept = (
            "no parameter was changed by it" if self._fused or not self._deferred else "this optimizer has updated the parameters with it"
        )
        raise NonFiniteError(
            f"step {step}: a gradient is inf or nan; {first}; {kept}, and nothing was saved since. Usual causes: a too high lr, a division "
            "by zero or a log of zero in the loss, broken samples. Look at the data of this step, lower lr, or set nonfinite='skip'"
        )


def _host_value(value: float | torch.Tensor) -> float:
    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.device.type == "cpu":
        return read_cpu_scalar(value)
    return float(Deferred([value]))
