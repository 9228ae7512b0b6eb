"""What the local stack writes and reads: settings, configurations, secrets, the list of jars."""

from __future__ import annotations

import configparser
import hashlib
import re
import tomllib
from pathlib import Path

import pytest
from opentinker.compose.local.errors import ArtifactMismatch, HomeUnusable, PartFailed, StackBusy
from opentinker.compose.local.home import SECRETS, Home, render_toml
from opentinker.compose.local.jars import KAFKA_VERSION, Jar, parse_lock, read_lock, verify
from opentinker.compose.local.kafka import new_cluster_id, render_properties
from opentinker.compose.local.layout import UpOptions, config_groups, embedded_parts, settings_of
from opentinker.compose.local.postgres import render_hba, render_settings
from opentinker.compose.local.programs import AgentShape, Program, Ready, explain, port_requests, service_programs
from opentinker.compose.local.supervisor import render_configuration, render_spec, scrubbed_environment

_PORTS = {request.name: 20_000 + number * 30 for number, request in enumerate(port_requests(2))}
_VALUES = {name: name for name in SECRETS}


def _program(home: Path, **changes: object) -> Program:
    values: dict[str, object] = {
        "name": "kafka",
        "argv": ("/bin/true",),
        "env": {"A": 'b"%(c)s'},
        "cwd": home,
        "ready": Ready(how="kafka"),
        "ports": {"kafka": 9092},
    }
    return Program(**(values | changes))  # type: ignore[arg-type]


class TestJars:
    def test_every_jar_of_the_broker_is_recorded_in_one_kafka_version(self) -> None:
        jars = read_lock()
        versions = {jar.version for jar in jars if jar.group == "org.apache.kafka"}
        assert versions == {KAFKA_VERSION}
        assert {"kafka_2.13", "kafka-clients", "kafka-tools", "log4j-slf4j-impl"} <= {jar.artifact for jar in jars}
        assert len({jar.filename for jar in jars}) == len(jars)

    @pytest.mark.parametrize("line", ["abc  g:a:1", f"{'0' * 64} g:a:1", f"{'0' * 64}  g:a", f"{'0' * 64}  g:../a:1"])
    def test_a_malformed_line_is_refused_with_its_number(self, line: str) -> None:
        with pytest.raises(ValueError, match="line 2"):
            parse_lock(f"# comment\n{line}\n")

    def test_a_jar_with_another_digest_is_refused_and_deleted(self, tmp_path: Path) -> None:
        file = tmp_path / "a-1.jar"
        file.write_bytes(b"tampered")
        with pytest.raises(ArtifactMismatch, match="g:a:1 has SHA-256"):
            verify(file, Jar("g", "a", "1", hashlib.sha256(b"real").hexdigest()))
        assert not file.exists()

    def test_a_jar_with_the_recorded_digest_stays(self, tmp_path: Path) -> None:
        file = tmp_path / "a-1.jar"
        file.write_bytes(b"real")
        verify(file, Jar("g", "a", "1", hashlib.sha256(b"real").hexdigest()))
        assert file.exists()


class TestSettings:
    def test_what_up_writes_is_what_every_process_reads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("OPENTINKER_HOME", "OPENTINKER_KAFKA__BOOTSTRAP_SERVERS"):
            monkeypatch.delenv(name, raising=False)
        (tmp_path / "config.toml").write_text(render_toml(config_groups(_PORTS, _VALUES, {})))
        settings = settings_of(tmp_path)
        assert settings.home == tmp_path
        assert settings.kafka.bootstrap_servers == f"127.0.0.1:{_PORTS['kafka']}"
        assert settings.postgres.dsn.get_secret_value().startswith("postgresql://opentinker:postgres-password@127.0.0.1:")
        assert settings.s3.secret_access_key.get_secret_value() == "s3-secret-key"
        assert settings.scheduler.replica_url.endswith(str(_PORTS["replica"]))
        assert settings.ingress.trusted_namespaces == ("default",)

    def test_an_outside_kafka_is_written_with_its_security_and_nothing_of_ours(self) -> None:
        environ = {
            "OPENTINKER_KAFKA__BOOTSTRAP_SERVERS": "broker.example:9093",
            "OPENTINKER_KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
            "OPENTINKER_KAFKA__SASL_PASSWORD": "secret",
        }
        assert embedded_parts(environ) == ("postgres", "s3")
        assert config_groups(_PORTS, _VALUES, environ)["kafka"] == {
            "bootstrap_servers": "broker.example:9093",
            "security_protocol": "SASL_SSL",
            "sasl_password": "secret",
        }

    def test_an_embedded_part_still_takes_a_setting_of_its_own(self) -> None:
        kafka = config_groups(_PORTS, _VALUES, {"OPENTINKER_KAFKA__PARTITIONS": "8"})["kafka"]
        assert kafka == {"bootstrap_servers": f"127.0.0.1:{_PORTS['kafka']}", "partitions": "8"}

    def test_toml_survives_quotes_and_line_ends(self) -> None:
        value = 'a "b"\\ \n c'
        assert tomllib.loads(render_toml({"group": {"field": value, "list": [1, 2], "yes": True}}))["group"] == {
            "field": value,
            "list": [1, 2],
            "yes": True,
        }


