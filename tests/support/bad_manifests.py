"""One table of bad manifests for every door: REST, Kafka, CLI. Each case: what is sent, the field that must be named, and words that must be said."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

from opentinker.schemas.manifest import MANIFEST_BYTES_MAX

__all__ = ["BAD_MANIFESTS", "BadManifest", "good_manifest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadManifest:
    name: str
    body: bytes
    field: str
    says: str


def good_manifest(name: str = "good", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "opentinker.io/v1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"algorithm": "PPO", "environment": "CartPole-v1"} | spec,
    }


def _changed(path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(good_manifest())
    *parents, last = path.split(".")
    place = document
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    return document


def _without(path: str) -> dict[str, Any]:
    document = copy.deepcopy(good_manifest())
    *parents, last = path.split(".")
    place = document
    for parent in parents:
        place = place[parent]
    del place[last]
    return document


def _case(name: str, document: Any, field: str, says: str) -> BadManifest:
    return BadManifest(name=name, body=document if isinstance(document, bytes) else json.dumps(document).encode(), field=field, says=says)


def _kwargs(value: Any) -> dict[str, Any]:
    return _changed("spec.environment", {"id": "CartPole-v1", "kwargs": {"a": value}})


def _nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


_GOOD = json.dumps(good_manifest()).encode()

BAD_MANIFESTS = (
    _case("unknown key", _changed("spec.replica", 2), "spec.replica", "did you mean replicas?"),
    _case("unknown key at the top", _changed("specs", {}), "specs", "did you mean spec?"),
    _case("unknown hyperparameter", _changed("spec.hyperparameters.learning_rte", 1e-3), "spec.hyperparameters.learning_rte", "did you mean learning_rate?"),
    _case("more at least than at most", _changed("spec.minReplicas", 2), "spec.minReplicas", "must be at most replicas, 1, got 2"),
    _case("no type of GPU", _changed("spec.resources", {"gpu": 1, "gpuType": []}), "spec.resources.gpuType", "name 1 to 16"),
    _case("a label with no value that will do", _changed("spec.nodeSelector", {"disk": []}), "spec.nodeSelector.disk", "at least 1"),
    _case("a toleration of nothing", _changed("spec.tolerations", [{"value": "x"}]), "spec.tolerations[0].key", "missing"),
    _case("topology in one word", _changed("spec.topology", "rack"), "spec.topology", "object"),
    _case("a field of a later version", _changed("spec.spot", True), "spec.spot", "is not available in this version"),
    _case("replicas as text", _changed("spec.replicas", "four"), "spec.replicas", "must be a whole number"),
    _case("replicas as a list", _changed("spec.replicas", [4]), "spec.replicas", "must be a whole number"),
    _case("no replicas", _changed("spec.replicas", 0), "spec.replicas", "must be at least 1"),
    _case("absurdly many replicas", _changed("spec.replicas", 10**9), "spec.replicas", "must be at most 512"),
    _case("negative cpu", _changed("spec.resources.cpu", -1), "spec.resources.cpu", "must be from 0.001 to 1024 cores"),
    _case("absurd cpu", _changed("spec.resources.cpu", 1e30), "spec.resources.cpu", "must be from 0.001 to 1024 cores"),
    _case("negative memory", _changed("spec.resources.memory", "-4Gi"), "spec.resources.memory", "is not an amount of memory"),
    _case("absurd memory", _changed("spec.resources.memory", "9000Ti"), "spec.resources.memory", "must be from 1Mi to 64Ti"),
    _case("half a GPU", _changed("spec.resources.gpu", 0.5), "spec.resources.gpu", "must be a whole number of GPUs"),
    _case("negative GPUs", _changed("spec.resources.gpu", -1), "spec.resources.gpu", "must be at least 0"),
    _case("unknown algorithm", _changed("spec.algorithm", "PPOO"), "spec.algorithm", "did you mean PPO?"),
    _case("unknown environment", _changed("spec.environment", "CartPole-v9"), "spec.environment", "did you mean CartPole-v1?"),
    _case("environment of a wrong type", _changed("spec.environment", 7), "spec.environment", "must be"),
    _case("hyperparameter out of range", _changed("spec.hyperparameters.learning_rate", -1), "spec.hyperparameters.learning_rate", "must be more than 0"),
    _case("hyperparameter of a wrong type", _changed("spec.hyperparameters.gamma", "high"), "spec.hyperparameters.gamma", "must be a number"),
    _case("name that is no DNS label", _changed("metadata.name", "Hello_World"), "metadata.name", "is not a DNS label"),
    _case("name with a newline", _changed("metadata.name", "a\nb"), "metadata.name", "is not a DNS label"),
    _case("name that climbs", _changed("metadata.name", "../etc"), "metadata.name", "is not a DNS label"),
    _case("name too long", _changed("metadata.name", "a" * 64), "metadata.name", "is not a DNS label"),
    _case("namespace that is no DNS label", _changed("metadata.namespace", "A/B"), "metadata.namespace", "is not a DNS label"),
    _case("no name", _without("metadata.name"), "metadata", "has neither name nor generateName"),
    _case("no spec", _without("spec"), "spec", "missing"),
    _case("no algorithm", _without("spec.algorithm"), "spec.algorithm", "missing"),
    _case("another kind", _changed("kind", "TrainingJobs"), "kind", "did you mean TrainingJob?"),
    _case("another version", _changed("apiVersion", "opentinker.io/v9"), "apiVersion", "opentinker.io/v1"),
    _case("a list", [good_manifest()], "", "must be an object"),
    _case("a number", b"7", "", "must be an object"),
    _case("empty", b"", "", "is empty"),
    _case("truncated", _GOOD[:-20], "", "is not valid JSON"),
    _case("invalid UTF-8", _GOOD.replace(b"good", b"go\xff\xfe"), "", "is not valid UTF-8"),
    _case("a key twice", _GOOD.replace(b'"environment"', b'"algorithm": "PPO", "environment"'), "algorithm", "stands twice"),
    _case("not a number", _GOOD.replace(b'"spec": {', b'"spec": {"seed": NaN, '), "", "NaN is no JSON number"),
    _case("nested without end", b'{"spec":' * 5_000 + b"1" + b"}" * 5_000, "", "is nested too deeply"),
    _case("settings nested too deeply", _kwargs(_nested(100)), "spec.environment.kwargs.a" + "[0]" * 28, "is nested too deeply"),
    _case("settings with an endless number", json.dumps(_kwargs("?")).replace('"?"', "1e999").encode(), "spec.environment.kwargs.a", "must be a finite number"),
    _case("settings with a number of thousands of digits", _kwargs(10**4000), "spec.environment.kwargs.a", "is a number of more than 64 bits"),
    _case("settings with half a character", _kwargs({"b": ["\ud800"]}), "spec.environment.kwargs.a.b[0]", "is not valid Unicode"),
    _case("a key of half a character", _changed("spec.hyperparameters.\udfff", 1), "spec.hyperparameters.\\udfff", "is not valid Unicode"),
    _case("a key of half a character, twice", _GOOD.replace(b'"spec"', b'"\\ud800": 1, "\\ud800": 2, "spec"'), "\\ud800", "stands twice"),
    _case("settings with U+0000", _kwargs("x\0y"), "spec.environment.kwargs.a", "holds the character U+0000"),
    _case("label that moves the cursor", _changed("metadata.labels", {"a": "\x1b[2J"}), "metadata.labels", "holds characters that cannot be printed"),
    _case("name to be generated from no label", _changed("metadata", {"generateName": "A_"}), "metadata.generateName", "is not the beginning of a DNS label"),
    _case("yes for a number", _changed("spec.stop.totalSteps", True), "spec.stop.totalSteps", "must be a whole number, got true"),
    _case("yes for a rate", _changed("spec.hyperparameters.learning_rate", True), "spec.hyperparameters.learning_rate", "must be a number, got true"),
    _case("other digits", _changed("spec.resources.cpu", "\u0663"), "spec.resources.cpu", "is not a number of cores"),
    _case("2 MB", json.dumps(_changed("metadata.labels", {"x": "y" * 2_000_000})).encode(), "", f"more than {MANIFEST_BYTES_MAX:,}"),
)  # fmt: skip
