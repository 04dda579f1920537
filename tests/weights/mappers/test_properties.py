"""What holds for every graph of exact mappers. TRAINER_KIT_EXAMPLES=2000 tries more of them than the suite has time for."""

import json
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.weights.mosaics import assemble
from trainer_kit.weights import Parallel, Prefix, Sequential, for_each, load_model_state

from .graphs import Graph, graphs, random_tensor

EXAMPLES = os.environ.get("TRAINER_KIT_EXAMPLES")
tried = settings(max_examples=int(EXAMPLES or 40), deadline=None, derandomize=not EXAMPLES)


def step_by_step(graph: Graph):
    """The whole state through one stage after the other, without the groups of the composition."""
    state = dict(graph.tensors)
    for stage in graph.stages:
        taken = {name: state.pop(name) for group in stage.groups() for name in group.inputs}
        state.update(stage.apply_all(taken))
    return state


def restricted(tensors, mapper):
    """The tensors that the mapper takes: what no stage touches belongs to no group."""
    return {name: tensors[name] for group in mapper.groups() for name in group.inputs}


def bits(tensor):
    """The bytes, so that a NaN equals itself."""
    return tensor.clone(memory_format=torch.contiguous_format).reshape(*tensor.shape, 1).view(torch.uint8)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


@tried
@given(graphs())
def test_the_inverse_undoes_a_graph_bit_by_bit(graph):
    """Contract 36."""
    mapper = Sequential(graph.stages)
    tensors = restricted(graph.tensors, mapper)
    assert_equal(mapper.inverse().apply_all(mapper.apply_all(tensors)), tensors)


@tried
@given(graphs(), st.data())
def test_groups_in_any_order_give_what_everything_at_once_gives(graph, data):
    """Contract 35: and the shapes and dtypes are known from meta tensors."""
    cut = data.draw(st.integers(0, len(graph.stages)))
    mapper = Sequential([Sequential(graph.stages[:cut]), *graph.stages[cut:]])
    made = {}
    for group in data.draw(st.permutations(mapper.groups())):
        inputs = {name: graph.tensors[name] for name in group.inputs}
        outputs = mapper.apply(inputs)
        assert outputs.keys() == group.outputs
        on_meta = mapper.apply({name: tensor.to("meta") for name, tensor in inputs.items()})
        assert {n: (t.shape, t.dtype) for n, t in on_meta.items()} == {n: (t.shape, t.dtype) for n, t in outputs.items()}
        made.update(outputs)
    expected = step_by_step(graph)
    assert_equal(made, {name: tensor for name, tensor in expected.items() if name in made})
    assert all(expected[name] is graph.tensors[name] for name in expected.keys() - made.keys())


@tried
@given(graphs(), st.data())
def test_pieces_give_what_apply_gives_whole_or_a_box_of_it(graph, data):
    """Contract 34: what a rank reads of a sharded parameter is its slice of the whole."""
    mapper = Sequential(graph.stages)
    for group in mapper.groups():
        inputs = {name: graph.tensors[name] for name in group.inputs}
        outputs = mapper.apply(inputs)
        pieces = mapper.pieces({name: tuple(tensor.shape) for name, tensor in inputs.items()})
        assert pieces.keys() <= group.outputs
        assert graph.opaque or any(tensor.numel() == 0 for tensor in outputs.values()) or pieces.keys() == group.outputs
        for name, found in pieces.items():
            output = outputs[name]
            assert sum(_count(piece) for piece in found) == output.numel()
            assert_equal({name: assemble(found, inputs, random_tensor(output.shape, output.dtype, 77))}, {name: output})
            starts = [data.draw(st.integers(0, size)) for size in output.shape]
            sizes = [data.draw(st.integers(0, size - start)) for size, start in zip(output.shape, starts, strict=True)]
            clipped = [part for piece in found if (part := piece.clip(starts, sizes))]
            moved = [replace(p, offsets=tuple(o - s for o, s in zip(p.offsets, starts, strict=True))) for p in clipped]
            wanted = output[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
            assert_equal({name: assemble(moved, inputs, random_tensor(wanted.shape, wanted.dtype, 78))}, {name: wanted})


def _count(piece):
    return torch.Size(piece.sizes).numel()


@tried
@given(graphs(name="x.{i}.{}"))
def test_a_template_in_a_scope_does_the_same_for_every_index(graph):
    """Contract 36: scopes and templates change names and nothing else."""
    template = Sequential(graph.stages)
    mapper = Prefix(for_each({"i": range(2)}, template), inputs="in.", outputs="out.")
    expected = {}
    for group in template.groups():  # not apply_all, which refuses a template
        expected.update(template.apply({name: graph.tensors[name] for name in group.inputs}))
    inputs = {f"in.{name.replace('{i}', i)}": tensor for name, tensor in restricted(graph.tensors, template).items() for i in "01"}
    outputs = mapper.apply_all(inputs)
    assert_equal(outputs, {f"out.{name.replace('{i}', i)}": tensor for name, tensor in expected.items() for i in "01"})
    assert_equal(mapper.inverse().apply_all(outputs), inputs)


@tried
@given(graphs(), st.integers(1, 4))
def test_the_parts_of_ranks_are_the_whole(graph, num_ranks):
    """Contract 36."""
    mapper = Sequential(graph.stages)
    tensors = restricted(graph.tensors, mapper)
    parts = [mapper.part(rank, num_ranks) for rank in range(num_ranks)]
    assert set(Parallel(parts).groups()) == set(mapper.groups())
    assert_equal(Parallel(parts).apply_all(tensors), mapper.apply_all(tensors))
    assert_equal(Parallel([part.inverse() for part in parts]).apply_all(mapper.apply_all(tensors)), tensors)


@tried
@given(graphs(), st.data())
def test_a_load_from_files_in_any_order_gives_what_everything_at_once_gives(graph, data):
    """Contracts 34 and 35."""
    mapper = Sequential(graph.stages)
    tensors = restricted(graph.tensors, mapper)
    expected = mapper.apply_all(tensors)
    targets = {name: random_tensor(tensor.shape, tensor.dtype, 79) for name, tensor in expected.items()}
    file_of = {name: f"{data.draw(st.integers(0, 2))}.safetensors" for name in data.draw(st.permutations(list(tensors)))}
    with TemporaryDirectory() as folder:
        for file in set(file_of.values()):
            save_file({name: tensors[name].clone() for name in tensors if file_of[name] == file}, Path(folder, file))
        Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
        load_model_state(folder, mapper, targets)
    assert_equal(targets, expected)
