"""`ExperienceStream`: what users hold of a task."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from torch import Tensor

from redrb.codec import (
    EncodedGroup,
    decode_items,
    encode_experience,
    encode_groups,
    parse_group,
)
from redrb.connection import Client
from redrb.errors import ConfigError, DecodeError, RecordError, StoreError
from redrb.experience import BufferItem, Experience
from redrb.experience.padding import ACTION_FIELDS, SEQUENCE_FIELDS, check_aligned
from redrb.experience.records import named_tensors
from redrb.keys import TaskKeys, check_name
from redrb.orders import Fifo, Order, order_named
from redrb.stream.ahead import leases
from redrb.stream.consumer import Consumer
from redrb.stream.lease import Lease
from redrb.stream.ledger import StreamStats
from redrb.stream.producer import OnFull, Producer
from redrb.stream.store import WIRE_FORMAT, TaskStore
from redrb.stream.writer import Writer

ALIGNED_FIELDS = (*SEQUENCE_FIELDS, *ACTION_FIELDS)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A group that is trained no more, and why.

    Attributes:
        id: Id that it had in the task.
        group: Consumer group that gave it up.
        reason: Why: what `reject` was told, or that deliveries failed.
        failed_deliveries: Leases of it that ended without acknowledgement.
        items: Its samples; None when they cannot be decoded.
    """

    id: int
    group: str
    reason: str
    failed_deliveries: int
    items: list[BufferItem] | None


