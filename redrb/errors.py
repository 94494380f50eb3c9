"""Every error redrb raises, in one tree.

    RedrbError
    ├── ConfigError (ValueError)        an argument, URL or task setting is wrong
    │   ├── TaskMismatch                the task exists with other settings
    │   ├── UnknownTask                 no such task or table, and none may be created
    │   ├── AdmissionRefused            the task gives no rights to begin groups
    │   └── WrongStep                   a rank asks for another step than rank 0
    ├── RecordError (ValueError)        an item or batch of experience is malformed
    ├── EncodeError (ValueError)        a group cannot be written in the wire format
    ├── DecodeError (ValueError)        bytes are not a valid group or manifest
    ├── StoreError                      Redis answered with an error
    │   ├── StoreUnavailable            Redis was not reached within the retries, or too slow
    │   ├── StoreDenied                 wrong password, or the ACL forbids it
    │   ├── StoreFull                   the task's limit or the server's memory is reached
    │   ├── StoreClosed                 this process has closed the client
    │   └── UnsupportedServer           the server is too old, or not a Redis
    ├── MissingRows (LookupError)       a table has no such rows, or rows lack columns
    ├── StaleRun                        a newer run of a table has begun: this writer is over
    ├── OutcomeUnknown                  a put may be stored, and a repetition could store it twice
    ├── SendFailed                      a sender could not put all its groups
    ├── TaskInUse                       consumers or producers use a task that is to be deleted
    ├── BatchTimeout (TimeoutError)     no full batch in time; nothing was taken
    ├── AdmissionTimeout (TimeoutError) no right to begin groups in time; none was given
    ├── LeaseLost                       another consumer has taken over the lease
    ├── CheckpointFailed                the disk took no checkpoint; the one before is whole
    ├── EngineError                     an inference server cannot be used
    ├── UnknownSession (LookupError)    a gateway has no such session, or it was silent too long
    ├── SessionOver                     a session of a gateway takes no further turns
    └── WeightError
        ├── WeightMismatch (ValueError) names, shapes or dtypes differ from the model's
        ├── WeightTimeout (TimeoutError) no newer version in time
        ├── WeightCorrupt               a version is damaged, or parts of it are gone
        ├── WeightsTorn                 an update in place broke off
        └── PublisherFenced             a newer publisher of this name took over

Every message says what to do next; attributes hold the same facts for programs.
"""

from __future__ import annotations

from collections import abc
from dataclasses import InitVar, dataclass, field

from redrb.words import agreeing, counted


class RedrbError(Exception):
    """The root of every error that redrb raises on purpose.

    Attributes:
        stored: For an error of a put: how many of its groups, from the first, are certainly stored.
        bad_groups: For an error of a put that refuses groups: their indices in the put. The error
            is that of the first one; its notes have the errors of the others.
    """

    stored: int = 0
    bad_groups: tuple[int, ...] = ()


class ConfigError(RedrbError, ValueError):
    """An argument, a URL or a setting is wrong."""


class AdmissionRefused(ConfigError):
    """The task gives no rights to begin groups, because of its settings."""


class TaskMismatch(ConfigError):
    """The task exists in Redis with other settings than the arguments.

    Attributes:
        differences: Setting -> (stored value, argument).
    """

    def __init__(self, task: str, differences: dict[str, tuple[object, object]]) -> None:
        self.task = task
        self.differences = differences
        listed = ", ".join(
            f"{name} is {stored!r}, not {given!r}"
            for name, (stored, given) in sorted(differences.items())
        )
        super().__init__(
            f"task {task!r} exists with other settings: {listed}. "
            "Open it with the stored settings, change them with stream.configure(...) or "
            f"`redrb set {task} NAME=VALUE --namespace ...`, or use another task name."
        )


class UnknownTask(ConfigError):
    """There is no such task or table, and the caller asked not to create it.

    Attributes:
        similar: Existing tasks of the namespace with similar names, the most similar one first.
        elsewhere: Other namespaces with one of this name, as far as they are found.
    """

    def __init__(
        self,
        task: str,
        *,
        namespace: str,
        where: str,
        similar: tuple[str, ...] = (),
        elsewhere: tuple[str, ...] = (),
        kind: str = "task",
    ) -> None:
        self.task = task
        self.namespace = namespace
        self.similar, self.elsewhere = similar, elsewhere
        named = ", ".join(map(repr, elsewhere or similar))
        advice = (
            f"There is one in namespace {named}: give --namespace {elsewhere[0]}."
            if elsewhere
            else f"Tasks with similar names: {named}."
            if similar
            else "Check the name, the namespace and the URL: "
            f"`redrb ls --namespace {namespace}` lists the {kind}s."
        )
        super().__init__(
            f"there is no {kind} {task!r} in namespace {namespace!r} at {where}. {advice}"
        )


