"""`SplitBackward`: the backward of one microbatch through one stage in two parts, each of which is really a part of the work.

The first part computes the gradients of the stage's inputs, which the previous stage waits for; the second those of the parameters, added
to `.grad` with all hooks, as an ordinary backward does. Nothing is computed twice. Not here: when which part runs (the program).

Nodes of the graph from which an input is reached are on the way; the others lead to parameters only. Where edges leave the way, what
their node got is kept, and in the second part the node is called once more, for these edges alone: autograd computes of a node what the
running backward needs, so the second part opens one that needs these edges and nothing else.
Before editing: a node written in Python computes all its gradients at once, whatever is needed, and may free what it saved. It runs in
the first part only, and what it found for parameters is kept instead. Hooks on activations fire in the first part, those on parameters in
the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from trainer_kit.torch_private import call_node, run_backward

Edge = tuple[Node, int]  # a node, and which result of its forward


@dataclass(slots=True)
class _Branch:
    """A node on the way with edges that leave it: (place among its edges, edge). `got`: its gradients in the first part, by result."""

    node: Node
    leaving: list[tuple[int, Edge]]
    got: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Group:
    """What ends in the same parameters and is done together: then each of them gets one gradient, as its hooks expect.

    ready: gradients that need no call of a node.
    """

    branches: list[_Branch] = field(default_factory=list)
    ready: list[tuple[Edge, torch.Tensor]] = field(default_factory=list)


class SplitBackward:
    """Call `of_inputs`, then `of_weights`, once each. Between them the graph stays, with all that it saved.

    roots: the edges of the tensors where backward starts. inputs: different leaves. Without any, everything is left to the second part.
    """

    def __init__(self, roots: Sequence[GradientEdge], inputs: Sequence[torch.Tensor]) -> None:
        self._roots: list[Edge] = [(root.node, root.output_nr) for root in roots]
        self._inputs = inputs
        self._groups: list[_Group] = []

    def of_inputs(self, starts: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of the inputs; None for one that no root depends on."""
        if not self._inputs:
            self._groups, self._roots = [_Group(ready=list(zip(self._roots, starts, strict=True)))], []
            return []
        ends = [get_gradient_edge(tensor) for tensor in self._inputs]
        cut = _Cut(self._roots, [end.node for end in ends])
        begins = list(zip(self._roots, starts, strict=True))
        self._roots, self._inputs = [], ()  # what is behind them is freed as soon as it has run
        for edge, start in begins:
            if not cut.on_the_way[edge[0]]:
                cut.group_of(edge[0]).ready.append((edge, start))
        begins = [(edge, start) for edge, start in begins if cut.on_the_way[edge[0]]]
        handles = [node.register_hook(_keeper(leaving, cut)) for node, leaving in cut.in_python.items()]
        found = iter(_gradients(begins, [*ends, *_edges(cut.kept)]) if begins else [None] * len(ends))
        for handle in handles:
            handle.remove()
        of_inputs = [next(found) for _ in ends]
        for (node, result), gradient in zip(cut.kept, found, strict=True):
            if gradient is not None:
                cut.branches[node].got[result] = gradient
        self._groups = list(cut.groups.values())
        return of_inputs

    def of_weights(self) -> None:
        """Add the gradients of the parameters to `.grad`."""
        groups, self._groups = self._groups[::-1], []

        def run() -> None:
            while groups:  # one after the other, so that each frees what it used
                _finish(groups.pop())

        needed = [edge for group in groups for branch in group.branches for _, edge in branch.leaving]
        devices = {gradient.device for group in groups for branch in group.branches for gradient in branch.got.values()}
        if devices:
            _run_where_needed(run, needed, next(iter(devices)))
        else:
            run()


