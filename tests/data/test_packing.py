"""Rows of packed documents: what is in them, in which order, and what is refused."""

from __future__ import annotations

import pickle
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_kit.causal_lm import CausalLMTask
from trainer_kit.data import AutoDataProvider, SequencePacking
from trainer_kit.exceptions import ConfigurationError

LENGTHS = st.lists(st.integers(1, 14), min_size=1, max_size=14)
SETTINGS = st.builds(
    SequencePacking,
    seq_len=st.integers(2, 9),
    pad_token_id=st.just(0),
    method=st.sampled_from(["greedy", "best_fit"]),
    split_documents=st.sampled_from([None, True, False]),
    buffer_size=st.integers(1, 5),
)


def documents(lengths):
    """Token t of document n is 100 (n + 1) + t."""
    return [list(range(100 * (n + 1), 100 * (n + 1) + length)) for n, length in enumerate(lengths)]


def joined(lists):
    return list(chain.from_iterable(lists))


def rows_of(dataset):
    return [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]


def tokens_by_document(rows):
    """The tokens at each document id, in the order of the rows."""
    found: dict[int, list[int]] = {}
    for row in rows:
        for token, number in zip(row["input_ids"].tolist(), row["document_ids"].tolist(), strict=True):
            found.setdefault(number, []).append(token)
    return found


def is_cut(packing):
    return packing.method == "greedy" if packing.split_documents is None else packing.split_documents


