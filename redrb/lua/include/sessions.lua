-- The sessions of agents at a gateway, until they are parts of groups; any gateway goes on with any of them.
--
-- The hash session:<digest> holds `head`, a record packed with cmsgpack: `id`; `group`, the key of the group
-- in parts, and `index`, `size`, `least` and `bury` of the part; `prompt`; `tags`, as JSON; `series` and
-- `right`, the right of the group, '' if it has none; `opener`, a name of the request that began it; `place`,
-- and `incarnation` of the task. It holds
-- `turns` and `bytes`, their number and size; each turn by its index; "request <digest>", the index of the
-- turn that answers it; "child <index>", the newest turn that goes on from a turn, and "path <index>", the
-- tokens up to its end; `samples` and `tokens`, the number of turns that none goes on from, and the tokens of
-- all their paths; `over`, if the session gets no more turns; `shared`, if equal requests have found it. The
-- name is a digest of the session's secret.
--
-- gathering:<group> holds of a group: `incarnation`, `series`, `right` and `tags`; `next`, sessions that
-- began; `dropped` of them; and `open`, those that are neither dropped nor over. filling:<place> has the key
-- of the group that the next session joins; place is a digest of the prompt and of the group's options. All
-- these keys expire when no session of the group was used for the time to live that gateways give it.
--
-- For those who look, sessions sorts the ids of sessions that are neither dropped nor over by the server's
-- time at which they expire, and the hash parts counts `sessions` that began and their `turns`; it holds
-- `session_ms`, the newest time to live.
--@include task clock facts

local HOLDER = '#sessions/0' -- holds the rights of groups that have no part yet
local ON_THEIR_WAY_MS = 30000 -- time that a gateway has to put a session that is over

-- The head of a session; nil if there is none, or it is of a task that was deleted.
local function head_of(session)
  local packed = redis.call('HGET', session, 'head')
  local head = packed and cmsgpack.unpack(packed)
  return head and head.incarnation == rules().incarnation and head or nil
end

-- A session is used: it, its group and their right live on for `ttl_ms`. A session that is over keeps neither
-- the right nor a group that lacks parts.
local function renew(session, head, ttl_ms)
  redis.call('PEXPIRE', session, ttl_ms)
  redis.call('PEXPIRE', key('gathering', head.group), ttl_ms)
  local filling = key('filling', head.place)
  if redis.call('GET', filling) == head.group then
    redis.call('PEXPIRE', filling, ttl_ms)
  end
  if redis.call('HEXISTS', session, 'over') == 1 then
    return
  end
  redis.call('ZADD', key('sessions'), string.format('%.0f', server_ms() + ttl_ms), head.id)
  local ends = string.format('%.0f', set_clock() + ttl_ms)
  redis.call('ZADD', key('part_due'), 'XX', 'GT', ends, head.group)
  if head.right ~= '' and redis.call('HGET', key('admission'), 'series') == head.series then
    redis.call('ZADD', key('holds'), 'XX', 'GT', ends, head.right)
  end
end

-- A session gets no more turns, `now_first` for the first time. Returns whether its group has no open session
-- and will not be complete: it waits only for the parts of sessions that are over.
local function leave(head, now_first)
  local gathering = key('gathering', head.group)
  if redis.call('EXISTS', gathering) == 0 then
    return false
  end
  add(gathering, 'open', now_first and -1 or 0)
  local known = numbers(gathering, 'next', 'dropped', 'open')
  local short = known[1] == head.size and known[2] > 0 and known[3] == 0
  if short then
    redis.call('ZADD', key('part_due'), 'XX', 'LT', string.format('%.0f', set_clock() + ON_THEIR_WAY_MS),
      head.group)
  end
  return short
end
