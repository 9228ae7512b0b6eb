"""One frozen settings object per process, read once from the environment and `$OPENTINKER_HOME/config.toml`.

Rules: an environment variable beats the file, the file beats the default. Names are `OPENTINKER_` + group + `__` + field, for example
`OPENTINKER_KAFKA__BOOTSTRAP_SERVERS`. The local stack writes the file; in production it is mounted or left out. Secrets are `SecretStr`, so that
they are never printed; a field that ends in `_file` names a file of mode 0600 that holds the secret.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from opentinker.schemas.messages.types import Name
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

__all__ = [
    "AgentSettings",
    "GatewaySettings",
    "IngressSettings",
    "KafkaSettings",
    "PostgresSettings",
    "RegistrySettings",
    "S3Settings",
    "SchedulerSettings",
    "Settings",
    "SettingsError",
    "home_directory",
    "load_settings",
]


_ADDRESS = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


class SettingsError(Exception):
    """A setting is missing or wrong. The text names the variable and the remedy; entry points print it and exit 2."""


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KafkaSettings(_Group):
    bootstrap_servers: str = "127.0.0.1:9092"  # host:port, several separated by commas
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    sasl_username: str = ""
    sasl_password: SecretStr = SecretStr("")
    ssl_cafile: Path | None = None
    partitions: int = Field(4, ge=1, le=1024)  # of the scheduler's inputs and its journal, fixed at creation
    replication: int = Field(1, ge=1, le=9)  # 3 in production

    @field_validator("bootstrap_servers")
    @classmethod
    def _are_addresses(cls, servers: str) -> str:
        for server in servers.split(","):
            found = _ADDRESS.fullmatch(server.strip())
            if found is None or not 1 <= int(found[1]) <= 65535:
                raise ValueError(f"{server.strip()[:80]!r} is not host:port with a port of 1 to 65535; separate several by commas")
        return servers

    @field_validator("ssl_cafile")
    @classmethod
    def _is_a_file(cls, path: Path | None) -> Path | None:
        if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
            raise ValueError(f"{path} is no file that can be read; name the certificates (PEM) of the authority that signed Kafka's")
        return path


class PostgresSettings(_Group):
    dsn: SecretStr = SecretStr("postgresql://opentinker@127.0.0.1:5432/opentinker")
    pool_size_max: int = Field(8, ge=1, le=200)


class S3Settings(_Group):
    endpoint_url: str = "http://127.0.0.1:8333"
    region: str = "us-east-1"
    bucket: str = "opentinker"
    access_key_id: SecretStr = SecretStr("")
    secret_access_key: SecretStr = SecretStr("")


class GatewaySettings(_Group):
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    url: str = "http://127.0.0.1:8080"  # how clients reach it
    api_key_file: Path | None = None  # the bootstrap key; default $OPENTINKER_HOME/secrets/api-key
    hosts: tuple[str, ...] = ()  # Host names to answer for besides loopback and `url`


class RegistrySettings(_Group):
    host: str = "127.0.0.1"
    port: int = Field(8081, ge=0, le=65535)
    url: str = "http://127.0.0.1:8081"
    agent_token_file: Path | None = None  # what agents and services show; default $OPENTINKER_HOME/secrets/registry-agent-token


class IngressSettings(_Group):
    metrics_port: int = Field(0, ge=0, le=65535)
    trusted_namespaces: tuple[str, ...] = ()  # namespaces whose requests need no signature; the local profile trusts `default`
    namespaces: tuple[Name, ...] = ()  # tenants with topics of their own: `…requests.<namespace>.v1`, which Kafka keeps for them


class SchedulerSettings(_Group):
    metrics_port: int = Field(0, ge=0, le=65535)  # 0: no exporter
    replica_host: str = "127.0.0.1"
    replica_port: int = Field(8082, ge=0, le=65535)
    replica_url: str = "http://127.0.0.1:8082"
    session_timeout_s: float = Field(6.0, ge=1, le=300)  # Kafka's group session: how soon a dead worker's partitions move
    tick_interval_s: float = Field(1.0, gt=0, le=10)


class AgentSettings(_Group):
    node: str = ""  # default: the host name
    pool: str = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    taints: dict[str, str] = Field(default_factory=dict)  # key → value, which may be empty: only jobs that tolerate them come here
    gpu_type: str = ""  # what jobs ask for as resources.gpuType; empty: what the driver says
    advertise_address: str = "127.0.0.1"
    ports: str = "29500-29599"  # rendezvous ports this node lends to gangs
    metrics_port: int = Field(0, ge=0, le=65535)
    cpu: float = Field(0.0, ge=0)  # cores to advertise; 0: what the machine has
    memory: str = ""  # for example 8Gi; empty: what the machine has
    simulated_gpus: int = Field(0, ge=0, le=64)  # devices to advertise that are not there; marked simulated
    heartbeat_interval_s: float = Field(2.0, gt=0, le=60)
    lease_timeout_s: float = Field(10.0, gt=0, le=600)  # announced to the scheduler, which keeps to it
    lease_margin_s: float = Field(3.0, ge=0, le=60)  # the agent stops this much earlier
    hold_timeout_s: float = Field(600.0, gt=0, le=86400)  # how long a paused trainer waits for Resume
    progress_timeout_s: float = Field(1800.0, gt=0, le=7 * 86400)  # a running trainer without a later step for this long hangs, and is ended
    directory: Path | None = None  # default $OPENTINKER_HOME/agents/<node>


class Settings(BaseSettings):
    """Everything one process may need. Frozen; pass it down, read it once."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix="OPENTINKER_", env_nested_delimiter="__", env_ignore_empty=True)

    home: Path = Field(default_factory=lambda: home_directory(dict(os.environ)))
    log_format: Literal["json", "text"] = "json"
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    otlp_endpoint: str = ""  # traces are exported only when this is set
    kafka: KafkaSettings = KafkaSettings()
    postgres: PostgresSettings = PostgresSettings()
    s3: S3Settings = S3Settings()
    gateway: GatewaySettings = GatewaySettings()
    registry: RegistrySettings = RegistrySettings()
    ingress: IngressSettings = IngressSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    agent: AgentSettings = AgentSettings()

    @property
    def api_key_file(self) -> Path:
        return self.gateway.api_key_file or self.home / "secrets" / "api-key"

    @property
    def agent_token_file(self) -> Path:
        return self.registry.agent_token_file or self.home / "secrets" / "registry-agent-token"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        config_file = home_directory(dict(os.environ)) / "config.toml"
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=config_file)


def home_directory(environ: dict[str, str]) -> Path:
    """The one directory that holds all local state: `$OPENTINKER_HOME`, else `~/.opentinker`."""
    return Path(environ.get("OPENTINKER_HOME") or Path.home() / ".opentinker").expanduser().resolve()


def load_settings() -> Settings:
    """Read the environment and the file. Raises SettingsError with the variable's name and what is allowed."""
    home = home_directory(dict(os.environ))
    if (home / "config.toml").is_dir():  # which the library would pass over
        raise SettingsError(f"config.toml in {home} is a folder; mend or remove it")
    try:
        return Settings()
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False, include_input=False):
            path = [str(part) for part in problem["loc"]]
            lines.append(f"OPENTINKER_{'__'.join(path).upper()} (or {'.'.join(path)} in config.toml): {problem['msg']}")
        raise SettingsError("; ".join(lines)) from None
    except (ValueError, OSError) as error:  # broken TOML, or what is no file that may be read
        raise SettingsError(f"config.toml in {home}: {error}; mend or remove the file") from None
