-- Takes with a query: each waits in a queue of its own pool and query.
--
-- The hash queries:<pool> holds, by query, "<matches> <stamp>". At most so many of the groups that wait match
-- it: those that a take has found, and those that entered the pool since; inf while none has looked through
-- the whole pool. The stamp counts up by each match that enters. A query beyond PAGE.queries is not in the
-- hash: its takes look again by themselves.
--@include task


-- Name of the queue of takes with a query.
local function queue_of(pool, where)
  return where == '' and pool or pool .. '?' .. redis.sha1hex(where)
end

-- Queries that takes of a pool wait with: a flat list query, state, ...
local function queries_of(pool)
  return redis.call('HGETALL', key('queries', pool)) -- bound: PAGE.queries
end

-- Matches and stamp of a query; nil if puts do not count its matches.
local function state_of_query(state)
  local matches, stamp = string.match(state or '', '^(%S+) (%d+)$')
  return tonumber(matches or ''), tonumber(stamp or '')
end

local function note_query(pool, where, matches, stamp)
  redis.call('HSET', key('queries', pool), where, string.format('%.0f %.0f', matches, stamp))
end