class WrongStep(ConfigError):
    """A rank asked for another step than rank 0.

    Attributes:
        step: The step that was asked for.
        next_step: The step of rank 0.
    """

    def __init__(self, *, task: str, step: int, next_step: int, why: str) -> None:
        self.task = task
        self.step = step
        self.next_step = next_step
        super().__init__(f"task {task!r}: no part of step {step}: {why}. Take step {next_step}.")


@dataclass(kw_only=True, eq=False, repr=False)
class RecordError(RedrbError, ValueError):
    """An item or a batch of experience is malformed, or a check refuses it.

    Attributes:
        field: The field at fault, or None if it is the whole record.
        ids: Ids of the groups at fault, if they are from a lease.
        group: Index of the group in the put; of an Experience, the row.
        sample: Index of the sample in the group.
        position: Index of the element in the field.
        problem: The message without what to do, for the log where the group was dropped already.
    """

    problem: str = field(kw_only=False)
    field: str | None = None
    ids: tuple[int, ...] = ()
    group: int | None = None
    sample: int | None = None
    position: int | None = None
    advice: InitVar[str] = ""

    def __post_init__(self, advice: str) -> None:
        super().__init__(f"{self.problem}: {advice}" if advice else self.problem)


class EncodeError(RedrbError, ValueError):
    """A group cannot be written in the wire format, or is too large for it or for the server.

    Nothing was sent.
    """


class DecodeError(RedrbError, ValueError):
    """Bytes are not a valid group or manifest of the wire format."""


class StoreError(RedrbError):
    """Redis could not do the request."""


class StoreUnavailable(StoreError):
    """Redis was not reached within the configured retries, or did not answer in time.

    Attributes:
        where: Host and port, or socket path; never a password.
        uncertain: True if an attempt may have taken effect before the connection broke.
    """

    def __init__(self, message: str, *, where: str, uncertain: bool = False) -> None:
        self.where = where
        self.uncertain = uncertain
        super().__init__(message)


class StoreDenied(StoreError):
    """The server refused the password, the user or a command of this user."""


@dataclass(kw_only=True, eq=False, repr=False)
class StoreFull(StoreError):
    """The task's limit or the server's memory is reached; the group was not stored.

    Attributes:
        task: Name of the task; "" where the server has no memory for something else.
        stored: Number of groups of the put that were stored before.
        reason: "limit", "max_waiting", "max_bytes", "most_parts" for too many groups of which parts
            are missing, or "memory" for the server's memory limit.
    """

    message: InitVar[str] = field(kw_only=False)
    task: str = ""
    namespace: str = ""
    stored: int = 0
    reason: str = "limit"

    def __post_init__(self, message: str) -> None:
        super().__init__(message)


class StoreClosed(StoreError):
    """The client was closed by this process. Nothing was sent; connect again."""


class UnsupportedServer(StoreError):
    """The server is older than 7.0, or does not speak Redis' protocol."""


class MissingRows(RedrbError, LookupError):
    """A table has no rows of these keys, or its rows lack columns.

    Attributes:
        keys: Keys of the rows.
        columns: The columns that they lack; empty if there are no such rows.
    """

    def __init__(self, table: str, keys: tuple[str, ...], columns: tuple[str, ...] = ()) -> None:
        self.table, self.keys, self.columns = table, keys, columns
        listed = ", ".join(map(repr, keys[:3])) + (f" and {len(keys) - 3} more" * (len(keys) > 3))
        names = ", ".join(map(repr, columns))
        super().__init__(
            f"table {table!r}: row {listed} has no column {names}: it was not put yet, or has "
            "another name."
            if columns
            else f"table {table!r} has no row {listed}: it was never put, or was cleared."
        )


class StaleRun(RedrbError):
    """A newer run of a table has begun, so what this writer sent was refused.

    Attributes:
        run: The run to which this writer belongs.
        newest: The run of now.
    """

    def __init__(self, table: str, *, run: int, newest: int) -> None:
        self.run, self.newest = run, newest
        super().__init__(
            f"table {table!r}: run {newest} has begun, and this process opened the table in run "
            f"{run}. It is left over from a job that was started again: nothing was changed. End "
            "it; a process of the new job opens the table anew."
        )


