"""examples/kubernetes as `kubectl kustomize` renders it: its objects, and its pods run here."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import redis
import yaml

import redrb
from redrb.cli import __main__ as cli
from redrb.connection.stop import STOP_TIMEOUT_S
from redrb.recipe.loading import load
from redrb.recipe.settings import resolve, settings_of
from redrb.stream.task.lookup import task_stats
from redrb.watch.doctor.server_fixes import find as missing_fixes
from redrb.watch.state.model import ServerState
from tests.integration.test_operations_pages import script, started
from tests.servers import await_server, free_port, programs
from tests.tools import need
from tests.unit.test_metrics import check_by_promtool

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCHEMA = json.loads((ROOT / "tests" / "kubernetes" / "schema.json").read_text())
COMPONENTS = ("autoscaling", "gateway")
SECRETS = {"redrb": {"password": "a-secret", "gateway-token": "a-token"}}

Object = dict[str, Any]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    """The objects of the folder, of the folder with both components, and of examples/gsm8k."""
    chosen = tmp_path_factory.mktemp("kubernetes") / "job"
    shutil.copytree(EXAMPLES / "kubernetes", chosen)
    file = chosen / "kustomization.yaml"
    file.write_text(re.sub(f"# - ({'|'.join(COMPONENTS)}) ", r"- \1 ", file.read_text()))
    assert yaml.safe_load(file.read_text())["components"] == list(COMPONENTS)
    folders = {"plain": EXAMPLES / "kubernetes", "chosen": chosen, "gsm8k": EXAMPLES / "gsm8k"}
    return {name: kustomized(folder) for name, folder in folders.items()}


def kustomized(folder: Path) -> list[Object]:
    """Return the objects that `kubectl apply -k` of a folder applies.

    Debian 12 has kubectl 1.20, whose kustomize has no components of this version.
    """
    asked = [need("kubectl"), "version", "--client", "--output=json"]
    version = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)
    kustomize = version.get("kustomizeVersion", "v0")
    if int(kustomize.removeprefix("v").partition(".")[0]) < 5:
        pytest.skip(f"kubectl has kustomize {kustomize}: v5, of kubectl 1.27, is needed")
    done = subprocess.run(
        [need("kubectl"), "kustomize", folder], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


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


def test_the_gateway_is_started_with_flags_that_it_has(
    rendered: dict[str, list[Object]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gateway, _ = named(rendered["chosen"], "Deployment", "engines")["spec"]["template"]["spec"][
        "containers"
    ]
    token = variables_of(gateway)["REDRB_GATEWAY_TOKEN"]
    monkeypatch.setenv("REDRB_GATEWAY_TOKEN", token)
    monkeypatch.setenv("REDRB_URL", f"redis://127.0.0.1:{free_port()}/0")
    assert cli.main(gateway["command"][1:]) == 1
    assert "is not reachable" in capsys.readouterr().err


class Node:
    """Starts containers of rendered pods as processes of this machine, in a folder.

    Paths of volumes are folders here, programs of the images are scripts in `bin`, and Redis has
    another port.
    """

    def __init__(self, folder: Path, objects: list[Object]) -> None:
        self.folder, self.objects, self.port = folder, objects, free_port()
        for each in objects:
            if each["kind"] == "ConfigMap":
                (folder / each["metadata"]["name"]).mkdir()
                for name, text in each["data"].items():
                    (folder / each["metadata"]["name"] / name).write_text(text)
        for name in ("data", "checkpoints", "bin", "tmp"):
            (folder / name).mkdir()
        server = list(programs().values())[-1]
        script(folder, "bin/valkey-server", f'exec {server} "$@" --port {self.port}')
        script(folder, "bin/valkey-cli", f'exec {need("redis-cli")} -p {self.port} "$@"')
        modules = {
            "redrb": "redrb.cli",
            "redrb-maker": "workers.maker",
            "redrb-trainer": "workers.trainer",
        }
        for name, module in modules.items():
            script(folder, f"bin/{name}", f'exec {sys.executable} -m {module} "$@"')
        self._paths = {
            "/etc/redis/": f"{folder}/redis/",
            "/recipe/": f"{folder}/recipe/",
            "/checkpoints": f"{folder}/checkpoints",
            "/tmp/": f"{folder}/tmp/",
            "dir /data": f"dir {folder}/data",
            "@redis:6379": f"@127.0.0.1:{self.port}",
        }

    def container(self, kind: str, name: str) -> Object:
        [container] = named(self.objects, kind, name)["spec"]["template"]["spec"]["containers"]
        return container

    def here(self, text: str) -> str:
        """Return a text of an object with the paths of this machine."""
        anywhere = "|".join(map(re.escape, self._paths))
        return re.sub(anywhere, lambda match: self._paths[match[0]], text)

    def start(self, kind: str, name: str, *more: str, **variables: str) -> Any:
        """Return a block in which a container runs, with more arguments and variables."""
        container = self.container(kind, name)
        words = [self.here(word) for word in container["command"]]
        return started([*words, *more], self.folder, self._environment(container, variables))

    def probe(self, kind: str, name: str, which: str) -> int:
        """Return the status of a probe's command."""
        container = self.container(kind, name)
        words = [self.here(word) for word in container[which]["exec"]["command"]]
        return subprocess.run(
            words, env=self._environment(container, {}), check=False, timeout=30
        ).returncode

    def _environment(self, container: Object, more: dict[str, str]) -> dict[str, str]:
        own = {name: self.here(value) for name, value in variables_of(container).items()}
        return {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            **own,
            **more,
        }

    def events(self, trainer: subprocess.Popen[bytes]) -> Iterator[str]:
        """Yield the events of the trainer, as they are written, until it has ended."""
        file = self.folder / "tmp" / "metrics.jsonl"
        file.touch()
        words = ["tail", f"--pid={trainer.pid}", "-n", "+1", "-s", "0.1", "-f", file]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as tail:
            try:
                yield from (json.loads(line)["event"] for line in tail.stdout)
            finally:
                tail.kill()


