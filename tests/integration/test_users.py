"""Users that `redrb acl --apply` makes, and those that doctor finds to be gone after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import redrb
from redrb import ExperienceStream
from redrb.cli.__main__ import main
from redrb.cli.acl import PASSWORD
from redrb.connection import Client
from redrb.errors import StoreDenied
from tests.integration.conftest import SECRET
from tests.samples import numbered
from tests.servers import Server

APPLY = ("acl", "--role", "maker", "--task", "math", "--apply")


@pytest.fixture
def printed(capsys, monkeypatch):
    """Run a command on a server with --json; returns the record that it prints."""

    def run(server, *words):
        monkeypatch.setenv("REDRB_URL", server.url)
        monkeypatch.setenv(PASSWORD, SECRET)
        capsys.readouterr()
        assert main([*words, "--json"]) == 0
        output = capsys.readouterr().out
        assert SECRET not in output
        return json.loads(output)

    return run


def findings_about_users(record: Any) -> list[tuple[str, str]]:
    found = [(each["code"], each["command"].split()[5:]) for each in record["findings"]]
    return [(code, " ".join(words)) for code, words in found if "unsaved-users" in code]


def as_maker(server: Server) -> Client:
    return redrb.connect(server.url.replace("://", f"://maker:{SECRET}@"), retry_s=2)


def restart(server: Server) -> None:
    server.kill()
    server.start()


def test_a_user_is_saved_in_an_aclfile(own_server, tmp_path, printed):
    (tmp_path / "users").touch()
    server = own_server("--aclfile", str(tmp_path / "users"))
    [(_, kept)] = printed(server, *APPLY)["servers"].items()
    assert kept == "aclfile"
    restart(server)
    with as_maker(server) as client, ExperienceStream(client, "math") as stream:
        stream.put(numbered(1))
    assert findings_about_users(printed(server, "doctor", "--over", "0.1")) == []


def test_a_user_that_is_only_in_memory(own_server, printed):
    server = own_server()
    assert findings_about_users(printed(server, "doctor", "--over", "0.1")) == []
    [(_, kept)] = printed(server, *APPLY)["servers"].items()
    assert kept == "memory"
    found = findings_about_users(printed(server, "doctor", "--over", "0.1"))
    assert found == [("unsaved-users", "ACL LIST")]
    restart(server)
    with pytest.raises(StoreDenied):
        as_maker(server)


def test_a_user_that_config_rewrite_keeps(own_server, tmp_path, printed):
    file = tmp_path / "server.conf"
    file.touch()
    server = own_server()
    server.program = str(wrapped(tmp_path, server.program, file))
    restart(server)
    [(_, kept)] = printed(server, *APPLY)["servers"].items()
    assert kept == "config"
    found = findings_about_users(printed(server, "doctor", "--over", "0.1"))
    assert found == [("perhaps-unsaved-users", "CONFIG REWRITE")]
    with redrb.connect(server.url) as owner:
        owner.execute("CONFIG", "REWRITE")
    restart(server)
    as_maker(server).close()


@pytest.mark.parametrize(
    ("rights", "lacks"), [("+ping", True), ("+@all", True), ("+@all ~*", False)]
)
def test_a_default_user_without_rights_loses_the_data(
    own_server, tmp_path, printed, capsys, monkeypatch, rights, lacks
):
    users = tmp_path / "users"
    users.write_text(f"user default on nopass {rights}\nuser admin on nopass ~* &* +@all\n")
    server = own_server("--aclfile", str(users), "--appendonly", "yes")
    url = server.url.replace("://", "://admin:any@")
    with redrb.connect(url) as client:
        is_valkey_9 = b"valkey_version:9" in client.execute("INFO", "server")
        with ExperienceStream(client, "math") as stream:
            stream.put(numbered(1))
        stored = client.execute("DBSIZE")
    monkeypatch.setenv("REDRB_URL", url)
    assert main([*APPLY]) == 0
    warned = "a restart of this server will lose all data" in capsys.readouterr().err
    assert main(["doctor", "--over", "0.1", "--json"]) in (0, 1)
    codes = {each["code"] for each in json.loads(capsys.readouterr().out)["findings"]}
    restart(server)
    with redrb.connect(url) as client:
        lost = client.execute("DBSIZE") < stored
    assert lost == warned == ("unloadable-file" in codes) == (lacks and not is_valkey_9)


def wrapped(folder: Path, program: str, settings: Path) -> Path:
    """Return a program that starts a server with a file of settings."""
    script = folder / "server"
    script.write_text(f'#!/bin/sh\nexec "{program}" "{settings}" "$@"\n')
    script.chmod(0o755)
    return script


def test_without_apply_a_note_says_that_users_are_lost(capsys):
    assert main([*APPLY[:-1]]) == 0
    output, note = capsys.readouterr()
    assert output.startswith("ACL SETUSER maker on ")
    assert "gone when Redis restarts" in note
    assert "ACL SAVE" in note
