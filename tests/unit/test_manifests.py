"""The objects of examples/kubernetes and examples/gsm8k: schema, names, settings, images."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from redrb.connection.stop import STOP_TIMEOUT_S
from redrb.recipe.loading import load
from redrb.recipe.settings import resolve, settings_of
from redrb.watch.doctor.server_fixes import find as missing_fixes
from redrb.watch.state.model import ServerState
from tests import manifests
from tests.manifests import (
    EXAMPLES,
    ROOT,
    SCHEMA,
    Object,
    check,
    containers,
    named,
    pods,
    render,
    variables_of,
)


@pytest.fixture
def rendered() -> dict[str, list[Object]]:
    return render()


def test_each_object_follows_the_schema(rendered: dict[str, list[Object]]) -> None:
    for objects in rendered.values():
        for manifest in objects:
            check(manifest)
    kinds = {f"{each['apiVersion']} {each['kind']}" for each in rendered["chosen"]}
    assert kinds == SCHEMA["kinds"].keys()


def test_a_misspelt_field_is_found(rendered: dict[str, list[Object]]) -> None:
    for kind, name, before, after in (
        ("Job", "trainer", "terminationGracePeriodSeconds", "terminationGracePeriod"),
        ("ScaledObject", "makers", "maxReplicaCount", "maxReplicas"),
    ):
        text = json.dumps(named(rendered["chosen"], kind, name))
        assert before in text
        with pytest.raises(jsonschema.ValidationError, match=after):
            check(json.loads(text.replace(before, after)))


def test_names_that_objects_refer_to_exist(rendered: dict[str, list[Object]]) -> None:
    for objects in rendered.values():
        labels = [pod["metadata"]["labels"] for pod in pods(objects)]

        def chosen(selector: dict[str, str], labels: Any = labels) -> bool:
            return any(selector.items() <= each.items() for each in labels)

        for each in objects:
            spec = each.get("spec", {})
            if each["kind"] == "Service":
                assert chosen(spec["selector"])
            if each["kind"] == "NetworkPolicy":
                assert chosen(spec["podSelector"]["matchLabels"])
                [allowed] = spec["ingress"][0]["from"]
                assert chosen(allowed["podSelector"]["matchLabels"])
            if each["kind"] == "ScaledObject":
                named(objects, "Deployment", spec["scaleTargetRef"]["name"])
            if "selector" in spec and each["kind"] != "Service":
                assert chosen(spec["selector"]["matchLabels"])
            claimed = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())}
            for pod in pods([each]):
                volumes = pod["spec"]["volumes"]
                for volume in volumes:
                    if "configMap" in volume:
                        named(objects, "ConfigMap", volume["configMap"]["name"])
                    if "persistentVolumeClaim" in volume:
                        claim = volume["persistentVolumeClaim"]["claimName"]
                        named(objects, "PersistentVolumeClaim", claim)
                known = claimed | {volume["name"] for volume in volumes}
                for container in containers([each]):
                    assert {mount["name"] for mount in container["volumeMounts"]} <= known
        assert {"redis": "worker"} not in labels
        workers = [pod for pod in pods(objects) if "REDRB_URL" in json.dumps(pod)]
        assert workers == [pod for pod in pods(objects) if "redrb" in pod["metadata"]["labels"]]


def test_workers_have_known_settings_and_time_to_end(rendered: dict[str, list[Object]]) -> None:
    settings = settings_of(load(str(EXAMPLES / "gsm8k" / "recipe.py"))[0])
    known = {f"REDRB_{name.upper()}" for name in settings}
    known |= {"REDRB_RECIPE", "REDRB_GATEWAY_TOKEN"}
    for objects in rendered.values():
        for pod in pods(objects):
            if "redrb" not in pod["metadata"]["labels"]:
                continue
            assert pod["spec"]["terminationGracePeriodSeconds"] > 2 * STOP_TIMEOUT_S
            variables = variables_of(pod["spec"]["containers"][0])
            assert {name for name in variables if name.startswith("REDRB_")} <= known
            assert float(variables["REDRB_STOP_TIMEOUT"]) == STOP_TIMEOUT_S
            assert variables["REDRB_URL"] == "redis://:a-secret@redis:6379/0"


def test_engines_share_no_volume_and_are_reached_by_their_pod_only(
    rendered: dict[str, list[Object]],
) -> None:
    for objects in rendered.values():
        pod = named(objects, "Deployment", "engines")["spec"]["template"]["spec"]
        kinds = {kind for volume in pod["volumes"] for kind in volume} - {"name"}
        assert kinds <= {"emptyDir", "configMap"}
        assert "--host=127.0.0.1" in pod["containers"][1]["args"]
        assert '--weight-transfer-config={"backend": "redrb"}' in pod["containers"][1]["args"]
    model = variables_of(pod["containers"][1])["MODEL"]
    assert model == load(str(EXAMPLES / "gsm8k" / "recipe.py"))[0].model_name


def test_the_recipe_of_the_folder_has_its_settings() -> None:
    recipe = EXAMPLES / "kubernetes" / "recipe.py"
    loaded, _ = load(str(recipe))
    mine, _ = resolve(loaded, flags={}, file=recipe.with_suffix(".toml"))
    assert (mine.target_reward, mine.group_size) == (0.95, 8)
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    assert f"-- redrb stats {mine.task_name}\n" in page


def test_servers_have_all_security_fixes(rendered: dict[str, list[Object]]) -> None:
    composed = [
        yaml.safe_load(file.read_text())["services"]["redis"]["image"]
        for file in (ROOT / "docker-compose.yml", EXAMPLES / "gsm8k" / "compose.yml")
    ]
    [server] = named(rendered["plain"], "StatefulSet", "redis")["spec"]["template"]["spec"][
        "containers"
    ]
    assert composed == [server["image"], server["image"]]
    image = re.fullmatch(r"(?:\w+/)?(redis|valkey):(\d+\.\d+\.\d+)-alpine", server["image"])
    assert image
    assert list(missing_fixes(ServerState("h:1", kind=image[1], version=image[2]))) == []


@pytest.mark.parametrize(("rendering", "recipe"), [("plain", "kubernetes"), ("gsm8k", "gsm8k")])
def test_a_trainer_fails_by_itself_before_its_probe_ends_it(
    rendered: dict[str, list[Object]], recipe: str, rendering: str
) -> None:
    """A trainer that waits for vLLM writes no event: `idle_timeout` ends it, and says why."""
    pod = named(rendered[rendering], "Job", "trainer")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    command = " ".join(container["livenessProbe"]["exec"]["command"])
    minutes = int(re.findall(r"-mmin -(\d+)", command)[0])
    loaded = load(str(EXAMPLES / recipe / "recipe.py"))[0]
    assert 60 * minutes >= 1.5 * loaded.idle_timeout
    assert 60 * minutes >= 1.5 * startup_s(named(rendered[rendering], "Deployment", "engines"))


def startup_s(engines: Object) -> int:
    """Return the seconds that vLLM may take to start; 0 if there are no such pods."""
    probe = engines["spec"]["template"]["spec"]["containers"][1]["startupProbe"]
    return engines["spec"]["replicas"] and probe["periodSeconds"] * probe["failureThreshold"]


def test_makers_beside_a_vllm_sample_from_it(rendered: dict[str, list[Object]]) -> None:
    """Whatever recipe they run: an engine's address alone does not choose the engine."""
    for objects in rendered.values():
        pod = named(objects, "Deployment", "engines")["spec"]["template"]["spec"]
        assert variables_of(pod["containers"][0])["REDRB_ENGINE"] == "vllm"


@pytest.mark.parametrize("version", [None, "v4.5.7", "v5.0.1"])
def test_manifests_are_checked_by_a_kubectl_of_today_only(
    version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    program.write_text(f"""#!/bin/sh\necho '{{"kustomizeVersion": "{version}"}}'\n""")
    program.chmod(0o755)
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(manifests, "find", lambda _: version and str(program))
    if version == "v5.0.1":
        assert manifests._kubectl() == str(program)
    else:
        with pytest.raises(pytest.skip.Exception, match="no manifest is checked"):
            manifests._kubectl()