def test_the_pods_train_together(rendered: dict[str, list[Object]], tmp_path: Path) -> None:
    """Redis, trainer, makers and exporter as they are rendered; the trainer is evicted."""
    node = Node(tmp_path, rendered["chosen"])
    url = f"redis://:{SECRETS['redrb']['password']}@127.0.0.1:{node.port}/0"
    assert node.probe("StatefulSet", "redis", "readinessProbe") != 0
    with node.start("StatefulSet", "redis"), redis.Redis.from_url(url) as client:
        await_server(client)
        assert node.probe("StatefulSet", "redis", "startupProbe") == 0
        assert client.config_get("appendonly", "dir", "maxmemory") == {
            "appendonly": "yes",
            "dir": str(tmp_path / "data"),
            "maxmemory": str(6 << 30),
        }
        with node.start("Deployment", "makers") as maker:
            with node.start("Job", "trainer", REDRB_TARGET_REWARD="2") as trainer:
                steps = (event for event in node.events(trainer) if event == "step")
                assert [next(steps), next(steps)] == ["step", "step"]
                assert node.probe("Job", "trainer", "startupProbe") == 0
                assert node.probe("Job", "trainer", "livenessProbe") == 0
                with node.start("Deployment", "exporter", "--once") as exporter:
                    assert exporter.wait(60) == 0
                trainer.send_signal(signal.SIGTERM)
                assert trainer.wait(60) == 143
            maker.send_signal(signal.SIGTERM)
            assert maker.wait(60) == 0
        assert list((tmp_path / "checkpoints").iterdir())
        with redrb.connect(url) as connected:
            ledger = task_stats(connected, "sort", namespace="default", group="default").ledger
        assert ledger.acked > 0
        assert ledger.balanced
    output = (tmp_path / "output").read_text()
    for name in metrics_of(scaling(rendered)["query"]):
        assert f"\n{name}{{" in output


def scaling(rendered: dict[str, list[Object]]) -> dict[str, str]:
    """Return what KEDA asks Prometheus."""
    [trigger] = named(rendered["chosen"], "ScaledObject", "makers")["spec"]["triggers"]
    return dict(trigger["metadata"])


def metrics_of(query: str) -> list[str]:
    return re.findall(r"redrb_\w+", query)


@pytest.mark.parametrize(
    ("held", "trained", "makers"),
    [
        ("64x60", "0+60x60", 2),  # two makers work, the trainer always trains: as they are
        ("64x60", "0+30x60", 4),  # it waits half of the time
        ("64x60", "0+1x60", 8),  # it hardly trains: not more than four times as many at once
        ("64x60", "0x60", 8),  # before its first step
        ("32x60", "0+60x60", 1),  # of two makers one waits for rights
    ],
)
def test_the_trainer_decides_how_many_makers_there_are(
    rendered: dict[str, list[Object]], tmp_path: Path, held: str, trained: str, makers: int
) -> None:
    """Prometheus' own tool evaluates the query; KEDA divides it by the threshold."""
    found = scaling(rendered)
    series = (
        f'redrb_rights_held{{namespace="n",task="sort"}} {held}',
        f'redrb_worker_step_seconds_total{{task="sort",role="trainer",worker="t"}} {trained}',
        'redrb_rights_held{namespace="n",task="other"} 900x60',
    )
    check_by_promtool(
        tmp_path, {"tests": [case(f"{found['query']} / {found['threshold']}", series, makers)]}
    )
    assert int(found["threshold"]) == load("sorting")[0].prompts_per_step


def case(query: str, series: tuple[str, ...], value: float) -> Object:
    """Return a case of promtool: the value of a query after half an hour."""
    rows = [each.rpartition(" ") for each in series]
    sample = {"labels": "{}", "value": value}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, _, values in rows],
        "promql_expr_test": [{"expr": query, "eval_time": "30m", "exp_samples": [sample]}],
    }


@pytest.mark.parametrize("status", [0, 2])
def test_the_trainers_shell_ends_with_the_status_of_the_trainer(
    rendered: dict[str, list[Object]], tmp_path: Path, status: int
) -> None:
    node = Node(tmp_path, rendered["plain"])
    script(tmp_path, "bin/redrb-trainer", f"exit {status}")
    with node.start("Job", "trainer") as shell:
        assert shell.wait(10) == status