class TestConfigurations:
    def test_everything_listens_on_the_loopback_alone(self, tmp_path: Path) -> None:
        kafka = render_properties(tmp_path, 1, 2)
        addresses = re.findall(r"(?:PLAINTEXT|CONTROLLER)://([^:]+):", kafka)
        assert set(addresses) == {"127.0.0.1"}
        assert "listen_addresses = '127.0.0.1'" in render_settings(5432)
        assert render_hba().splitlines()[1:] == ["host all all 127.0.0.1/32 scram-sha-256"]

    def test_a_one_node_broker_keeps_one_replica_and_makes_no_topic_by_itself(self, tmp_path: Path) -> None:
        lines = render_properties(tmp_path, 1, 2).splitlines()
        replicas = [line for line in lines if line.endswith(("replication.factor=1", "min.isr=1"))]
        assert len(replicas) == 5
        assert "auto.create.topics.enable=false" in lines

    def test_a_cluster_id_is_22_characters_and_no_option(self) -> None:
        ids = {new_cluster_id() for _ in range(200)}
        assert len(ids) == 200
        assert all(len(text) == 22 and not text.startswith("-") for text in ids)

    def test_supervisord_reads_paths_with_percent_signs(self, tmp_path: Path) -> None:
        home = Home(tmp_path / "100%")
        parser = configparser.ConfigParser()
        parser.read_string(render_configuration(home, [_program(home.root)], 9001, "secret"))
        assert parser["program:kafka"]["stdout_logfile"] == str(home.logs / "kafka.log")
        assert parser["program:kafka"]["autorestart"] == "true"
        assert parser["inet_http_server"]["port"] == "127.0.0.1:9001"
        assert "secret" not in parser["inet_http_server"]["password"]

    def test_a_changed_environment_changes_the_command_so_that_supervisord_sees_it(self, tmp_path: Path) -> None:
        home = Home(tmp_path)
        one, two = (render_configuration(home, [_program(tmp_path, env={"A": value})], 1, "x") for value in ("1", "2"))
        assert one != two

    def test_secrets_are_on_no_command_line(self, tmp_path: Path) -> None:
        home = Home(tmp_path)
        program = _program(tmp_path, env={"AWS_SECRET_ACCESS_KEY": "very-secret"})
        assert "very-secret" in render_spec(program, tmp_path / "record")
        assert "very-secret" not in render_configuration(home, [program], 1, "x")

    def test_programs_inherit_nothing_that_is_not_named(self) -> None:
        environ = {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x", "PYTHONPATH": "/elsewhere", "KAFKA_OPTS": "y"}
        assert scrubbed_environment(environ) == {"PATH": "/bin", "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}


class TestPrograms:
    def test_each_agent_is_a_node_of_its_own_with_ports_of_its_own(self, tmp_path: Path) -> None:
        shape = AgentShape(count=2, gpus=3, cpu=1.5, memory="2Gi")
        agents = [program for program in service_programs(_PORTS, shape, {}, tmp_path, ("kafka",)) if program.name.startswith("agent")]
        assert [agent.env["OPENTINKER_AGENT__NODE"] for agent in agents] == ["node-1", "node-2"]
        assert len({agent.env["OPENTINKER_AGENT__PORTS"] for agent in agents}) == 2
        assert agents[0].env["OPENTINKER_AGENT__SIMULATED_GPUS"] == "3"
        assert agents[0].env["OPENTINKER_AGENT__MEMORY"] == "2Gi"

    def test_the_default_stack_has_four_agents_of_one_gpu_two_cores_and_4_gib(self) -> None:
        assert UpOptions().agents == AgentShape(count=4, gpus=1, cpu=2.0, memory="4Gi")

    @pytest.mark.parametrize(
        ("line", "cause"),
        [
            ("FATAL: could not bind IPv4 address", "its port is taken"),
            ("write: No space left on device", "the disk is full"),
            ("java.lang.OutOfMemoryError: Java heap space", "not enough memory"),
            ("nothing known", "it ended 3 times"),
        ],
    )
    def test_the_cause_is_told_from_the_log(self, line: str, cause: str) -> None:
        assert cause in explain(["first line", line], "it ended 3 times")

    def test_a_failure_names_part_cause_log_and_last_lines(self) -> None:
        assert str(PartFailed("kafka", "the disk is full", "/home/logs/kafka.log", ["one", "two"])) == (
            "kafka did not start: the disk is full\n  last lines of /home/logs/kafka.log:\n    one\n    two"
        )


class TestHome:
    def test_secrets_are_made_once_and_readable_by_their_owner_alone(self, tmp_path: Path) -> None:
        home = Home(tmp_path / "home")
        home.prepare()
        first = home.secret("api-key")
        assert re.fullmatch(r"otk_[A-Za-z0-9_-]{43}", first)
        (home.secrets / "api-key").chmod(0o644)
        assert home.secret("api-key") == first
        assert (home.secrets / "api-key").stat().st_mode & 0o777 == 0o600

    def test_fresh_never_touches_a_directory_that_is_no_home(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        Home(tmp_path).drop_data()
        assert (tmp_path / "data").exists()

    def test_fresh_drops_data_and_keeps_keys_and_logs(self, tmp_path: Path) -> None:
        home = Home(tmp_path)
        home.prepare()
        key = home.secret("api-key")
        home.write_stack({})
        home.drop_data()
        assert not home.data.exists()
        assert home.logs.exists()
        assert home.secret("api-key") == key

    @pytest.mark.parametrize("name", ["config.toml", "stack.json"])
    def test_a_folder_in_the_place_of_a_file_is_named(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).mkdir()
        with pytest.raises(HomeUnusable, match=f"{name} is a folder, where `opentinker up` keeps a file; move it away"):
            Home(tmp_path).prepare()

    def test_a_second_caller_waits_for_the_lock_and_is_told_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("opentinker.compose.local.home._LOCK_WAIT_S", 0.0)
        with Home(tmp_path).lock(), pytest.raises(StackBusy, match="another `opentinker up` or `down`"), Home(tmp_path).lock():
            raise AssertionError("two callers held one home")
