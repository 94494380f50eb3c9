-- Searches a pool for the groups that a take with a query asks for, a page a call.
--
-- A search is {place, found, stamp}: include/looking.lua, the matches so far, and the query's stamp when it
-- began (0: puts do not count its matches). What enters the pool in front of its place it does not meet; the
-- stamp tells that, and if it may be enough, the search begins again.
--@include task waiters queries where looking

-- Let a take wait, whose query at most so many waiting groups match; nil: as far as other takes know. Its
-- queue expires if nobody renews it. Returns the query's stamp, 0 if too many queries wait already.
local function enqueue_query(pool, ask, matches, now)
  local where, least, ttl_ms = ask.request.where, ask.request.least, ask.ttl_ms
  local queue, queries = queue_of(pool, where), key('queries', pool)
  enqueue(queue, ask.waiter, least, ttl_ms, now)
  redis.call('PEXPIRE', key('queue', queue), ttl_ms + WAKE_MS)
  redis.call('PEXPIRE', key('needs', queue), ttl_ms + WAKE_MS)
  local known, stamp = state_of_query(redis.call('HGET', queries, where))
  if not known and redis.call('HLEN', queries) >= PAGE.queries then
    return 0
  elseif not known then
    local time = redis.call('TIME') -- a stamp that no earlier one of the query has reached
    stamp = time[1] * 1000000 + time[2]
  end
  note_query(pool, where, matches or known or math.huge, stamp)
  return stamp
end

-- The matches that wait yet, by whose members a search goes on: a list, and a set.
local function still_waiting(pool, found)
  local list, set = {}, {}
  for i, score in ipairs(replies_of('ZMSCORE', key('ready', pool), found)) do
    if score then
      list[#list + 1], set[found[i]] = found[i], true
    end
  end
  return list, set
end

-- Search for what a Take or a Look asks for; `most` groups are enough. Returns how many match, at most, and
-- the first of them; a take that waits gets none until puts have counted as many as it needs. Returns nil if
-- there is more to look at, and the search, or nil to begin again.
local function search(pool, ask, most, now)
  local where, least, waits = ask.request.where, ask.request.least, ask.ttl_ms > 0
  local queries, queue, under_way = key('queries', pool), queue_of(pool, where), ask.search
  local known, stamp = state_of_query(redis.call('HGET', queries, where))
  if waits and known and known < least and redis.call('ZSCORE', key('queue', queue), ask.waiter) then
    enqueue_query(pool, ask, known, now)
    return known, {}
  end
  local query = read_query(where)
  local found, met = still_waiting(pool, under_way and under_way.found or {})
  local place = #found < most and look_behind(pool, under_way and under_way.place or '0', most,
    function(member, facts)
      if not met[member] and satisfies(query, facts) then
        found[#found + 1] = member
      end
      return #found == most
    end)
  local began = under_way and under_way.stamp or stamp or 0
  if place then
    local current = waits and enqueue_query(pool, ask, nil, now) or 0
    began = under_way and began or current
    return nil, {place = place, found = found, stamp = began}
  end
  local entered = began > 0 and (stamp or math.huge) - began or under_way and math.huge or 0
  if waits and began > 0 and entered > 0 and #found < least and #found + entered >= least then
    return nil
  end
  if waits and #found < least then
    enqueue_query(pool, ask, #found + entered, now)
  end
  return #found, found
end
