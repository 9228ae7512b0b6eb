"""Settings that cannot work are named, with the variable and the remedy, before anything uses them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from opentinker.compose.runtime.settings import SettingsError, load_settings
from opentinker.producers.cli import cli
from opentinker.producers.cli.failures import exit_code_of


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


def test_a_configuration_that_is_no_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path))
    (tmp_path / "config.toml").mkdir()
    with pytest.raises(SettingsError, match=r"config\.toml in .* is a folder; mend or remove it"):
        load_settings()


def test_certificates_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path))
    (tmp_path / "folder.pem").mkdir()
    for name in ("no.pem", "folder.pem"):
        monkeypatch.setenv("OPENTINKER_KAFKA__SSL_CAFILE", str(tmp_path / name))
        with pytest.raises(SettingsError, match=rf"OPENTINKER_KAFKA__SSL_CAFILE .*{name} is no file that can be read"):
            load_settings()


@pytest.mark.parametrize("command", [["metrics", "tail"], ["cordon", "node-1"], ["dlq", "list"], ["topics", "ensure"], ["audit", "a-job"]])
def test_a_command_that_speaks_to_kafka_does_not_guess_which(command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path))
    monkeypatch.delenv("OPENTINKER_KAFKA__BOOTSTRAP_SERVERS", raising=False)
    raised = CliRunner().invoke(cli, command).exception
    assert isinstance(raised, SettingsError)
    assert "no Kafka is configured: `opentinker up`" in str(raised)
    assert exit_code_of(raised) == 2
