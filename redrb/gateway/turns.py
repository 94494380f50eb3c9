"""`Turns`: finds what a request goes on from, samples its reply, and stores both as a turn."""

from __future__ import annotations

import json
from typing import Literal

from redrb.errors import SessionOver
from redrb.gateway.chat import ChatServer
from redrb.gateway.limits import Threads
from redrb.gateway.messages import Ask, Edited, beginnings, extended, histories, text_digest
from redrb.gateway.replies import Reply
from redrb.gateway.session import Session, Turn
from redrb.gateway.store import SessionStore

OnEdited = Literal["branch", "error"]


class Turns:
    """Makes the turns of sessions.

    Args:
        calls: Threads for calls of the store.
        parsers: Threads in which histories are looked for.
        on_edited: What becomes of a history that does not go on from the newest turn.
    """

    def __init__(
        self,
        store: SessionStore,
        chat: ChatServer,
        calls: Threads,
        parsers: Threads,
        on_edited: OnEdited,
    ) -> None:
        self._store, self._chat, self._calls, self._parsers = store, chat, calls, parsers
        self._may_branch = on_edited == "branch"

    async def sample(self, session: Session, ask: Ask) -> Turn:
        """Sample a turn and store it; return the one that was stored first for this request."""
        if session.over:
            raise SessionOver(session.id, "over")
        parent, same, asked = await self._parsers.run(_longest, session, ask)
        given = None if parent < 0 else await self._between(session.turns[parent], ask, same)
        parent = -1 if given is None else parent
        if parent in session.parents and not self._may_branch:
            raise Edited  # as the store would say when it is sampled
        given = await self._chat.prompt(ask) if given is None else given
        tokens = [*session.tokens(parent), *given]
        done = await self._chat.sample(ask, tokens)
        found = await self._chat.reply(ask, tokens, done)
        whole = found.pop("whole")
        message = Reply(ask, found).message
        turn = Turn(
            parent=parent,
            request=ask.request,
            after=text_digest(ask.prompt + whole) if ask.prompt else extended(asked, message),
            given=given,
            sampled=done,
            reply=json.dumps(found).encode(),
        )
        may_branch = self._may_branch
        return await self._calls.run(self._store.append, session, turn, may_branch=may_branch)

    async def _between(self, turn: Turn, ask: Ask, same: int) -> list[int] | None:
        """Return the tokens between a turn and the reply to a request that goes on from it.

        None: the template writes the history in another way from here on.
        """
        if ask.prompt:
            rest = ask.prompt.encode()[same:].decode()
            return await self._chat.text(rest) if rest else []
        return await self._chat.continuation(ask, same - 1, turn.sampled.tokens[-1])


def _longest(session: Session, ask: Ask) -> tuple[int, int, bytes]:
    """Return the turn after which the most is the same, or -1; and how many messages, or bytes.

    Of several, the newest one that no turn goes on from. Then the digest of the whole history.
    """
    if ask.prompt:
        places = beginnings(ask.prompt.encode(), (turn.after for turn in session.turns))
        whole = text_digest(ask.prompt)
    else:
        chain = histories(ask)
        places, whole = {digest: at for at, digest in enumerate(chain)}, chain[-1]
    parents, turns = session.parents, enumerate(session.turns)
    found = [(places.get(turn.after, 0), index not in parents, index) for index, turn in turns]
    same, _, index = max((each for each in found if each[0]), default=(0, False, -1))
    return index, same, whole