class OutcomeUnknown(RedrbError):
    """A put was interrupted for so long that its repetition cannot be recognized any more.

    Attributes:
        groups: Number of groups that may be stored; `stored` counts those before them.
    """

    def __init__(self, message: str, *, groups: int) -> None:
        self.groups = groups
        super().__init__(message)


class SendFailed(RedrbError):
    """A sender could not put its groups; the cause is the first error that a stream raised.

    Attributes:
        dropped: Groups that were given up.
        unsent: Groups that the sender still holds and tries to put; after `close` they are given up
            too, and groups of the last request may have been stored.
    """

    def __init__(self, message: str, *, dropped: int = 0, unsent: int = 0) -> None:
        self.dropped = dropped
        self.unsent = unsent
        super().__init__(message)


_FATES = {
    "unmatched": "do not match the query",
    "other_status": "have another status",
    "leased_here": "are leased by this consumer",
    "leased_elsewhere": "are leased by other consumers",
    "acked": "are acknowledged",
    "expired": "expired as too stale",
    "filtered": "were filtered at put",
    "evicted": "were evicted",
    "dead": "are in the dead letters",
}


def _fate(fates: abc.Mapping[str, int], name: str, counter: str = "") -> str:
    """Return what became of so many groups, such as "1 is acknowledged"."""
    number, (verb, _, rest) = fates[counter or name], _FATES[name].partition(" ")
    return f"{number} {verb if verb == 'expired' else agreeing(number, verb)} {rest}"


_ENDS = {
    "filtered": (
        "Filters drop most groups: check the filters and the rewards; the logs of the makers have "
        "the reasons."
    ),
    "expired": "",  # by the versions that are known
    "evicted": "Most groups are evicted: raise limit, or take faster.",
    "dead": "Most groups are dead letters: ",  # and where the reasons are
}
"""Advice where this was the fate of at least half of the groups put."""

_STORED = ("unmatched", "other_status", "leased_here", "leased_elsewhere")


class TaskInUse(RedrbError):
    """A task was not deleted, because consumers or producers use it."""


