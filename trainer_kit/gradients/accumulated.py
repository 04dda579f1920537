"""`Gradients`: the accumulated gradients of one step.

Backward starts from loss times weight and everything is summed; `finish` divides once by the weight of the pack. The norm is
computed once per step for all who ask, and again if somebody changed a gradient meanwhile. On a mesh all of it works on the local
gradients of this rank, which the synchroniser has brought together before. Before editing: one process has no synchroniser and pays
a truth test for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.exceptions import ModelError, UnsupportedError
from trainer_kit.parameters import ParameterRow
from trainer_kit.torch_private import fingerprint, keep_reduced_dtype, multiply_and_flag_non_finite, read_cpu_scalar

if TYPE_CHECKING:
    from trainer_kit.gradients.norm import NormOverRanks
    from trainer_kit.gradients.synchroniser import MicrobatchSync, Synchroniser
    from trainer_kit.mesh.context import DistributedContext

_CACHED_BYTES = 1024**2  # of gradients that a CPU has still in its cache when it goes over them again


class Gradients:
    """The gradients of the trainable parameters.

    context: the ranks; None: one process.
    grad_dtype: dtype in which gradients accumulate and are reduced; None: the parameter's.
    cast_for_update: whether the optimizer needs gradients in the parameter's dtype.
    sync: FSDP's part of the synchronisation, which is told before each microbatch; None: there is none.
    """

    def __init__(
        self,
        rows: Sequence[ParameterRow],
        *,
        context: DistributedContext | None = None,
        grad_dtype: torch.dtype | None = None,
        cast_for_update: bool = False,
        sync: MicrobatchSync | None = None,
    ) -> None:
        self._rows = list(rows)
        self._parameters = [row.local for row in rows]
        self._grad_dtype = grad_dtype
        self._cast = [p for p in self._parameters if grad_dtype is not None and p.dtype != grad_dtype] if cast_for_update else []
        self._members: list[list[torch.nn.Parameter]] = []  # parameters whose gradients share device and dtype, see `_group`
        self._groups: list[list[torch.Tensor]] = []
        self._norms: dict[float, torch.Tensor] = {}
        self.touched = False  # whether anybody but `scale` changed a gradient in this step
        self._kept_weight: float | None = None
        self._kept_inverse = torch.empty(0)
        self._known: tuple[int, ...] = ()  # the gradients to which the norms belong
        self._keeps_norms = True  # whether this rank sees every change: those of other stages are made on other ranks
        self._set_grad_dtype(self._parameters)
        self._mesh: Synchroniser | None = None
        self._ranks: NormOverRanks | None = None
        self._shares = torch.empty(0)  # of the parameters of `_members` in the norm
        self.is_cut = False  # whether no rank has all gradients, so that the norm and the finite check take all of them
        if context is not None and context.world_size > 1:
            self._join(context, sync)

    def _join(self, context: DistributedContext, sync: MicrobatchSync | None) -> None:
        from trainer_kit.gradients.norm import NormOverRanks
        from trainer_kit.gradients.synchroniser import Synchroniser

        self._set_grad_dtype([row.parameter for row in self._rows])
        if sync is not None and self._grad_dtype is not None:
            for unit in sync.units:
                keep_reduced_dtype(unit, self._grad_dtype)
        self._mesh = Synchroniser(self._rows, context, sync)
        self._ranks = NormOverRanks.of(self._rows, context)
        self.is_cut = self._ranks is not None
        self._keeps_norms = context.num_pipeline_ranks == 1

    def _set_grad_dtype(self, parameters: Sequence[Any]) -> None:
        if self._grad_dtype is not None:
            for parameter in parameters:
                if parameter.dtype.itemsize < self._grad_dtype.itemsize:
                    parameter.grad_dtype = self._grad_dtype

    def begin_microbatch(self, is_last: bool) -> None:
        """On a mesh, before each microbatch; `is_last`: no other follows in this pack on this rank."""
        if self._mesh is not None:
            self._mesh.begin_microbatch(is_last)

    def finish(self, weight: float | torch.Tensor, flag: torch.Tensor | None = None) -> None:
        """Divide by the weight of the pack. A parameter that nothing used has a zero gradient, as on every mesh.

        flag: a float32 element that becomes 1 if a gradient is not finite; None: not asked for.
        """
        self._norms, self.touched = {}, False
        self._collect()
        if isinstance(weight, torch.Tensor):
            weight = torch.where(weight == 0, 1, weight)
        # For a power of two the product with the inverse is the quotient bit by bit, and costs no pass over the memory of its own.
        exact = None if isinstance(weight, torch.Tensor) or math.frexp(weight)[0] not in (0.5, 0.0) else weight
        for group in self._groups:
            if flag is not None and exact is not None and group[0].dtype.itemsize <= 4:
                multiply_and_flag_non_finite(group, self._inverse(exact, flag), flag)
                continue
            if isinstance(weight, torch.Tensor) or weight not in (0, 1):
                torch._foreach_div_(group, weight)
            if flag is not None:
                multiply_and_flag_non_finite(group, self._inverse(1, flag), flag)

    def _collect(self) -> None:
        if self._mesh is not None:
            self._mesh.finish()
        else:
            if self._members:
                self._look_up()
                if not any(gradient is None for group in self._groups for gradient in group):
                    return
            for parameter in self._parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        if not self._members:
            self._group()
        self._look_up()

    def _inverse(self, weight: float, like: torch.Tensor) -> torch.Tensor:
        """1 / weight as a float32 element on the device of the flag; the last one is kept, as a weight seldom changes."""
        if weight != self._kept_weight or self._kept_inverse.device != like.device:
            self._kept_inverse, self._kept_weight = torch.full_like(like, 1 / (weight or 1)), weight
        return self._kept_inverse

    def _look_up(self) -> None:
        self._groups = [[parameter.grad for parameter in members] for members in self._members]  # type: ignore[misc]

    def watch(self) -> None:
        """Remember the gradients as they are, for `changed`."""
        self._known = fingerprint(grad for group in self._groups for grad in group)

    def changed(self) -> bool:
        """Whether somebody changed a gradient since `watch`, other than by `scale`. Looks the gradients up again if so.

        On a mesh whoever changes gradients does so on every rank: the norm that is due then takes all of them.
        """
        if self._mesh is not None:
            self._mesh.look_up()
        self._look_up()
        now = fingerprint(grad for group in self._groups for grad in group)
        if now == self._known:
            return False
        self._known, self._norms, self.touched = now, {}, True
        return True

    def check_trainable(self, rows: Iterable[ParameterRow]) -> None:
        """Raise ModelError if what is trainable among `rows` is not what was so at the build."""
        mine = {id(row.parameter) for row in self._rows}
        other = [row.name for row in rows if row.trainable != (id(row.parameter) in mine)]
        if other:
            raise ModelError(
                f"requires_grad of {', '.join(map(repr, other[:5]))} was changed after the build, which the optimizer does not know. "
                "Build with everything trainable that will ever be, and hold it still meanwhile by an lr of 0 of its parameter group"
            )

    def _group(self) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[ParameterRow]] = {}
        for row in self._rows:
            gradient = row.local.grad
            assert gradient is not None
            if gradient.layout != torch.strided:
                raise ModelError(f"the gradient of {row.name!r} is sparse; build its layer with sparse=False, a dense gradient is needed")
            if gradient.is_complex():
                raise UnsupportedError(
                    f"{row.name!r} is complex, for which norms and finite checks are not defined here; use a pair of real parameters"
                )
            if gradient.numel():  # a rank may hold no element of a short parameter, and no largest one is to be found among none
                groups.setdefault((gradient.device, gradient.dtype), []).append(row)
        parts = [part for (device, _), rows in groups.items() for part in (_cached_parts(rows) if device.type == "cpu" else [rows])]
        self._members = [[row.local for row in rows] for rows in parts]
        if self._ranks is not None:
            self._shares = self._ranks.shares(row for rows in parts for row in rows)

    def norm(self, p: float = 2.0) -> torch.Tensor:
        """The p-norm over all gradients as a device tensor; the formula of `torch.nn.utils.get_total_norm`. On a mesh a collective.

        It is computed again only if a gradient was changed since; in a pipeline every time, as all ranks must take part in that.
        Large finite gradients overflow in fp32; a CPU, where looking costs nothing, then computes in fp64.
        """
        self.changed()
        if p not in self._norms or not self._keeps_norms:
            norm = self._norm(p, torch.float32)
            if norm.device.type == "cpu" and not math.isfinite(read_cpu_scalar(norm)):
                norm = self._norm(p, torch.float64).to(norm.dtype)
            self._norms[p] = norm
        return self._norms[p]

    def _norm(self, p: float, dtype: torch.dtype) -> torch.Tensor:
        norms = self.norm_per_parameter(p, dtype)
        return torch.linalg.vector_norm(norms, p) if self._ranks is None else self._ranks.norm(norms, self._shares, p)

    def norm_per_parameter(self, p: float = 2.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The p-norm of each local gradient, computed in `dtype` or its own if that is wider; in the order of `names_in_groups`."""
        norms = [n for group in self._groups for n in torch._foreach_norm(group, p, dtype=torch.promote_types(group[0].dtype, dtype))]
        if not norms:
            return torch.zeros(0, dtype=dtype, device=self._shares.device)
        widest = functools.reduce(torch.promote_types, (n.dtype for n in norms))
        return torch.stack([n.to(norms[0].device, widest) for n in norms])

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply all gradients, and the norms that are known already. The factor must be finite."""
        known = not isinstance(factor, torch.Tensor) or factor.device.type == "cpu"
        if known and not math.isfinite(read_cpu_scalar(factor) if isinstance(factor, torch.Tensor) else factor):
            raise ModelError(f"the gradients were to be scaled by {float(factor)}, expected a finite factor")
        kept = {} if self.changed() else self._norms
        for group in self._groups:
            torch._foreach_mul_(group, factor.to(group[0].device) if isinstance(factor, torch.Tensor) else factor)
        if known:  # else it counts as a change, and the gradients are looked at once more
            self.watch()
        self._norms = {p: norm * factor for p, norm in kept.items()}

    def flag_non_finite(self, flag: torch.Tensor) -> None:
        """Set `flag` to 1 if any gradient is not finite."""
        for group in self._groups:
            multiply_and_flag_non_finite(group, self._inverse(1, flag), flag)

    def share_flag(self, flag: torch.Tensor) -> None:
        """Where gradients are cut, set `flag` to 1 if it is 1 on any rank, so that all of them decide alike. A collective."""
        if self._ranks is not None:
            self._ranks.agree(flag)

    def exchange(self, value: Any) -> list[Any]:
        """On the way to an error that all ranks raise: the value of each rank, or of this one if it has all gradients."""
        return [value] if self._ranks is None else self._ranks.exchange(value)

    def places(self) -> dict[str, tuple[int, int]]:
        """Where the parameters with a gradient are in the model, by name: stage, and number on this rank."""
        return {row.name: (row.stage, index) for index, row in reversed(list(enumerate(self._rows)))}

    def names_in_groups(self) -> list[str]:
        """Names in the order of `norm_per_parameter`."""
        names = {id(row.local.grad): row.name for row in self._rows}
        return [names[id(grad)] for group in self._groups for grad in group]

    def cast_for_update(self) -> None:
        """Bring gradients that accumulated in a wider dtype to the parameter's, for optimizers that need it."""
        for parameter in self._cast:
            grad, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = grad.to(parameter.dtype) if grad is not None else None

    def zero(self) -> None:
        """Drop the gradients; the next backward makes new ones. Those in buckets become zero where they are."""
        for parameter in self._parameters if self._mesh is None else self._cast:
            parameter.grad = None
        self._groups, self._norms = [], {}
        self._set_grad_dtype(self._cast)
        if self._mesh is not None:
            self._mesh.zero()

    def close(self) -> None:
        """Drop the gradients for good, and the hooks of a mesh with them."""
        self.zero()
        if self._mesh is not None:
            self._mesh.close()


def _cached_parts(rows: Sequence[ParameterRow]) -> list[list[ParameterRow]]:
    """`rows` in order, in parts so small that the finite check finds in the cache of the CPU what the division wrote."""
    parts: list[list[ParameterRow]] = []
    free = 0
    for row in rows:
        size = row.local.numel() * (row.local.grad_dtype or row.local.dtype).itemsize
        if not parts or size > free:
            parts.append([])
            free = _CACHED_BYTES
        parts[-1].append(row)
        free -= size
    return parts