class ExperienceStream:
    """The stream of one task: makers put groups of samples in, trainers take full batches out.

    Put is exactly once; delivery is at least once, until acknowledged. Any number of processes and
    threads may share a task; one object may be shared by threads. Settings that belong to the task
    (`order`, `limit`, `max_bytes`, `max_deliveries`) are remembered in Redis: who leaves one out
    takes what is there, who gives another one gets `TaskMismatch`.

    Example:
        >>> stream = ExperienceStream(client, "math", limit=4096)
        >>> stream.put(items, policy_version=7)
        >>> with stream.take(32, timeout=30) as lease:
        ...     train(lease.batch())
    """

    def __init__(
        self,
        client: Client,
        task: str,
        *,
        namespace: str = "default",
        group: str = "default",
        order: str | Order | None = None,
        limit: int | None = None,
        max_bytes: int | None = None,
        on_full: OnFull = "block",
        max_deliveries: int | None = None,
        lease_ms: int = 30_000,
        narrow_floats: Literal["float16", "bfloat16"] | None = None,
    ) -> None:
        """Open a task, and create it when it is new.

        Args:
            client: What `redrb.connect` returned.
            task: Name of the task.
            namespace: Keeps experiments on one server apart.
            group: Consumer group of `take`: each group sees every entry.
            order: Which groups are taken first; a setting of the task, default "fifo".
            limit: Most groups waiting and leased; a setting of the task, default 0: no limit.
            max_bytes: Most bytes waiting and leased; a setting of the task, default 0: no limit.
            on_full: What `put` does at the limit or at the server's memory limit: "block",
                "drop_oldest" (of those not leased; counted as evicted) or "error" (StoreFull).
            max_deliveries: Deliveries without acknowledgement (a consumer that died, or an
                exception in its block) after which a group goes to the dead-letter stream; a
                setting of the task, default 5.
            lease_ms: Silence of this consumer's heartbeat after which others take its leases over.
            narrow_floats: Store float32 and float64 as "float16" or "bfloat16": half the bytes,
                and not lossless.

        Raises:
            ConfigError: A bad name or setting.
            TaskMismatch: The task exists with other settings.
            StoreUnavailable: Redis stayed away.
        """
        if not isinstance(client, Client):
            raise ConfigError(
                f"the client is a {type(client).__name__}: pass what redrb.connect(url) returns."
            )
        if on_full not in ("block", "drop_oldest", "error"):
            raise ConfigError(f'on_full={on_full!r}: use "block", "drop_oldest" or "error".')
        if lease_ms < 100:
            raise ConfigError(f"lease_ms={lease_ms}: a heartbeat needs at least 100 ms.")
        self.task = task
        self.namespace = namespace
        self.group = check_name("consumer group", group)
        self._narrow_floats = narrow_floats
        self._asked = _settings(order, limit, max_bytes, max_deliveries)
        self._store = TaskStore(client, task, TaskKeys.of(namespace, task))
        self._open()
        self._producer = Producer(self._store, on_full, self._open)
        self._consumer = Consumer(self._store, group, lease_ms, self._open)

    def __repr__(self) -> str:
        where = self._store.client.where
        return f"<redrb.ExperienceStream {self.namespace}:{self.task} at {where}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the number of groups that wait for this consumer group."""
        return self.stats().ledger.waiting

    def put(
        self,
        items: BufferItem | Sequence[BufferItem] | Experience,
        *,
        policy_version: int | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Store experience, exactly once however often Redis has to be asked.

        Args:
            items: A list of samples is one group, one sample a group of its own, and an Experience
                one group a row. An empty list is nothing.
            policy_version: Weight version that made them, where they do not say it themselves.
            timeout: Seconds to wait for room, with `on_full="block"`; None waits for ever, and
                logs every half minute what it waits for.

        Returns:
            Ids of the groups, in order.

        Raises:
            RecordError, EncodeError: The experience is malformed; nothing was stored.
            StoreFull: There was no room in time.
            StoreUnavailable: Redis stayed away; `uncertain` says whether it may have landed.
        """
        return self._producer.put(self._encode(items, policy_version), timeout)

    def writer(self) -> Writer:
        """Return a writer, for makers that put again and again.

        Each put is on its way while the next one is made, and as safe as `put`.

        Example:
            >>> with stream.writer() as writer:
            ...     for prompts in loader:
            ...         writer.put(make_experience(prompts), policy_version=7)
        """
        return Writer(self._producer, self._encode)

    def put_many(
        self,
        groups: Sequence[Sequence[BufferItem]],
        *,
        policy_version: int | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Store several groups with few round trips; each group is visible whole or not at all.

        Args, returns and errors are those of `put`. Of a put that failed midway, the error's
        `stored` says how many of the groups, from the first, are in; `StoreUnavailable.uncertain`
        speaks of the up to 32 after these. An empty group is an EncodeError.
        """
        return self._producer.put(self._encode_many(groups, policy_version), timeout)

    def take(
        self,
        count: int,
        *,
        timeout: float | None = None,
        at_least: int | None = None,
        ack: Lease | None = None,
    ) -> Lease:
        """Lease exactly `count` groups in this task's order, or none.

        Delivery is at least once: what is neither acknowledged nor released goes back when this
        consumer's heartbeat stops. Takes that wait are served in the order of their arrival.

        Args:
            count: Groups in the batch, >= 1.
            timeout: Seconds to wait for a full batch; 0 only looks; None waits for ever, and logs
                every half minute what is missing.
            at_least: Fewest groups that are welcome when the time is up, at the end of data;
                default `count`.
            ack: The lease before this one: it is acknowledged first, in the same round trip, also
                when the take itself times out.

        Returns:
            A lease; `lease.batch()` pads its samples to one batch.

        Raises:
            BatchTimeout: Fewer groups came in time; none was taken.
            LeaseLost: `ack` is another consumer's by now; nothing was taken.
            ConfigError: `count` exceeds the task's limit, so it could never be full.
            StoreUnavailable: Redis stayed away.
        """
        return self._consumer.take(count, _checked_least(count, at_least), timeout, ack)

    def leases(
        self, count: int, *, timeout: float | None = None, at_least: int | None = None
    ) -> Generator[Lease]:
        """Take batch after batch, the next one on its way while this one is trained on.

        A lease is acknowledged when the loop comes back for the next, unless its user has ended it.
        What the loop did not come back for, after `break` or an exception, is released unharmed:
        call `lease.ack()` before a `break`, or use `with lease:` to count failures. It holds up to
        two batches at a time, so the next one may be a step staler than with `take`.

        Args:
            count, timeout, at_least: Of each take.

        Raises:
            As `take` does. LeaseLost may speak of the batch before the last one.

        Example:
            >>> for lease in stream.leases(32, timeout=600):
            ...     train(lease.batch())
        """
        least = _checked_least(count, at_least)
        return leases(self._consumer, count, least, timeout)

    def stats(self) -> StreamStats:
        """Return counters and ledger from one consistent look."""
        return StreamStats.of(self._store.stats(self.group))

    def dead_letters(self, count: int = 100) -> list[DeadLetter]:
        """Return the newest `count` groups of the dead-letter stream, newest first."""
        return [_dead_letter(fields) for _, fields in self._store.dead_letters(count)]

    def join_group(self) -> None:
        """Register this consumer group now instead of at its first take.

        From then on nothing is deleted before this group is done with it; what is stored at that
        moment it sees too.
        """
        if not self._store.join(self.group):
            self._open()
            self._store.join(self.group)

    def drop_group(self) -> int:
        """Remove this consumer group, with its leases and its ledger.

        Returns:
            Groups that were deleted because no other consumer group needs them.
        """
        return self._store.drop_group(self.group)

    def clear(self) -> int:
        """Delete the task: all its groups, leases, dead letters, ledger and settings.

        Whoever goes on using it starts an empty one, with the settings he gave.

        Returns:
            Groups that were stored.
        """
        return self._store.clear()

    def close(self) -> None:
        """Stop the heartbeat and give back what is still leased. The client stays open."""
        self._consumer.close()
        self._producer.close()

    def _encode(
        self, items: BufferItem | Sequence[BufferItem] | Experience, policy_version: int | None
    ) -> Sequence[EncodedGroup]:
        """Check and encode what `put` was given."""
        if isinstance(items, Experience):
            check_aligned({name: row.shape[1:] for name, row in named_tensors(items).items()})
            return encode_experience(
                items, policy_version=policy_version, narrow_floats=self._narrow_floats
            )
        group = [items] if isinstance(items, BufferItem) else items
        return self._encode_many([group] if len(group) else [], policy_version)

    def _encode_many(
        self, groups: Sequence[Sequence[BufferItem]], policy_version: int | None
    ) -> Sequence[EncodedGroup]:
        for index, group in enumerate(groups):
            for item in group:
                _check_item(item, index)
        return encode_groups(
            groups, policy_version=policy_version, narrow_floats=self._narrow_floats
        )

    def _open(self) -> None:
        stored = self._store.open({"format": str(WIRE_FORMAT), **self._asked})
        order_named(stored["order"] or Fifo().name)


def _checked_least(count: int, at_least: int | None) -> int:
    least = count if at_least is None else at_least
    if count < 1 or not 1 <= least <= count:
        raise ConfigError(f"take({count}, at_least={least}): 1 <= at_least <= count is needed.")
    return least


def _check_item(item: object, group: int) -> None:
    """Refuse what is no sample, or one whose fields do not fit each other."""
    if not isinstance(item, BufferItem):
        raise RecordError(
            f"group {group} holds a {type(item).__name__}: a group is a list of redrb.BufferItem, "
            "and put_many takes a list of such lists."
        )
    shapes = {
        name: tensor.shape
        for name in ALIGNED_FIELDS
        if isinstance(tensor := getattr(item, name), Tensor)
    }
    check_aligned(shapes, where=f" in group {group}")


def _settings(
    order: str | Order | None,
    limit: int | None,
    max_bytes: int | None,
    max_deliveries: int | None,
) -> dict[str, str]:
    """Return the settings that were given, checked, as Redis keeps them."""
    for name, value, least in (
        ("limit", limit, 0),
        ("max_bytes", max_bytes, 0),
        ("max_deliveries", max_deliveries, 1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{name}={value}: it must be at least {least}.")
    given = {"limit": limit, "max_bytes": max_bytes, "max_deliveries": max_deliveries}
    settings = {name: str(value) for name, value in given.items() if value is not None}
    if order is not None:
        settings["order"] = (order_named(order) if isinstance(order, str) else order).name
    return settings


def _dead_letter(fields: dict[bytes, bytes]) -> DeadLetter:
    try:
        items = decode_items(parse_group(fields[b"g"])) if b"g" in fields else None
    except DecodeError:
        items = None
    try:
        return DeadLetter(
            id=int(fields[b"seq"]),
            group=fields[b"group"].decode(),
            reason=fields[b"reason"].decode(errors="replace"),
            failed_deliveries=int(fields[b"failed_deliveries"]),
            items=items,
        )
    except (KeyError, ValueError) as error:
        raise StoreError(
            f"the dead-letter stream holds an entry that is not ours: {error}"
        ) from error