@dataclass(kw_only=True, eq=False, repr=False)
class BatchTimeout(RedrbError, TimeoutError):
    """No full batch came in time; nothing was taken.

    Attributes:
        wanted: Size of the batch, in groups.
        available: Groups that waited at the last check.
        blocked: Makers that wait for room at the last check.
        expired: Groups that became too stale meanwhile.
        others: Groups that waited with another status, or did not match, at the last check.
        unfinished: Whether groups were not looked at, because the time was up while the consumer
            group joined the task, or while groups expired or were sorted. The next take goes on.
        missing_ranks: Of a take of ranks: the ranks that did not ask for the step.
        fates: Where all groups of the task were at the last check, as the consumer group sees it:
            `put` is the sum of `available`, `unmatched` (they do not match the query),
            `other_status`, `leased_here` (by the consumer of this take), `leased_elsewhere`,
            `acked`, `expired`, `filtered`, `evicted` and `dead`;
            `put_ever`, `filtered_ever` and `expired_ever` count the groups of all producers, also
            those before the consumer group joined, of the latter those that were too stale on
            arrival. If makers wait for the right to begin groups, `makers_waiting`
            is their number, and `rights_known` 0 if the task does not know how many it may give.
            `rights_held`: rights that makers hold. `parts_waiting`: groups of which parts are
            missing. `stale_version`: weight version of the last
            group that was too stale on arrival, and `version` the newest one.
            Empty if ranks are missing, or several tasks of a mixture had too few groups.
        similar: If nobody ever put into this task: tasks of the namespace with groups, the most
            similar name first, as far as a bounded search has found them.
        table: Of a claim: the table, whose rows are counted then, in place of groups; "": none.
    """

    task: str
    namespace: str
    wanted: int
    available: int
    waited_s: float
    blocked: int = 0
    expired: int = 0
    others: int = 0
    unfinished: bool = False
    missing_ranks: tuple[int, ...] = ()
    fates: abc.Mapping[str, int] = field(default_factory=dict)
    similar: tuple[str, ...] = ()
    table: str = ""

    def __post_init__(self) -> None:
        if self.table:
            rows, task = counted(self.wanted, "row"), self.task.partition(":")[2]
            super().__init__(
                f"table {self.table!r} of namespace {self.namespace!r}: {self.available} of {rows} "
                f"that task {task!r} can claim {agreeing(self.wanted, 'were')} there after "
                f"{self.waited_s:.1f} s. None was claimed. {self._advice_on_rows()}"
            )
            return
        more = (
            f" {self.others} more with another status, or that the query does not match."
            if self.others and not self.fates
            else ""
        )
        super().__init__(
            f"task {self.task!r} of namespace {self.namespace!r}: {self.available} of "
            f"{counted(self.wanted, 'group', 'were')} waiting after {self.waited_s:.1f} s. "
            f"None was taken.{self._counted()} {self._advice()}{more}"
        )

    def _counted(self) -> str:
        """Return a sentence that counts the groups that were put and could not be taken."""
        fates = self.fates
        if fates.get("put_ever") and not fates["put"]:
            lost = [
                _fate(fates, name, f"{name}_ever")
                for name in ("filtered", "expired")
                if fates.get(f"{name}_ever")
            ]
            which = f", of which {' and '.join(lost)}" if lost else ""
            return (
                " No group was put since this consumer group joined; "
                f"{fates['put_ever']} {agreeing(fates['put_ever'], 'were')} put before{which}."
            )
        found = [_fate(fates, name) for name in _FATES if fates.get(name)]
        if not found:
            return ""
        return f" Of {counted(fates['put'], 'group')} put: {', '.join(found)}."

    def _advice(self) -> str:
        """Return what to do, by the cause that explains the most."""
        fates = self.fates
        missing = self.wanted - self.available
        if self.unfinished:
            return (
                "The time was up while the consumer group joined the task, or while groups expired "
                "or were sorted: take again, which goes on from there, or wait longer."
            )
        if self.missing_ranks:
            listed = ", ".join(map(str, self.missing_ranks))
            return f"Ranks {listed} did not ask for the step: check that they run, or wait longer."
        if missing <= 0:
            return "Takes that came before wait for these groups: wait longer, or take fewer."
        if fates.get("parts_waiting", 0) >= missing:
            parts = counted(fates["parts_waiting"], "group", "wait")
            return (
                f"{parts} for parts that nobody has put yet (put_part): check the makers that put "
                f"them ({self._look()})."
            )
        if fates.get("makers_waiting") and not fates["put_ever"]:
            return self._advice_on_rights()
        if fates.get("rights_held") and not fates["put_ever"]:
            return (
                f"Makers hold {counted(fates['rights_held'], 'right')} to begin groups, and have "
                "put nothing yet: they generate their first groups, or hang. Wait longer, or look "
                f"at them ({self._look()})."
            )
        if fates and not fates["put_ever"]:
            listed = ", ".join(map(repr, self.similar))
            return (
                "Nobody has ever put into this task: check its name and its namespace, and that "
                "makers run."
                + (f" Tasks of this namespace with groups: {listed}." if listed else "")
            )
        if self.expired:
            expired = counted(self.expired, "group")
            return f"{expired} became too stale meanwhile. {self._advice_on_age()}"
        if fates.get("leased_here", 0) >= missing:
            return "Acknowledge or release the leases of this consumer first, or ask for fewer."
        if fates.get("makers_waiting"):
            return self._advice_on_rights()
        if self.blocked:
            full = f"{counted(self.blocked, 'maker', 'wait')} for room: the task is full"
            if fates and not (self.available or any(fates.get(name) for name in _STORED)):
                return (
                    f"{full} of groups that another consumer group has not acknowledged: start "
                    "what takes from it, or drop_group() one that nobody needs "
                    f"(`redrb stats {self.task} --namespace {self.namespace}`)."
                )
            return f"{full}. Acknowledge leased groups, ask for fewer, or raise limit / max_bytes."
        if fates.get("unmatched", 0) >= missing:
            return "Change the query (where=), or ask for fewer."
        if fates.get("other_status", 0) >= missing:
            return "Take with their status (status=), move them, or ask for fewer."
        if fates.get("leased_elsewhere", 0) >= missing:
            return (
                "Wait until other consumers release them, or makers have put more: who holds them "
                f"is in {self._look()}."
            )
        if 0 < fates.get("put_ever", 0) <= 2 * fates["filtered_ever"]:
            return _ENDS["filtered"]
        for name, advice in _ENDS.items():
            if 0 < fates.get("put", 0) <= 2 * fates.get(name, 0):
                if name == "dead":
                    return f"{advice}{self._letters()} has the reasons."
                return advice or f"Most groups become too stale. {self._advice_on_age()}"
        if fates.get("put_ever") and not fates["put"]:
            return (
                "A consumer group gets what is put after it has joined: let it join before makers "
                f"begin (join_group), or check that they are alive ({self._look()})."
            )
        return f"Check that makers are alive ({self._look()}), or ask for fewer."

    def _letters(self) -> str:
        return f"`redrb dead ls {self.task} --namespace {self.namespace}`"

    def _look(self) -> str:
        return f"`redrb top --namespace {self.namespace}`"

    def _advice_on_age(self) -> str:
        advice = (
            "`redrb doctor` says whether makers cannot load the newest weights; if they can, raise "
            "max_staleness, publish weights less often, or make groups faster."
        )
        if "stale_version" not in self.fates:
            return advice
        return (
            f"The last group that was too stale on arrival has version "
            f"{self.fates['stale_version']}, and the newest version is {self.fates['version']}: "
            f"do makers load new weights before they begin groups? {advice}"
        )

    def _advice_on_rows(self) -> str:
        missing, fates = self.wanted - self.available, self.fates
        if fates.get("leased_here", 0) >= missing:
            return "Acknowledge or release the claims of this process first, or ask for fewer."
        if fates.get("leased_elsewhere", 0) >= missing:
            return "Other processes claim enough rows: wait until they release them."
        rows, acked = counted(fates.get("put", 0), "row"), fates.get("acked", 0)
        found = (
            f"Of {rows} with all columns that the task needs, "
            f"{acked} {agreeing(acked, 'are')} acknowledged"
        )
        if cleared := fates.get("evicted"):
            found += (
                f", {cleared} {agreeing(cleared, 'were')} cleared before this task acknowledged "
                f"{'it' if cleared == 1 else 'them'}, or in a group with such a row"
            )
        if fates.get("dead"):
            found += f", and {_fate(fates, 'dead')} ({self._letters()} has the reasons)"
        if 0 < fates.get("put", 0) <= 2 * fates.get("evicted", 0):
            return f"{found}: clear rows when every task has acknowledged them."
        return f"{found}: check that the processes run that put these columns, or ask for fewer."

    def _advice_on_rights(self) -> str:
        makers = counted(self.fates["makers_waiting"], "maker", "wait")
        waiting = f"{makers} for the right to begin groups: "
        if self.fates["rights_known"]:
            return (
                waiting + "as many are begun and not yet trained as max_staleness allows. "
                "Acknowledge and publish, ask for fewer groups, or raise max_staleness."
            )
        return (
            waiting + "nobody has said how many groups are trained for each weight version. Call "
            "stream.expect(groups) in the trainer, or open the stream with groups_per_version=."
        )


