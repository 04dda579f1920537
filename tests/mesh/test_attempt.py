"""Ranks find the living ones in a store that is full of what dead ones wrote."""

import os
import threading
import time

import pytest
import torch.distributed as dist

from trainer_kit.exceptions import ConfigurationError, StateError
from trainer_kit.mesh import stores
from trainer_kit.mesh.attempt import join_attempt
from trainer_kit.mesh.place import Place
from trainer_kit.mesh.stores import open_store


def start(store, ranks, world_size: int, timeout: float = 5.0) -> tuple[list[threading.Thread], dict[int, str]]:
    names: dict[int, str] = {}

    def join(rank: int) -> None:
        try:
            names[rank] = join_attempt(store, Place(rank, world_size), timeout)
        except StateError as error:
            names[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    return threads, names


def end(threads) -> None:
    for thread in threads:
        thread.join(10.0)


def test_all_ranks_get_one_name_and_another_one_each_time():
    """Contract 42: whatever the launcher counts, in a store that stays."""
    store, found = dist.HashStore(), set()
    for world_size in (3, 3, 2):
        threads, names = start(store, range(world_size), world_size)
        end(threads)
        assert len(names) == world_size and len(set(names.values())) == 1
        found |= set(names.values())
    assert len(found) == 3


def test_marks_of_dead_ranks_do_not_count():
    """Rank 1 died after it had left its mark, and another rank 0 after it had answered; the new ones come in any order."""
    store = dist.HashStore()
    dead, names = start(store, [1], 3, timeout=0.05)
    end(dead)
    assert "rank 1 had no answer from rank 0 within 0.05 s" in names[1]
    dead, names = start(store, [0, 2], 3, timeout=0.2)
    end(dead)
    assert "rank 1 of 3 did not start within 0.2 s" in names[0] and len(names[2]) == 32
    first, names = start(store, [0, 2], 3)
    time.sleep(0.1)  # rank 0 answers the mark of the dead rank 1 meanwhile
    second, late = start(store, [1], 3)
    end(first + second)
    assert late[1] == names[0] == names[2]


@pytest.fixture
def address(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(stores, "_hosted", {})
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    return server


def test_a_port_of_another_run_is_named(address):
    """B136: where a port is needed, the error says which and whose it may be."""
    with pytest.raises(ConfigurationError, match=rf"rank 0 could not open.*MASTER_PORT={address.port}.*another run uses the port"):
        open_store(Place(0, 2), dist.default_pg_timeout)


def test_the_store_of_the_agent_is_only_visited(address, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    open_store(Place(0, 2), dist.default_pg_timeout).set("here", "yes")
    assert address.get("here") == b"yes"


def test_a_port_that_is_no_number_is_refused(address):
    os.environ["MASTER_PORT"] = "http"
    with pytest.raises(ConfigurationError, match="MASTER_PORT=http"):
        open_store(Place(1, 2), dist.default_pg_timeout)
