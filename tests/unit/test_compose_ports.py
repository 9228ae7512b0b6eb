"""Which ports a stack chooses, decided from values."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentinker.compose.local.errors import PortTaken
from opentinker.compose.local.home import Home
from opentinker.compose.local.layout import UpOptions, choose_layout
from opentinker.compose.local.ports import PortRequest, choose_ports, is_port_free, reserve_ports
from opentinker.compose.local.programs import port_requests

_KAFKA = PortRequest(name="kafka", usual=9092)
_FOUND = PortRequest(name="controller")


def _choose(
    *requests: PortRequest, asked: dict[str, int] | None = None, kept: dict[str, int] | None = None, busy: set[int] | None = None
) -> dict[str, int]:
    occupied = busy or set()
    return choose_ports(requests, asked=asked or {}, kept=kept or {}, taken=frozenset(), is_free=lambda port: port not in occupied)


def test_the_usual_port_is_taken_when_free() -> None:
    assert _choose(_KAFKA)["kafka"] == 9092


def test_another_port_is_found_when_the_usual_one_is_busy() -> None:
    assert _choose(_KAFKA, busy={9092})["kafka"] == 20_000


def test_a_kept_port_comes_before_the_usual_one_and_an_asked_for_one_before_both() -> None:
    assert _choose(_KAFKA, kept={"kafka": 21_000})["kafka"] == 21_000
    assert _choose(_KAFKA, kept={"kafka": 21_000}, asked={"kafka": 22_000})["kafka"] == 22_000


def test_a_kept_port_that_somebody_took_is_replaced() -> None:
    assert _choose(_KAFKA, kept={"kafka": 21_000}, busy={21_000})["kafka"] == 9092


def test_a_busy_port_asked_for_by_number_is_refused_with_the_remedy() -> None:
    with pytest.raises(PortTaken, match="port 9092 for kafka is in use; free it or choose another with --port kafka=NUMBER"):
        _choose(_KAFKA, asked={"kafka": 9092}, busy={9092})


def test_a_busy_port_asked_for_by_a_setting_names_the_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port = somebody.getsockname()[1]
        variable = {"OPENTINKER_GATEWAY__PORT": str(port)}
        with pytest.raises(PortTaken, match=f"port {port} for gateway is in use; free it or choose another with OPENTINKER_GATEWAY__PORT"):
            choose_layout(_prepared(tmp_path), UpOptions(usual_ports=False), variable, running=False)


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1"])
def test_a_setting_that_is_no_port_is_named(port: str, tmp_path: Path) -> None:
    with pytest.raises(PortTaken, match=r"OPENTINKER_REGISTRY__PORT is .* no port; set it to a number from 1 to 65535"):
        choose_layout(_prepared(tmp_path), UpOptions(usual_ports=False), {"OPENTINKER_REGISTRY__PORT": port}, running=False)


def _prepared(directory: Path) -> Home:
    home = Home(directory)
    home.prepare()
    return home


def test_one_port_asked_for_twice_is_refused() -> None:
    with pytest.raises(PortTaken):
        _choose(_KAFKA, _FOUND, asked={"kafka": 9000, "controller": 9000})


def test_an_asked_for_port_is_kept_clear_of_everybody_elses_kept_and_usual_ones() -> None:
    chosen = _choose(_KAFKA, _FOUND, asked={"controller": 9092}, kept={"kafka": 9092})
    assert chosen == {"controller": 9092, "kafka": 20_000}


@given(busy=st.sets(st.integers(20_000, 20_400), max_size=200), agents=st.integers(0, 5))
def test_no_two_requests_share_a_port_and_none_is_busy(busy: set[int], agents: int) -> None:
    requests = port_requests(agents)
    chosen = _choose(*requests, busy=busy)
    used = [number for request in requests for number in request.numbers(chosen[request.name])]
    assert len(used) == len(set(used))
    assert not busy & set(used)


def test_a_port_with_a_companion_is_taken_only_if_both_are_free() -> None:
    request = PortRequest(name="admin", also=10_000)
    assert _choose(request, busy={20_000})["admin"] == 10_001
    assert _choose(request, _FOUND)["controller"] == 20_001, "the companion is held, too"


def test_a_listening_port_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_port_free(port)
    assert is_port_free(port)


def test_two_homes_never_hold_the_same_port(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for home in (one, two):
        home.mkdir()

    def reserve(home: Path, kept: dict[str, int]) -> dict[str, int]:
        return reserve_ports(port_requests(2), home=home, asked={}, kept=kept, ours=frozenset(), register=tmp_path / "ports.json")

    first = reserve(one, {})
    second = reserve(two, {})
    assert not set(first.values()) & set(second.values())
    assert reserve(one, first) == first
    one.rmdir()
    assert reserve(two, {"kafka": first["kafka"]})["kafka"] == first["kafka"], "a home that is gone holds nothing"
    assert os.stat(tmp_path / "ports.json").st_mode & 0o077 == 0