@dataclass(kw_only=True, eq=False, repr=False)
class AdmissionTimeout(RedrbError, TimeoutError):
    """No right to begin so many groups came in time; none was given.

    Attributes:
        wanted: Rights that were asked for, at least.
        held: Rights that makers hold.
        stored: Groups that wait or are leased.
        trained: Groups trained beyond those that count for the current weight version.
        most: Most groups that may be begun and not yet trained; 0: no process has given
            `groups_per_version` yet.
        version: Weight version that the task knows; None: none.
        waiting: Requests that wait for rights, this one included.
        oldest_s: Seconds for which the oldest right is held; 0.0 if none is.
        oldest_maker: The maker that holds it; "" if none does.
    """

    task: str
    wanted: int
    waited_s: float
    held: int = 0
    stored: int = 0
    trained: int = 0
    most: int = 0
    version: int | None = None
    waiting: int = 0
    oldest_s: float = 0.0
    oldest_maker: str = ""

    def __post_init__(self) -> None:
        super().__init__(
            f"task {self.task!r}: no right to begin {counted(self.wanted, 'group')} after "
            f"{self.waited_s:.1f} s. {self._cause()}"
        )

    def _cause(self) -> str:
        """Return what is in the way, and what to do."""
        if not self.most:
            return (
                "No process has given groups_per_version yet: start the trainer, or open the "
                "stream with groups_per_version=, the groups that it trains for each version."
            )
        held = f"{counted(self.held, 'right', 'are')} held"
        if self.held:
            held += f" (the oldest for {self.oldest_s:.0f} s, by maker {self.oldest_maker})"
        since = "" if self.version is None else f" since version {self.version}"
        return (
            f"At most {counted(self.most, 'group')} may be begun and not yet trained: {held}, "
            f"{counted(self.stored, 'group', 'are')} stored, and "
            f"{counted(max(self.trained, 0), 'group', 'were')} trained{since}. Check that "
            "trainers take, acknowledge and publish, and that makers put what they began; or raise "
            "max_staleness."
        )


