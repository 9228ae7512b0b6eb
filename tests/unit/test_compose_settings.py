"""Settings that cannot work are named, with the variable and the remedy, before anything uses them."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentinker.compose.runtime.settings import SettingsError, load_settings


@pytest.mark.parametrize("servers", ["127.0.0.1:99999", "foo:bar", "[::1", "a b:c", "host", "127.0.0.1:0", "a:1,", ""])
def test_what_is_no_address_of_kafka_is_named(servers: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text(f'[kafka]\nbootstrap_servers = "{servers}"\n')
    with pytest.raises(SettingsError, match=r"OPENTINKER_KAFKA__BOOTSTRAP_SERVERS .*is not host:port"):
        load_settings()


@pytest.mark.parametrize("servers", ["127.0.0.1:9092", "kafka-0.kafka:9092, kafka_1:9093", "[::1]:9092"])
def test_addresses_are_taken_as_they_are(servers: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path))
    monkeypatch.setenv("OPENTINKER_KAFKA__BOOTSTRAP_SERVERS", servers)
    assert load_settings().kafka.bootstrap_servers == servers
