"""What a user may write, and what they read when it is wrong: one wording, with field, nearest name and remedy."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from opentinker.schemas import InvalidManifest, effective_values, parse_manifest, spec_digest

CARTPOLE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "examples" / "cartpole-v1.json").read_text())
ENVIRONMENTS = {"CartPole-v1", "Acrobot-v1", "LunarLander-v3"}


def changed(path: str, value: object) -> dict[str, Any]:
    document = copy.deepcopy(CARTPOLE)
    target = document
    *parents, last = path.split(".")
    for part in parents:
        target = target[part]
    target[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("spec.replicas", 0, "spec.replicas: must be at least 1, got 0"),
        ("spec.replicas", "4", "spec.replicas: must be a whole number, got '4'"),
        ("spec.replicas", 10**9, "spec.replicas: must be at most 512"),
        ("spec.replicas", 64, "spec.replicas: 64 replicas would share num_envs 32, which is for the whole gang; ask for at most 32, or raise"),
        ("spec.replica", 3, "spec.replica: unknown key; did you mean replicas?"),
        ("spec.Replica", 3, "spec.Replica: unknown key; did you mean replicas?"),
        ("ApiVersion", 3, "ApiVersion: unknown key; did you mean apiVersion?"),
        ("str", 3, "str: unknown key"),
        ("a[0]", 3, "a[0]: unknown key"),
        ("spec.resources.gpus", 1, "spec.resources.gpus: unknown key; did you mean gpu?"),
        ("spec.resources.gpu", 0.5, "spec.resources.gpu: must be a whole number of GPUs, got 0.5"),
        ("spec.resources.gpu", -1, "spec.resources.gpu: must be"),
        ("spec.resources.cpu", -2, "spec.resources.cpu: must be from 0.001 to 1024 cores"),
        ("spec.resources.cpu", True, "spec.resources.cpu: must be a number of cores"),
        ("spec.resources.memory", "4 gigs", "spec.resources.memory: '4 gigs' is not an amount of memory; write 4Gi or 512Mi"),
        ("spec.resources.memory", "9999Ti", "spec.resources.memory: must be from 1Mi to 64Ti"),
        ("spec.algorithm", "ppo", "spec.algorithm: unknown algorithm 'ppo'; did you mean PPO?"),
        ("spec.environment", "Cartpole-v1", "spec.environment: unknown environment 'Cartpole-v1'; did you mean CartPole-v1?"),
        ("spec.environment", {"id": "CartPole-v1", "kwarg": {}}, "spec.environment.kwarg: unknown key; did you mean kwargs?"),
        ("spec.hyperparameters.learning_rte", 0.1, "spec.hyperparameters.learning_rte: unknown key; did you mean learning_rate?"),
        ("spec.hyperparameters.learning_rate", "x", "spec.hyperparameters.learning_rate: must be a number, got 'x'"),
        ("spec.hyperparameters.gamma", float("nan"), "spec.hyperparameters.gamma: must be a finite number"),
        ("spec.hyperparameters.batch_size", 63, "is not a multiple of batch_size 63"),
        ("spec.suspend", True, "spec.suspend: is not available in this version; remove it"),
        ("spec.seed", -1, "spec.seed: must be at least 0"),
        ("spec.stop", {"totalSteps": 0}, "spec.stop.totalSteps: must be at least 1"),
        ("spec.maxRuntime", "soon", "spec.maxRuntime: 'soon' is not a duration; write 90s, 10m, 2h or 7d"),
        ("metadata.name", "Bad Name", "metadata.name: 'Bad Name' is not a DNS label"),
        ("metadata.name", "x" * 64, "metadata.name: "),
        ("metadata", {}, "metadata: has neither name nor generateName; add metadata.name"),
        ("apiVersion", "v9", "apiVersion: must be 'opentinker.io/v1', got 'v9'"),
        ("kind", "Pod", "kind: must be 'TrainingJob', got 'Pod'"),
        ("spec", None, "spec: must be an object, got None"),
    ],
)
def test_a_mistake_is_named_with_field_and_remedy(path: str, value: object, sentence: str) -> None:
    with pytest.raises(InvalidManifest) as caught:
        parse_manifest(changed(path, value), ENVIRONMENTS)
    assert sentence in str(caught.value)
    assert all(error.remedy and error.message for error in caught.value.errors)


@pytest.mark.parametrize("document", [None, [], "text", 3, {}])
def test_what_is_no_manifest_at_all_is_refused(document: object) -> None:
    with pytest.raises(InvalidManifest):
        parse_manifest(document)


def test_several_mistakes_are_reported_together() -> None:
    document = changed("spec.replicas", 0)
    document["spec"]["resources"]["cpu"] = "x"
    document["metadata"]["name"] = "No"
    with pytest.raises(InvalidManifest) as caught:
        parse_manifest(document)
    assert {error.field for error in caught.value.errors} == {"spec.replicas", "spec.resources.cpu", "metadata.name"}


def test_mistakes_that_only_a_whole_job_would_be_asked_are_reported_with_the_others() -> None:
    document = changed("kind", "TrainingJbo")
    document["spec"] |= {"replicas": 0, "environment": "CartPoel-v1", "hyperparameters": {"learning_rte": 1}, "stop": {"totalSteps": -1}}
    with pytest.raises(InvalidManifest) as caught:
        parse_manifest(document, {"CartPole-v1"})
    fields = [error.field for error in caught.value.errors]
    assert sorted(fields) == ["kind", "spec.environment", "spec.hyperparameters.learning_rte", "spec.replicas", "spec.stop.totalSteps"]


def test_a_huge_value_is_cut_in_the_error() -> None:
    with pytest.raises(InvalidManifest) as caught:
        parse_manifest(changed("spec.algorithm", "x" * 60_000))
    assert len(str(caught.value)) < 300


def test_effective_values_name_their_source_and_keep_what_was_asked() -> None:
    rows = {path: (value, source) for path, value, source in effective_values(parse_manifest(CARTPOLE))}
    assert rows["spec.hyperparameters.learning_rate"] == (0.0003, "manifest")
    assert rows["spec.hyperparameters.batch_size"] == (64, "manifest")
    assert rows["spec.hyperparameters.gamma"][1] == "default"
    assert rows["spec.replicas"] == (4, "manifest")
    assert rows["spec.pool"] == ("default", "default")
    assert rows["spec.maxRuntime"] == ("7d", "default")


def test_digest_follows_content_not_spelling() -> None:
    reordered = {key: CARTPOLE[key] for key in reversed(CARTPOLE)}
    assert spec_digest(parse_manifest(reordered)) == spec_digest(parse_manifest(CARTPOLE))
    assert spec_digest(parse_manifest(changed("spec.seed", 1))) != spec_digest(parse_manifest(CARTPOLE))