class LeaseLost(RedrbError):
    """The lease was taken over because this consumer's heartbeat was silent, or it has ended.

    The message says for how many seconds it was silent. A call that holds Python's lock (GIL) for
    longer than `lease_ms` silences it.

    Another consumer trains its groups: discard the batch and its gradients, and take again.

    It is also raised where an earlier call, which was cut off, was to end groups in another way:
    they have ended in that way. And in a forked process, for a lease of its parent, which is
    unchanged.

    Attributes:
        ids: Ids of the lost groups; groups that this lease had ended before are not among them.
    """

    def __init__(self, *, task: str, ids: tuple[int, ...], why: str) -> None:
        self.task = task
        self.ids = ids
        self.why = why
        super().__init__(f"task {task!r}: the lease on {counted(len(ids), 'group')} is lost: {why}")


class CheckpointFailed(RedrbError):
    """A checkpoint could not be written: the disk is full, read-only or failing.

    The checkpoint before is whole. `redrb run` starts the trainer again, which goes on from it.
    """


class EngineError(RedrbError):
    """An inference server was not reached, refused a request, or answered something else.

    Attributes:
        where: Scheme, host and port of the server.
        status: HTTP status of its answer; None: it did not answer, or broke off.
    """

    def __init__(self, message: str, *, where: str, status: int | None = None) -> None:
        self.where = where
        self.status = status
        super().__init__(message)

    @property
    def is_outage(self) -> bool:
        """Whether the server was away, starting, overloaded or broken: it may answer later."""
        return self.status is None or self.status >= 500 or self.status in (408, 425, 429)

    @property
    def is_refusal(self) -> bool:
        """Whether the server refused this request, such as a prompt that is too long."""
        return self.status in (400, 413, 422)


class UnknownSession(RedrbError, LookupError):
    """A gateway has no session of this id and secret: it was dropped, or was silent for too long.

    It says the same of a wrong secret, of an id that never was, and of a task that was deleted.
    """

    def __init__(self) -> None:
        super().__init__(
            "there is no such session: the URL is wrong, or the session was dropped, or was silent "
            "for longer than --session-timeout. Begin another one."
        )


class SessionOver(RedrbError):
    """A session takes no further turns; those that it has are unchanged.

    Attributes:
        reason: "over": it has its reward; "full": it has as many turns, bytes or samples as a
            session of its group may have.
    """

    def __init__(self, session: str, reason: str) -> None:
        self.session, self.reason = session, reason
        super().__init__(
            f"session {session} has its reward already: begin another one."
            if reason == "over"
            else f"session {session} has as many turns or bytes as a session may have, or its "
            "share of the group's samples: send its reward, and begin another one."
        )


class WeightError(RedrbError):
    """Weights could not be published or fetched."""


class WeightMismatch(WeightError, ValueError):
    """Published names, shapes or dtypes do not fit the model. Nothing was loaded."""


class WeightTimeout(WeightError, TimeoutError):
    """No newer version was published in time.

    Attributes:
        newer_than: The wait was for a version newer than this.
        newest: The newest published version, None if there is none.
    """

    def __init__(self, *, name: str, newer_than: int, newest: int | None, waited_s: float) -> None:
        self.name = name
        self.newer_than = newer_than
        self.newest = newest
        self.waited_s = waited_s
        state = "none is published yet" if newest is None else f"the newest is {newest}"
        super().__init__(
            f"weights {name!r}: no version newer than {newer_than} within {waited_s:.1f} s; "
            f"{state}. Check that a trainer runs and publishes under this name and namespace "
            "(`redrb weights ls` lists the names), or wait longer."
        )


class WeightCorrupt(WeightError):
    """A version in Redis is damaged, or parts of it are gone. Nothing was loaded.

    The publisher was asked for a full version, which its next publish is.

    Attributes:
        version: The damaged version; 0: not known.
        key: The damaged key in Redis; "": not known.
    """

    def __init__(self, message: str, *, version: int = 0, key: str = "") -> None:
        self.version = version
        self.key = key
        super().__init__(message)


class WeightsTorn(WeightError):
    """An update in place broke off: the model holds parts of two versions.

    Load again before the model is used; until then the subscriber's version is None.
    """


class PublisherFenced(WeightError):
    """A newer publisher of this name has taken over; this publisher may not publish any more."""
