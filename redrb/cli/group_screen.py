"""Groups on a terminal: a row for each, or everything of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from redrb.cli.output import age, size
from redrb.words import counted, printable, printable_lines

if TYPE_CHECKING:
    from redrb.watch.groups import GroupView, LeaseView, SampleView, TokensView

_SHOWN_VALUES: Final = 12
_MOST_TEXT: Final = 4_000

COLUMNS: Final = ("id", "state", "samples", "size", "version", "stale", "reward", "range", "more")
LEFT: Final = ("state", "range", "more")


def row(view: GroupView) -> list[Text]:
    """Return the cells of a group, in the order of `COLUMNS`."""
    style = {"leased": "yellow", "waiting": "green"}.get(view.state, "")
    if view.damaged or view.state in ("dead", "parts", "damaged"):
        style = "red"
    remarks = (
        f"by {_holder(view.lease)}" if view.lease else "",
        _pairs(view.tags),
        view.letter.reason if view.letter else "",
        f"damaged: {view.damaged}" if view.damaged else "",
        *view.notes,
    )
    cells = [
        (str(view.id), ""),
        (printable(_standing(view)), style),
        (str(view.samples_total or "-"), ""),
        (size(view.size) if view.size else "-", ""),
        (_versions(view), ""),
        ("-" if view.staleness is None else str(view.staleness), ""),
        _reward(view.reward),
        (_range(view.rewards), ""),
        (printable(" ".join(filter(None, remarks))), ""),
    ]
    return [Text(*cell, no_wrap=True, overflow="ellipsis") for cell in cells]


def everything(view: GroupView) -> Iterator[Text]:
    """Yield the lines of a group with its samples."""
    holder = f" by {_holder(view.lease)}" if view.lease is not None else ""
    parts = (
        printable(_standing(view) + holder),
        counted(view.samples_total, "sample"),
        size(view.size),
    )
    yield Text(f"group {view.id} · {' · '.join(parts)}", style="bold")
    for name, value in _facts(view):
        yield _fact(name, _cut(printable(value)), 12)
    if view.damaged:
        yield Text(f"  damaged      {printable(view.damaged)}", style="red")
    for note in view.notes:
        yield Text(f"  note         {printable(note)}", style="yellow")
    for sample in view.samples:
        yield Text()
        yield from _sample(sample, view)


def _facts(view: GroupView) -> Iterator[tuple[str, str]]:
    facts: list[tuple[str, Any]] = [
        ("prompt", view.group_id),
        ("versions", None if view.oldest_version is None else _versions(view)),
        ("staleness", view.staleness),
        ("priority", view.priority),
        ("tags", _pairs(view.tags)),
        ("reward", None if view.reward is None else f"{view.reward:.4g} (mean)"),
        ("reads", view.reads or None),
        ("failed", view.failed_deliveries or None),
    ]
    if view.lease is not None:
        lease = view.lease
        facts.append(("leased by", f"{lease.consumer}, {age(lease.age_s)} ago"))
    if view.letter is not None:
        letter = view.letter
        cause = ": ".join(filter(None, (letter.exception, letter.message)))
        facts += [
            ("reason", letter.reason),
            ("exception", cause),
            ("given up by", f"{letter.consumer} of group {letter.group}, {letter.time}"),
            ("deliveries", f"{letter.deliveries}, {letter.failed_deliveries} failed"),
        ]
    return ((name, str(value)) for name, value in facts if value not in (None, ""))


def _sample(sample: SampleView, view: GroupView) -> Iterator[Text]:
    version = "" if sample.policy_version is None else f" · version {sample.policy_version}"
    yield Text.assemble(
        (f"sample {sample.index}", "bold"),
        f" · {sample.status}{version} · reward ",
        _reward(sample.reward),
    )
    if sample.tags and sample.tags != view.tags:
        yield _fact("tags", _cut(printable(_pairs(sample.tags))))
    if sample.tokens is not None:
        yield from _tokens(sample.tokens)
    for name, value in sample.extras.items():
        yield Text.assemble((f"  {printable(name)}: ", "dim"), _cut(printable(str(value))))
    width = max((len(printable(field.name)) for field in sample.fields), default=0)
    for field in sample.fields:
        shape = "x".join(map(str, field.shape)) or "scalar"
        numbers = [] if field.mean is None else [f"{field.low:.4g} to {field.high:.4g}"]
        if field.mean is not None and len(field.shape):
            numbers.append(f"mean {field.mean:.4g}")
        if field.value is not None:
            numbers = [f"{field.value:.6g}"]
        line = (
            f"  {printable(field.name):{width}}  {field.dtype:8} {shape:>10}  {', '.join(numbers)}"
        )
        lost = f"  {field.not_finite} not finite" if field.not_finite else ""
        yield Text.assemble(line, (lost, "red"))
    for image in sample.images:
        yield Text(f"  image {printable(image.name)}: {image.width}x{image.height}")


def _tokens(tokens: TokensView) -> Iterator[Text]:
    counted = f"{tokens.prompt_tokens} + {tokens.response_tokens}"
    yield _fact("tokens", f"{counted} (prompt + response)")
    if tokens.prompt_text is not None and tokens.response_text is not None:
        yield _fact("prompt", _block(tokens.prompt_text, "cyan"))
        yield _fact("response", _response(tokens))
    else:
        yield _fact("prompt", _numbers(tokens.prompt_ids))
        yield _fact("response", _numbers(tokens.response_ids))
    masked = sum(not each for each in tokens.trained)
    if masked:
        yield _fact("masked", f"{masked} tokens of the response")
    lists = (
        ("log-probs", tokens.log_probs),
        ("advantages", tokens.advantages),
        ("values", tokens.values),
        ("kl", tokens.kl),
        ("versions", tokens.versions),
    )
    for name, values in lists:
        if values:
            yield _fact(name, _numbers(values))


def _fact(name: str, value: str | Text, width: int = 10) -> Text:
    return Text.assemble((f"  {name:{width}} ", "dim"), value)


def _block(text: str, style: str) -> Text:
    return Text(
        _cut(printable_lines(text.expandtabs(4))).replace("\n", "\n" + " " * 13), style=style
    )


def _response(tokens: TokensView) -> Text:
    """Return the response, each token in the colour of its probability if that is known."""
    pieces, log_probs = tokens.response_pieces, tokens.log_probs
    if len(pieces) != len(log_probs) or not pieces:
        return _block(tokens.response_text or "", "green")
    shown = Text(style="default not dim")
    for number, (piece, log_prob) in enumerate(zip(pieces, log_probs, strict=True)):
        if len(shown) > _MOST_TEXT:
            return shown.append(f"… ({len(pieces) - number:,} more tokens)")
        text = printable_lines(piece.expandtabs(4)).replace("\n", "\n" + " " * 13)
        style = "reverse red"
        if log_prob is not None:
            styles = ((-0.1, "green"), (-1.0, "yellow"), (-3.0, "magenta"))
            style = next((each for least, each in styles if log_prob >= least), "red")
        shown.append(text, style=style)
    return shown


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}… ({len(text):,} characters)"


def _numbers(values: Sequence[float | None]) -> str:
    shown = [
        "nan" if each is None else str(each) if isinstance(each, int) else f"{each:.4g}"
        for each in values[:_SHOWN_VALUES]
    ]
    rest = len(values) - len(shown)
    return " ".join(shown) + (f" … {rest:,} more" if rest else "")


def _standing(view: GroupView) -> str:
    other = view.status not in ("", "completed") and view.state == "waiting"
    return f"{view.state} {view.status}" if other else view.state


def _holder(lease: LeaseView) -> str:
    return f"{lease.host}-{lease.pid}" if lease.pid else lease.consumer


def _versions(view: GroupView) -> str:
    if view.oldest_version is None:
        return "-"
    newest = view.newest_version
    same = newest is None or newest == view.oldest_version
    return str(view.oldest_version) if same else f"{view.oldest_version}-{newest}"


def _reward(reward: float | None) -> tuple[str, str]:
    if reward is None:
        return "-", ""
    return f"{reward:.4g}", "green" if reward > 0 else "red" if reward < 0 else "yellow"


def _range(rewards: Sequence[float | None]) -> str:
    known = [each for each in rewards if each is not None]
    if len(known) < 2:
        return "-"
    low, high = min(known), max(known)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _pairs(tags: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in tags.items())
