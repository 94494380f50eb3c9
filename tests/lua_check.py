"""Run luacheck on the Lua scripts as Redis runs them: `python -m tests.lua_check`.

A function of an include is unused only if no script that includes it calls it. Every other warning
counts once, wherever it was found.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.resources import files
from pathlib import Path

from redrb.lua.scripts import Script, load

_LUA = Path(str(files("redrb.lua")))
_GLOBALS = (
    *("KEYS", "ARGV", "redis", "cjson", "cmsgpack"),
    *(
        "error",
        "ipairs",
        "math",
        "next",
        "pairs",
        "pcall",
        "string",
        "table",
        "tonumber",
        "type",
        "unpack",
    ),
)
_OPTIONS = (
    *("--no-config", "--no-cache", "--no-color", "--codes", "--formatter=plain", "--std=none"),
    "--no-max-line-length",  # a script has lists in the place of their names
)
_WARNING = re.compile(r"^.*/(\d+)\.lua:(\d+):\d+: \((\w\d+)\) (.*)$", re.M)
_UNUSED = ("W211", "W221", "W231", "W241")


def main() -> int:
    """Print each warning with its file and line; return 1 if there is any."""
    if shutil.which("luacheck") is None:
        print(
            "luacheck is missing. Install it: apt install lua-check (Debian, Ubuntu), "
            "brew install luacheck (macOS) or luarocks install luacheck",
            file=sys.stderr,
        )
        return 1
    names = sorted(str(path.relative_to(_LUA).with_suffix("")) for path in _LUA.rglob("*.lua"))
    scripts = [load(name) for name in names if not name.startswith("include/")]
    warnings = _warnings(scripts)
    print("\n".join(warnings) or f"luacheck: no warnings in {len(scripts)} scripts")
    return 1 if warnings else 0


def _warnings(scripts: list[Script]) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        for number, script in enumerate(scripts):
            Path(directory, f"{number}.lua").write_text(script.text, "utf-8")
        command = ["luacheck", *_OPTIONS, directory, "--read-globals", *_GLOBALS]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    found = _WARNING.findall(run.stdout)
    if run.returncode > 1 or bool(run.returncode) != bool(found):
        raise SystemExit(f"luacheck failed: {run.stdout}{run.stderr}")
    found = [each for each in found if not _shadows_another_file(*each, scripts)]
    times = Counter(
        (scripts[int(number)].sources[int(line) - 1], code, _located(text, scripts[int(number)]))
        for number, line, code, text in found
    )
    includes = Counter(source for script in scripts for source in script.sources)
    return [
        f"{source}: {text} ({code})"
        for (source, code, text), count in sorted(times.items())
        if code not in _UNUSED or count == includes[source]
    ]


def _shadows_another_file(
    number: str, line: str, code: str, text: str, scripts: list[Script]
) -> bool:
    """Return whether a variable of a file is named like one of the file that includes it."""
    sources = scripts[int(number)].sources
    shadowed = re.search(r"\bon line (\d+)", text)
    return (
        code in ("W421", "W422", "W423", "W431", "W432", "W433")
        and shadowed is not None
        and _file(sources[int(line) - 1]) != _file(sources[int(shadowed[1]) - 1])
    )


def _file(source: str) -> str:
    return source.partition(":")[0]


def _located(text: str, script: Script) -> str:
    return re.sub(r"\bon line (\d+)", lambda line: f"at {script.sources[int(line[1]) - 1]}", text)


if __name__ == "__main__":
    sys.exit(main())