class _Cut:
    """Where the graph is cut, found once per backward.

    on_the_way: of each node, whether an input is reached from it, from the inputs to the roots. branches: by their node, from the roots to
    the inputs. kept: the edges to them, whose gradients are kept. in_python: the edges that leave the way at nodes written in Python.
    """

    def __init__(self, roots: Sequence[Edge], ends: Sequence[Node]) -> None:
        self.on_the_way = dict.fromkeys(ends, True)
        self._edges: dict[Node, tuple[tuple[Node | None, int], ...]] = dict.fromkeys(ends, ())
        self._search([node for node, _ in roots])
        leaving = {node: found for node, leads in reversed(self.on_the_way.items()) if leads and (found := list(self._leaving(node)))}
        self.in_python = {node: found for node, found in leaving.items() if isinstance(node, BackwardCFunction)}
        self.branches = {node: _Branch(node, found) for node, found in leaving.items() if node not in self.in_python}
        used = ((node, result) for edges in [*self._edges.values(), roots] for node, result in edges if node in self.branches)
        self.kept: list[Edge] = list(dict.fromkeys(used))
        self._heads: dict[Node, Node] = {}  # a forest: nodes that lead to the same parameters have the same head in the end
        self.groups: dict[Node, _Group] = {}
        self._group()

    def _search(self, to_visit: list[Node]) -> None:
        """Depth first, without recursion, as graphs are deep."""
        leads, edges = self.on_the_way, self._edges
        opened: set[Node] = set()
        while to_visit:
            node = to_visit[-1]
            if node in leads:
                to_visit.pop()
            elif node in opened:
                leads[node] = any([leads[child] for child, _ in edges[node] if child is not None])  # noqa: C419  # twice as fast
            else:
                opened.add(node)
                own = edges[node] = node.next_functions
                to_visit += [child for child, _ in own if child is not None and child not in leads]

    def _leaving(self, node: Node) -> Iterator[tuple[int, Edge]]:
        for place, (child, result) in enumerate(self._edges[node]):
            if child is not None and not self.on_the_way[child]:
                yield place, (child, result)

    def _group(self) -> None:
        for node, edges in self._edges.items():
            if not self.on_the_way[node]:
                self._join([node, *(child for child, _ in edges if child is not None)])
        for branch in self.branches.values():
            self._join([node for _, (node, _) in branch.leaving])
        for branch in self.branches.values():
            self.group_of(branch.leaving[0][1][0]).branches.append(branch)

    def _join(self, nodes: Sequence[Node]) -> None:
        head = self._head(nodes[0])
        for node in nodes[1:]:
            self._heads[self._head(node)] = head

    def _head(self, node: Node) -> Node:
        while (head := self._heads.setdefault(node, node)) is not node:
            self._heads[node] = node = self._heads[head]  # halves the path
        return node

    def group_of(self, node: Node) -> _Group:
        """The group of a node that is not on the way."""
        return self.groups.setdefault(self._head(node), _Group())


def _edges(edges: Iterable[Edge]) -> list[GradientEdge]:
    return [GradientEdge(node, result) for node, result in edges]


def _gradients(begins: Sequence[tuple[Edge, torch.Tensor]], wanted: Sequence[GradientEdge]) -> Sequence[torch.Tensor | None]:
    edges, starts = zip(*begins, strict=True)
    return torch.autograd.grad(_edges(edges), wanted, starts, retain_graph=True, allow_unused=True)


def _keeper(leaving: list[tuple[int, Edge]], cut: _Cut) -> Callable[..., None]:
    """A hook of a node that keeps what it found for the edges that leave the way."""

    def keep(found: Sequence[torch.Tensor | None], _: Any) -> None:
        for place, edge in leaving:
            if (gradient := found[place]) is not None:
                cut.group_of(edge[0]).ready.append((edge, gradient))

    return keep


def _finish(group: _Group) -> None:
    begins = group.ready
    for branch in group.branches:
        if branch.got:
            found = call_node(branch.node, branch.got)
            begins += [(edge, gradient) for place, edge in branch.leaving if (gradient := found[place]) is not None]
    if begins:
        edges, starts = zip(*begins, strict=True)
        run_backward(tuple(_edges(edges)), starts)


class _Inside(torch.autograd.Function):
    """Its backward calls a function: inside of the backward that it belongs to."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.function()
        return gradient, None


def _run_where_needed(function: Callable[[], None], edges: Sequence[Edge], device: torch.device) -> None:
    """Run `function` in a backward that needs the gradients of these edges and of nothing else.

    It starts at a node of its own from which none of them is reached, so by itself it computes nothing.
    """
    anchor = torch.zeros((), device=device, requires_grad=True)
    with torch.enable_grad():
        end = _Inside.apply(anchor, function)
    wanted = [get_gradient_edge(anchor), *_edges(dict.fromkeys(edges))]
    torch.autograd.grad([end], wanted, [anchor.detach()], allow_unused=True)