@settings(max_examples=150, deadline=None)
@given(packing=SETTINGS, lengths=LENGTHS)
def test_packed_documents_taken_apart_are_the_documents(packing, lengths):
    """Contract 16: every token is in one row, in order; padding is the pad token and has an id of its own."""
    dataset = packing.dataset(documents(lengths))
    rows = [dataset[i] for i in range(len(dataset))]
    found = tokens_by_document(rows)
    padding = found.pop(-1, [])
    assert [found[n] for n in range(len(lengths))] == documents(lengths) and set(padding) <= {0}
    assert all(t.shape == (packing.seq_len,) and t.dtype == torch.int64 for row in rows for t in row.values())
    assert dataset.statistics.fullness == pytest.approx(sum(lengths) / len(rows) / packing.seq_len)
    if is_cut(packing):
        assert len(padding) < packing.seq_len and all(-1 not in row["document_ids"] for row in rows[:-1])
    else:
        needed = sum(-(-length // packing.seq_len) for length in lengths)
        assert dataset.statistics.num_pieces == needed and dataset.statistics.num_cuts == needed - len(lengths)


@settings(max_examples=80, deadline=None)
@given(packing=SETTINGS, lengths=LENGTHS)
def test_no_token_is_predicted_from_another_document(packing, lengths):
    """What CausalLMTask makes of the rows: every token but the last of a piece has a target, the next of its document."""
    dataset = packing.dataset(documents(lengths))
    batch = {name: torch.stack([dataset[i][name] for i in range(len(dataset))]) for name in ("input_ids", "labels", "document_ids")}
    targets = CausalLMTask().build_forward_inputs(batch).state.targets
    counts = targets != -100
    assert int(counts.sum()) == sum(lengths) - dataset.statistics.num_pieces
    assert torch.equal(targets[counts], batch["input_ids"][counts] + 1), "tokens of a document count up by one"


@given(lengths=LENGTHS, seq_len=st.integers(2, 9))
@settings(max_examples=50, deadline=None)
def test_greedy_rows_are_the_documents_one_after_the_other(lengths, seq_len):
    flat = joined(documents(lengths))
    flat += [0] * (-len(flat) % seq_len)
    assert joined(rows_of(SequencePacking(seq_len, 0).dataset(documents(lengths)))) == flat


def best_fit_by_search(lengths, seq_len, buffer_size, cuts):
    """Rows as lists of (document, number of tokens), found by looking at every document at hand."""
    waiting, left, rows = list(range(len(lengths))), dict(enumerate(lengths)), []
    while waiting:
        row, room = [], seq_len
        while room and (at_hand := waiting[:buffer_size]):
            fitting = [n for n in at_hand if left[n] <= room]
            if not row:
                chosen = at_hand[0]
            elif fitting:
                chosen = max(fitting, key=lambda n: (left[n], -n))
            elif cuts:
                chosen = at_hand[0]
            else:
                break
            taken = min(room, left[chosen])
            row.append((chosen, taken))
            room, left[chosen] = room - taken, left[chosen] - taken
            if not left[chosen]:
                waiting.remove(chosen)
        rows.append(row)
    return rows


@settings(max_examples=100, deadline=None)
@given(packing=SETTINGS, lengths=LENGTHS)
def test_rows_are_those_of_a_plain_search(packing, lengths):
    dataset = packing.dataset(documents(lengths))
    buffer = packing.buffer_size if packing.method == "best_fit" else 1
    expected = best_fit_by_search(lengths, packing.seq_len, buffer, is_cut(packing))
    found = []
    for index in range(len(dataset)):
        numbers = [n for n in dataset[index]["document_ids"].tolist() if n >= 0]
        found.append([(n, numbers.count(n)) for n in dict.fromkeys(numbers)])
    assert found == expected


def test_the_methods_by_example():
    """Lengths 3, 4, 1, 2 in rows of 5: cut; whole in order; whole, with the best fit for what is left of a row."""
    docs = [[1, 2, 3], [11, 12, 13, 14], [21], [31, 32]]
    assert rows_of(SequencePacking(5, 0).dataset(docs)) == [[1, 2, 3, 11, 12], [13, 14, 21, 31, 32]]
    whole = SequencePacking(5, 0, split_documents=False).dataset(docs)
    assert rows_of(whole) == [[1, 2, 3, 0, 0], [11, 12, 13, 14, 21], [31, 32, 0, 0, 0]]
    best = SequencePacking(5, 0, method="best_fit").dataset(docs)
    assert rows_of(best) == [[1, 2, 3, 31, 32], [11, 12, 13, 14, 21]]
    assert best[0]["document_ids"].tolist() == [0, 0, 0, 3, 3] and best[0]["labels"].tolist() == [-100, 2, 3, -100, 32]
    assert whole[0]["document_ids"].tolist() == [0, 0, 0, -1, -1] and whole[0]["labels"].tolist() == [-100, 2, 3, -100, -100]
    assert (whole.statistics.fullness, best.statistics.fullness) == (10 / 15, 1.0)


def test_labels_of_the_documents_are_kept():
    docs = [{"input_ids": torch.tensor([1, 2, 3], dtype=torch.uint8), "labels": [-100, -100, 3]}, {"input_ids": (4, 5)}]
    row = SequencePacking(6, 9).dataset(docs)[0]
    assert row["input_ids"].tolist() == [1, 2, 3, 4, 5, 9]
    assert row["labels"].tolist() == [-100, -100, 3, -100, 5, -100]


class Counted:
    """Documents of two tokens; notes which ones were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 12

    def __getitem__(self, number):
        self.read.append(number)
        return [2 * number, 2 * number + 1]


def token_rows(stream, count=100):
    packs = []
    while len(packs) < count and (pack := stream.next()) is not None:
        packs.append(torch.cat([m["input_ids"] for m in pack.microbatches]).tolist())
    return packs


def test_a_resume_reads_nothing_of_what_was_skipped(open_stream):
    """Contracts 16 and 17: rows are shuffled anew in each epoch, and lengths that are given spare the first reading."""
    packing = SequencePacking(4, 0)

    def provider(docs):
        return AutoDataProvider(packing.dataset(docs, lengths=torch.full((12,), 2)), 2, shuffle=True)

    reference = token_rows(open_stream(provider(Counted()), max_epochs=2))
    assert sorted(joined(reference[:3])) == sorted(joined(reference[3:])) and reference[:3] != reference[3:]
    first = open_stream(provider(Counted()), max_epochs=2)
    head, docs = token_rows(first, 2), Counted()
    assert head + token_rows(open_stream(provider(docs), max_epochs=2, state=first.state_dict())) == reference
    assert len(docs.read) == 4 + 12


def test_a_packed_dataset_can_be_sent_to_a_worker():
    dataset = SequencePacking(5, 0).dataset(documents([3, 4, 9]))
    copied = pickle.loads(pickle.dumps(dataset))
    assert rows_of(copied) == rows_of(dataset) and copied[-1]["input_ids"].tolist() == rows_of(dataset)[-1]
    with pytest.raises(IndexError, match="row 4 of 4"):
        dataset[4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_len": 1}, ["seq_len= is 1", "at least 2"]),
        ({"seq_len": 2.5}, ["seq_len="]),
        ({"pad_token_id": None}, ["pad_token_id= is None", "end of text"]),
        ({"pad_token_id": -1}, ["pad_token_id= is -1"]),
        ({"buffer_size": 0}, ["buffer_size="]),
        ({"method": "first_fit"}, ["method=", "best_fit"]),
        ({"split_documents": "no"}, ["split_documents="]),
    ],
)
def test_settings_that_do_not_fit_are_named(change, words):
    with pytest.raises(ConfigurationError) as error:
        SequencePacking(**{"seq_len": 4, "pad_token_id": 0, **change})
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([], ["is empty", "leave empty documents out"]),
        (torch.zeros(0, dtype=torch.int64), ["is empty"]),
        ([1.5, 2.0], ["float32", "integers"]),
        ([True, False], ["torch.bool"]),
        ([[1], [2]], ["shape (2, 1)"]),
        ([[1], [2, 3]], ["no sequence of integers"]),
        (["a", "b"], ["no sequence of integers"]),
        ("text", ["is a str", "tokenize"]),
        (7, ["is a int", "sequence of integers"]),
        ({"ids": [1]}, ["'ids'", "'input_ids'"]),
        ({"input_ids": [1, 2], "labels": [1]}, ["2 'input_ids' and 1 'labels'"]),
        ({"input_ids": []}, ["'input_ids' of document 1", "is empty"]),
    ],
)
def test_documents_that_do_not_fit_are_named(open_stream, bad, words):
    packing = SequencePacking(4, 0)
    with pytest.raises(ConfigurationError) as from_dataset:
        packing.dataset([[1, 2], bad])
    with pytest.raises(ConfigurationError) as from_stream:
        open_stream(packing.stream([[1, 2], bad], 1)).next()
    for error in (from_dataset, from_stream):
        assert all(word in str(error.value) for word in ["document 1 of documents=", *words])


@pytest.mark.parametrize(
    ("docs", "lengths", "words"),
    [
        ([], None, ["documents=", "at least one"]),
        (iter([[1]]), None, ["documents=", "stream("]),
        ("text", None, ["documents= is a str"]),
        ({"input_ids": [[1]]}, None, ["documents= is a dict"]),
        ([[1, 2]], [2, 2], ["lengths= has 2 entries", "1 of documents="]),
        ([[1, 2]], [0], ["lengths[0]= is 0"]),
    ],
)
def test_what_has_no_documents_by_number_is_refused(docs, lengths, words):
    with pytest.raises(ConfigurationError) as error:
        SequencePacking(4, 0).dataset(docs, lengths)
    assert all(word in str(error.value) for word in words)


def test_a_document_of_another_length_than_said_is_named():
    with pytest.raises(ConfigurationError, match=r"document 0 of documents= has 2 tokens, expected 3 as in lengths="):
        SequencePacking(4, 0).dataset([[1, 2]], lengths=[3])[0]
