"""The manifests of examples/kubernetes and examples/gsm8k as `kubectl kustomize` renders them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import pytest
import yaml

from tests.tools import find

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCHEMA = json.loads((ROOT / "tests" / "kubernetes" / "schema.json").read_text())
COMPONENTS = ("autoscaling", "gateway")
SECRETS = {"redrb": {"password": "a-secret", "gateway-token": "a-token"}}

Object = dict[str, Any]


@cache
def render() -> dict[str, list[Object]]:
    """Return the objects of the folder, of it with both components, and of examples/gsm8k."""
    with TemporaryDirectory() as folder:
        chosen = Path(folder) / "job"
        shutil.copytree(EXAMPLES / "kubernetes", chosen)
        file = chosen / "kustomization.yaml"
        file.write_text(re.sub(f"# - ({'|'.join(COMPONENTS)}) ", r"- \1 ", file.read_text()))
        assert yaml.safe_load(file.read_text())["components"] == list(COMPONENTS)
        folders = {"plain": EXAMPLES / "kubernetes", "chosen": chosen, "gsm8k": EXAMPLES / "gsm8k"}
        return {name: _kustomized(each) for name, each in folders.items()}


def _kustomized(folder: Path) -> list[Object]:
    """Return the objects that `kubectl apply -k` of a folder applies."""
    done = subprocess.run(
        [_kubectl(), "kustomize", folder], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


def _kubectl() -> str:
    """Return the path of a kubectl that knows the components; without it the test is skipped.

    In CI, too: Debian's is too old, and Ubuntu has none. The project's workflow installs one.
    """
    program = find("kubectl")
    if program is None:
        pytest.skip("no manifest is checked: kubectl 1.27 or newer is not here")
    asked = [program, "version", "--client", "--output=json"]
    version = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)
    kustomize = version.get("kustomizeVersion", "v0")
    if int(kustomize.removeprefix("v").partition(".")[0]) < 5:
        pytest.skip(
            f"no manifest is checked: kubectl's kustomize is {kustomize}, and v5 is needed, which "
            "kubectl 1.27 has"
        )
    return program


def named(objects: list[Object], kind: str, name: str) -> Object:
    return next(
        each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )


def pods(objects: list[Object]) -> list[Object]:
    """Return the templates of pods."""
    return [each["spec"]["template"] for each in objects if "template" in each.get("spec", {})]


def containers(objects: list[Object]) -> list[Object]:
    return [
        container
        for pod in pods(objects)
        for container in [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
    ]


def variables_of(container: Object) -> dict[str, str]:
    """Return the environment of a container: $(NAME) is a variable that comes before."""
    found: dict[str, str] = {}
    for each in container.get("env", ()):
        if "valueFrom" in each:
            reference = each["valueFrom"]["secretKeyRef"]
            value = SECRETS[reference["name"]][reference["key"]]
        else:
            value = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], each["value"])
        found[each["name"]] = value
    return found


def check(manifest: Object) -> None:
    definition = SCHEMA["kinds"][f"{manifest['apiVersion']} {manifest['kind']}"]
    schema = {"$ref": f"#/$defs/{definition}", "$defs": SCHEMA["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(manifest)
