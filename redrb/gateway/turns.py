"""Turns: what a request goes on from, and what is sampled for it."""

from __future__ import annotations

import json
from typing import NamedTuple

from redrb.errors import SessionOver
from redrb.gateway.chat import ChatServer
from redrb.gateway.messages import Ask, Edited, beginnings, extended, histories, text_digest
from redrb.gateway.replies import Reply
from redrb.gateway.session import Session, Turn


class Place(NamedTuple):
    """What a request goes on from.

    Attributes:
        parent: The turn after which the most is the same; -1: none.
        same: How many messages, or bytes, are the same.
        asked: Digest of the whole history.
    """

    parent: int
    same: int
    asked: bytes


def place_of(session: Session, ask: Ask) -> Place:
    """Return the place of a request; of several turns the newest one that no turn goes on from.

    Raises:
        SessionOver: The session takes no turn.
    """
    if session.over:
        raise SessionOver(session.id, "over")
    if ask.prompt:
        places = beginnings(ask.prompt.encode(), (turn.after for turn in session.turns))
        asked = text_digest(ask.prompt)
    else:
        chain = histories(ask)
        places, asked = {digest: at for at, digest in enumerate(chain)}, chain[-1]
    parents, turns = session.parents, enumerate(session.turns)
    found = [(places.get(turn.after, 0), index not in parents, index) for index, turn in turns]
    same, _, parent = max((each for each in found if each[0]), default=(0, False, -1))
    return Place(parent, same, asked)


async def sampled(
    chat: ChatServer, session: Session, ask: Ask, place: Place, *, may_branch: bool
) -> Turn:
    """Return a sampled turn, which is not stored yet.

    Raises:
        Edited: It would branch, and may not, as the store would say when it is sampled.
    """
    parent, given = place.parent, None
    if parent >= 0 and ask.prompt:
        rest = ask.prompt.encode()[place.same :].decode()
        given = await chat.text(rest) if rest else []
    elif parent >= 0:
        last = session.turns[parent].sampled.tokens[-1]
        given = await chat.continuation(ask, place.same - 1, last)
    if given is None:  # the template writes the history in another way from here on
        parent = -1
    if parent in session.parents and not may_branch:
        raise Edited
    given = await chat.prompt(ask) if given is None else given
    tokens = [*session.tokens(parent), *given]
    done = await chat.sample(ask, tokens)
    found, whole = await chat.reply(ask, tokens, done)
    message = Reply(ask, found).message
    after = text_digest(ask.prompt + whole) if ask.prompt else extended(place.asked, message)
    reply = json.dumps(found).encode()
    return Turn(
        parent=parent, request=ask.request, after=after, given=given, sampled=done, reply=reply
    )
