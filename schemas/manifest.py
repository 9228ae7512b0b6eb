"""The TrainingJob manifest: one form everywhere (REST, CLI, SDK, Kafka, kubectl).

Keys are camelCase; hyperparameters keep the algorithm's snake_case.

Rules: an unknown key is refused by name; a key of a later version is refused as not available; every default stands here and nowhere else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.alias_generators import to_camel

from .algorithms import ALGORITHMS, effective_hyperparameters
from .errors import FieldError, InvalidManifest, field_errors, nearest, refuse_booleans, shorten
from .plain import plain_errors
from .quantities import cpu_millis, duration_s, memory_bytes

__all__ = [
    "IMPLICIT_STEP_BUDGET",
    "MANIFEST_BYTES_MAX",
    "CheckpointPolicy",
    "EnvironmentSpec",
    "JobSpec",
    "Metadata",
    "OutputSpec",
    "Resources",
    "RetryPolicy",
    "StopRules",
    "TrainingJob",
    "drawn_seed",
    "effective_values",
    "parse_manifest",
    "spec_digest",
]

MANIFEST_BYTES_MAX = 65_536  # a manifest is a few kilobytes; a gang's placements repeat it for every node, and one journal record holds them all
IMPLICIT_STEP_BUDGET = 1_000_000  # env steps over all replicas, when neither a stop rule nor the environment's reward_threshold says when to end
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9][-a-z0-9]*")
_NOT_BUILT = {
    "evaluation", "code", "env", "datasets", "initFrom", "pools", "priorityClass", "preemptible", "spot",
    "pendingDeadline", "ttlAfterFinished", "suspend", "array",
}  # fmt: skip


def dns_label(value: object) -> str:
    """A name as Kubernetes and DNS allow it. Raises ValueError("message; remedy")."""
    text = value if isinstance(value, str) else ""
    if not text or len(text) > 63 or not _NAME.fullmatch(text):
        raise ValueError(f"{shorten(value)} is not a DNS label; use up to 63 of a-z, 0-9 and '-', starting and ending with a letter or digit")
    return text


DnsLabel = Annotated[str, BeforeValidator(dns_label)]


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, validate_by_alias=True, validate_by_name=False, serialize_by_alias=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans(cls, value: object, info: ValidationInfo) -> object:
        return refuse_booleans(cls, info.field_name, value)


class Metadata(_Part):
    name: DnsLabel | None = None
    generate_name: str | None = Field(None, max_length=58, description="prefix; a suffix is drawn when there is no name")
    namespace: DnsLabel = "default"
    labels: dict[Annotated[str, Field(max_length=128)], Annotated[str, Field(max_length=256)]] = Field(default_factory=dict, max_length=32)

    @model_validator(mode="after")
    def _named(self) -> Metadata:
        if self.name is None and self.generate_name is None:
            raise ValueError("has neither name nor generateName; add metadata.name")
        return self

    @field_validator("generate_name")
    @classmethod
    def _prefix(cls, value: str | None) -> str | None:
        if value is not None and not _PREFIX.fullmatch(value):
            raise ValueError(f"{shorten(value)} is not the beginning of a DNS label; use a-z, 0-9 and '-', starting with a letter or digit")
        return value

    @field_validator("labels")
    @classmethod
    def _printable(cls, value: dict[str, str]) -> dict[str, str]:
        for text in (text for pair in value.items() for text in pair):
            if not text.isprintable():
                raise ValueError(f"{shorten(text)} holds characters that cannot be printed; remove them")
        return value


class EnvironmentSpec(_Part):  # type: ignore[no-redef]  # the plugin adds a **kwargs of its own beside our alias
    id: str = Field(min_length=1, max_length=256, description="a Gymnasium id, for example CartPole-v1")
    arguments: dict[str, Any] = Field(default_factory=dict, alias="kwargs", max_length=64, description="keyword arguments of gymnasium.make")


class Resources(_Part):
    """What one replica gets."""

    cpu: int | float | str = Field(1, description="cores: 2, 0.5 or 500m")
    memory: str | int = Field("2Gi", description="for example 4Gi")
    gpu: int = Field(0, ge=0, le=64, description="whole GPUs")
    gpu_type: Annotated[str, Field(min_length=1, max_length=64)] | list[Annotated[str, Field(min_length=1, max_length=64)]] | None = Field(
        None, description="type of GPU, or a list of types of which any will do; default: any"
    )

    @field_validator("cpu", mode="before")
    @classmethod
    def _cpu(cls, value: object) -> object:
        cpu_millis(value)
        return value

    @field_validator("memory", mode="before")
    @classmethod
    def _memory(cls, value: object) -> object:
        memory_bytes(value)
        return value

    @field_validator("gpu", mode="before")
    @classmethod
    def _whole(cls, value: object) -> object:
        if isinstance(value, bool) or (isinstance(value, (float, str)) and not str(value).isdigit()):
            raise ValueError(f"must be a whole number of GPUs, got {shorten(value)}; GPUs are not shared between replicas: write 0, 1, 2, …")
        return value

    @field_validator("gpu_type")
    @classmethod
    def _some(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and not 1 <= len(value) <= 16:
            raise ValueError(f"names {len(value)} types; name 1 to 16, or leave it out")
        return value

    @property
    def gpu_types(self) -> tuple[str, ...]:
        given = [self.gpu_type] if isinstance(self.gpu_type, str) else self.gpu_type or []
        return tuple(sorted(set(given)))

    @property
    def cpu_millis(self) -> int:
        return cpu_millis(self.cpu)

    @property
    def memory_bytes(self) -> int:
        return memory_bytes(self.memory)


def _duration(value: object) -> object:
    if value is not None:
        duration_s(value)
    return value


Duration = Annotated[str | int, BeforeValidator(_duration)]


class StopRules(_Part):
    """Training ends at the first rule that holds. Any rule given here switches the implicit one off."""

    total_steps: int | None = Field(None, ge=1, le=10**13, description="environment steps over all replicas")
    target_return: float | None = Field(None, allow_inf_nan=False, description="mean return over `window` episodes")
    window: int = Field(100, ge=1, le=10_000, description="episodes that the mean return is taken over")
    max_time: Duration | None = Field(None, description="training time, for example 2h")

    @property
    def given(self) -> bool:
        return self.total_steps is not None or self.target_return is not None or self.max_time is not None


class CheckpointPolicy(_Part):
    every: Duration = Field("60s", description="time between checkpoints")
    keep: int = Field(3, ge=1, le=1000, description="checkpoints kept for resuming, newest first")


class OutputSpec(_Part):
    model: DnsLabel | None = Field(None, description="name of the model; default: the job's name")


class RetryPolicy(_Part):
    infrastructure: int = Field(3, ge=0, le=100, description="attempts after a lost node or a failed start")
    user_error: int = Field(0, ge=0, le=100, description="attempts after an error in the environment or the settings")


LabelText = Annotated[str, Field(min_length=1, max_length=128)]


class Toleration(_Part):
    """Lets the gang onto nodes with a taint."""

    key: LabelText
    value: Annotated[str, Field(max_length=128)] | None = Field(None, description="of the taint; default: whatever it is")


class Topology(_Part):
    """Where the nodes of one gang lie to each other. Unasked, a gang that needs several prefers those of one nvlink, rack or zone, in this order."""

    same: LabelText | None = Field(None, description="a label whose value all nodes of the gang must share, for example rack")
    spread: bool = Field(False, description="as few replicas on one node as can be")


def _short_form(value: object) -> object:
    return {"id": value} if isinstance(value, str) else value


class JobSpec(_Part):
    algorithm: str = Field(min_length=1, max_length=64)
    environment: Annotated[EnvironmentSpec, BeforeValidator(_short_form, json_schema_input_type=str | EnvironmentSpec)]
    replicas: int = Field(1, ge=1, le=512, strict=True, description="processes of the gang")
    min_replicas: int | None = Field(None, ge=1, le=512, strict=True, description="with which it may start when not all fit; default: all")
    resources: Resources = Resources()
    hyperparameters: dict[str, Any] = Field(default_factory=dict, max_length=128)
    seed: int | None = Field(None, ge=0, lt=2**31, strict=True, description="default: drawn from the job's uid, and recorded")
    stop: StopRules = StopRules()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    output: OutputSpec = OutputSpec()
    retry: RetryPolicy = RetryPolicy()
    pool: DnsLabel = "default"
    priority: int = Field(
        0, ge=-1_000, le=1_000, strict=True, description="among the jobs of its namespace; a point goes before ten minutes of waiting"
    )
    node_selector: dict[LabelText, LabelText | Annotated[list[LabelText], Field(min_length=1, max_length=64)]] = Field(
        default_factory=dict, max_length=16, description="labels of the nodes, each with its value or a list of values"
    )
    tolerations: list[Toleration] = Field(default_factory=list, max_length=16, description="taints of nodes that keep it off none")
    topology: Topology = Topology()
    max_runtime: Duration = Field("7d", description="running time over all attempts, after which the job fails")

    @field_validator("min_replicas")
    @classmethod
    def _no_more(cls, value: int | None, info: ValidationInfo) -> int | None:
        replicas = info.data.get("replicas")
        if value is not None and replicas is not None and value > replicas:
            raise ValueError(f"must be at most replicas, {replicas}, got {value}; ask for fewer, or for more replicas")
        return value

    @property
    def selected_labels(self) -> dict[str, tuple[str, ...]]:
        """Label → the values that will do."""
        return {key: (value,) if isinstance(value, str) else tuple(sorted(set(value))) for key, value in self.node_selector.items()}

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        """For commands, whose sender may have checked nothing: `parse_manifest` has said it better, by path."""
        for error in plain_errors(value):
            raise ValueError(f"{error.field} {error.message}; {error.remedy}")
        return value


class TrainingJob(_Part):
    """What a user asks for."""

    api_version: Literal["opentinker.io/v1"]
    kind: Literal["TrainingJob"]
    metadata: Metadata
    spec: JobSpec


def parse_manifest(document: object, environments: Collection[str] | None = None) -> TrainingJob:
    """Check a decoded JSON or YAML document. `environments`: the ids that exist, or None to accept any.

    Raises InvalidManifest with one FieldError per mistake.
    """
    if not isinstance(document, Mapping):
        message = f"must be an object with apiVersion, kind, metadata and spec, got {shorten(document)}"
        raise InvalidManifest([FieldError(field="", message=message, remedy="see examples/cartpole-v1.json")])
    if not_plain := plain_errors(document):
        raise InvalidManifest(not_plain)
    spec = document.get("spec")
    later = sorted(_NOT_BUILT & set(spec)) if isinstance(spec, Mapping) else []
    errors = [FieldError(field=f"spec.{key}", message="is not available in this version", remedy="remove it") for key in later]
    try:
        job = TrainingJob.model_validate(document)
    except ValidationError as error:
        errors += [found for found in field_errors(error, TrainingJob) if found.field.removeprefix("spec.") not in later]
        # What only a whole job would be asked, as far as this one can be asked it: so that nobody mends a manifest in rounds.
        named = {found.field for found in errors}
        errors += [found for found in _unknown_names(spec, environments) if found.field not in named]
        raise InvalidManifest(errors) from None
    errors += _unknown_names(spec, environments)
    with contextlib.suppress(InvalidManifest):  # its hyperparameters are wrong, which is told
        errors += _shares(job.spec)
    if errors:
        raise InvalidManifest(errors)
    return job


def _unknown_names(spec: object, environments: Collection[str] | None) -> list[FieldError]:
    """Algorithm, hyperparameters and environment of what may be no valid spec: what is of the wrong kind is told elsewhere."""
    if not isinstance(spec, Mapping):
        return []
    errors: list[FieldError] = []
    algorithm, given = spec.get("algorithm"), spec.get("hyperparameters", {})
    if isinstance(algorithm, str) and algorithm and isinstance(given, Mapping):
        try:
            effective_hyperparameters(algorithm, dict(given))
        except InvalidManifest as error:
            errors.extend(error.errors)
            guess = nearest(algorithm, ALGORITHMS) if algorithm not in ALGORITHMS else None
            if guess is not None:  # what is wrong with the settings of the one that is meant, so that it need not be asked twice
                errors.extend(_unknown_names({"algorithm": guess, "hyperparameters": given}, None))
    environment = spec.get("environment")
    identifier = environment.get("id") if isinstance(environment, Mapping) else environment
    if environments is not None and isinstance(identifier, str) and identifier and identifier not in environments:
        guess = nearest(identifier, environments)
        remedy = f"did you mean {guess}?" if guess else "use a Gymnasium id such as CartPole-v1"
        errors.append(FieldError(field="spec.environment", message=f"unknown environment {shorten(identifier)}", remedy=remedy))
    return errors


def _shares(spec: JobSpec) -> list[FieldError]:
    """Every replica must get at least one environment and one transition of a minibatch: both are global."""
    effective = effective_hyperparameters(spec.algorithm, spec.hyperparameters)
    found = []
    for name in ("num_envs", "batch_size"):
        value = getattr(effective, name, None)
        if value is not None and value < spec.replicas:
            message = f"{spec.replicas} replicas would share {name} {value}, which is for the whole gang"
            found.append(FieldError(field="spec.replicas", message=message, remedy=f"ask for at most {value}, or raise spec.hyperparameters.{name}"))
    return found


def spec_digest(job: TrainingJob) -> str:
    """SHA-256 of what was asked for, so that the same key with another payload is noticed: `sha256:<64 hex>`."""
    document = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return "sha256:" + hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def drawn_seed(job_uid: str) -> int:
    """The seed of a job that names none. It follows from the uid, so that it is the same wherever it is drawn."""
    return int(job_uid.replace("-", "")[:8], 16) % 2**31


def effective_values(job: TrainingJob) -> list[tuple[str, Any, Literal["manifest", "default"]]]:
    """Every value the job will run with, by path, and where it comes from."""
    rows: list[tuple[str, Any, Literal["manifest", "default"]]] = []
    _collect(job, "", rows)
    hyperparameters = effective_hyperparameters(job.spec.algorithm, job.spec.hyperparameters)
    for name in type(hyperparameters).model_fields:
        given = name in job.spec.hyperparameters
        rows.append((f"spec.hyperparameters.{name}", getattr(hyperparameters, name), "manifest" if given else "default"))
    return rows


def _collect(part: BaseModel, prefix: str, rows: list[tuple[str, Any, Literal["manifest", "default"]]]) -> None:
    for name, field in type(part).model_fields.items():
        path, value = f"{prefix}{field.alias or name}", getattr(part, name)
        if path == "spec.hyperparameters":
            continue
        if isinstance(value, BaseModel):
            _collect(value, path + ".", rows)
        else:
            rows.append((path, value, "manifest" if name in part.model_fields_set else "default"))
