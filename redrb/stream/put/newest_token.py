"""The version of a group's newest token, for tasks with `max_token_staleness`."""

from __future__ import annotations

from collections.abc import Sequence

from redrb.experience import BufferItem


def newest_version(group: Sequence[BufferItem], default: int | None = None) -> int | None:
    """Return the version of the newest token of the member where that is oldest.

    A group expires by its tokens when one member's tokens are all too stale. Only tokens that the
    action mask counts are looked at; a member without any never expires by them.
    """
    newest = [_newest_token(item, default) for item in group]
    known = [version for version in newest if version is not None]
    return min(known) if known else None


def _newest_token(item: BufferItem, default: int | None) -> int | None:
    versions, mask = item.token_versions, item.action_mask
    if versions is None or not versions.numel():
        return item.policy_version if item.policy_version is not None else default
    counted = versions if mask is None else versions[mask != 0]
    known = counted[counted >= 0]
    return int(known.max()) if known.numel() else None
