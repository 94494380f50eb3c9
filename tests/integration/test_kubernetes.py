"""examples/kubernetes: Kubernetes' schema, the recipe's settings, and the trainer's shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from redrb.connection.stop import STOP_TIMEOUT_S
from redrb.recipe.loading import load
from redrb.recipe.settings import resolve, settings_of

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "tests" / "kubernetes" / "schema.json").read_text())
PAGE = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
MANIFESTS: list[dict[str, Any]] = list(
    yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "job.yaml").read_text())
)


def named(kind: str, name: str) -> dict[str, Any]:
    return next(
        each for each in MANIFESTS if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )


def check(manifest: dict[str, Any]) -> None:
    definition = SCHEMA["kinds"][f"{manifest['apiVersion']} {manifest['kind']}"]
    schema = {"$ref": f"#/$defs/{definition}", "$defs": SCHEMA["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(manifest)


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=[f"{each['kind']}-{each['metadata']['name']}" for each in MANIFESTS]
)
def test_each_manifest_follows_the_schema(manifest: dict[str, Any]) -> None:
    check(manifest)


def test_a_misspelt_field_is_found() -> None:
    job = json.loads(json.dumps(named("Job", "trainer")))
    pod = job["spec"]["template"]["spec"]
    pod["terminationGracePeriod"] = pod.pop("terminationGracePeriodSeconds")
    with pytest.raises(jsonschema.ValidationError, match="terminationGracePeriod"):
        check(job)


def test_names_that_manifests_refer_to_exist() -> None:
    claims = named("StatefulSet", "redis")["spec"]["volumeClaimTemplates"]
    claimed = {each["metadata"]["name"] for each in claims}
    specs = [each.get("spec", {}) for each in MANIFESTS]
    for pod in (spec["template"]["spec"] for spec in specs if "template" in spec):
        volumes = pod.get("volumes", [])
        for volume in volumes:
            if "configMap" in volume:
                named("ConfigMap", volume["configMap"]["name"])
            if "persistentVolumeClaim" in volume:
                named("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
        for container in pod["containers"]:
            for mount in container["volumeMounts"]:
                assert mount["name"] in claimed | {volume["name"] for volume in volumes}
            for variable in container["env"]:
                if "valueFrom" in variable:
                    reference = variable["valueFrom"]["secretKeyRef"]
                    assert reference["key"] in named("Secret", reference["name"])["stringData"]


def test_workers_have_known_settings_and_time_to_end(tmp_path: Path) -> None:
    data = named("ConfigMap", "my-recipe")["data"]
    for name, text in data.items():
        (tmp_path / name).write_text(text)
    loaded, _ = load(str(tmp_path / "my_recipe.py"))
    recipe, _ = resolve(loaded, flags={}, file=tmp_path / "my_recipe.toml")
    assert (recipe.target_reward, recipe.group_size) == (0.95, 8)
    assert f"-- redrb stats {recipe.task_name}\n" in PAGE
    for kind, name in (("Job", "trainer"), ("Deployment", "makers")):
        pod = named(kind, name)["spec"]["template"]["spec"]
        variables = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
        known = {f"REDRB_{setting.upper()}" for setting in settings_of(loaded)}
        assert variables.keys() - known == {"REDRB_RECIPE"}
        assert float(variables["REDRB_STOP_TIMEOUT"]) == STOP_TIMEOUT_S
        assert pod["terminationGracePeriodSeconds"] > 2 * STOP_TIMEOUT_S


@pytest.mark.parametrize("status", [0, 2])
def test_the_trainers_shell_ends_with_the_status_of_the_trainer(
    tmp_path: Path, status: int
) -> None:
    with trainer_shell(tmp_path, f"exit {status}") as shell:
        assert shell.wait(10) == status


def test_the_trainers_shell_ends_with_another_status_after_sigterm(tmp_path: Path) -> None:
    # `wait` is interrupted by the trap, whenever the signal comes; `read` may miss it and block
    words = "trap 'echo saved; kill $!; exit 0' TERM; sleep 60 > /dev/null & echo ready; wait"
    with trainer_shell(tmp_path, words) as shell:
        assert shell.stdout.readline() == "ready\n"
        shell.send_signal(signal.SIGTERM)
        assert shell.stdout.read() == "saved\n"
        assert shell.wait(10) == 143


@contextmanager
def trainer_shell(folder: Path, words: str) -> Iterator[subprocess.Popen[str]]:
    """Start the command of the trainer's pod, with a shell script in the place of the trainer.

    At the end of the block it is killed with all that it started, if it runs.
    """
    program = folder / "redrb-trainer"
    program.write_text(f"#!/bin/bash\n{words}\n")
    program.chmod(0o755)
    container = named("Job", "trainer")["spec"]["template"]["spec"]["containers"][0]
    with subprocess.Popen(
        container["command"],
        cwd=folder,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            yield shell
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
