-- Wakes the takes for which there are groups now, the puts for which there is room, and the makers for which
-- there are rights.
--@include task clock facts pools capacity waiters queries

-- How many takes wait for a pool.
local function queued_for(pool)
  local queued, queries = redis.call('ZCARD', key('queue', pool)), queries_of(pool)
  for i = 1, #queries, 2 do
    queued = queued + redis.call('ZCARD', key('queue', queue_of(pool, queries[i])))
  end
  return queued
end

-- A take has left the queue of its query, and has leased some of the groups that match it.
local function leave_query(pool, where, leased)
  local matches, stamp = state_of_query(redis.call('HGET', key('queries', pool), where))
  if redis.call('EXISTS', key('queue', queue_of(pool, where))) == 0 then
    redis.call('HDEL', key('queries', pool), where)
  elseif matches then
    note_query(pool, where, math.max(matches - leased, 0), stamp)
  end
end

-- How many groups match a query; `all` holds their facts.
local function matches_among(all, where)
  --@include where
  local found, query = 0, read_query(where)
  for _, facts in ipairs(all) do
    found = found + (satisfies(query, facts) and 1 or 0)
  end
  return found
end

-- Wake takes of a pool that wait with a query, after `members` have entered it; without them, for another
-- reason that takes may go on now.
local function wake_queries(pool, now, members)
  local queries = queries_of(pool)
  local all = #queries > 0 and facts_of_all(members or {})
  for i = 1, #queries, 2 do
    local where, matches, stamp = queries[i], state_of_query(queries[i + 1])
    local queue = queue_of(pool, where)
    local new = matches and matches_among(all, where) or 0
    if not matches or redis.call('EXISTS', key('queue', queue)) == 0 then -- its takes have died
      redis.call('HDEL', key('queries', pool), where)
    elseif new > 0 or not members then
      note_query(pool, where, matches + new, stamp + new)
      wake(queue, matches + new, now)
    end
  end
end

-- Wake takes without a query that wait for a pool: as many as it satisfies.
local function wake_pool(pool, now)
  if redis.call('EXISTS', key('queue', pool)) == 1 then
    wake(pool, redis.call('ZCARD', key('ready', pool)), now)
  end
end

-- Wake takes for the groups that this script has let wait.
local function wake_entered(now)
  local names = {}
  for pool in pairs(entered) do
    names[#names + 1], names[#names + 2] = key('queue', pool), key('queries', pool)
  end
  if #names == 0 or redis.call('EXISTS', unpack(names)) == 0 then
    return
  end
  now = now or now_ms()
  for pool, members in pairs(entered) do
    wake_pool(pool, now)
    wake_queries(pool, now, members)
  end
end

-- Wake makers that wait for rights.
local function wake_makers(now)
  if rules().groups_per_version and redis.call('EXISTS', key('queue', '#admission')) == 1 then
    --@include admission
    wake_rights(now)
  end
end

-- Wake puts that wait for room, and makers that wait for rights.
local function wake_room(now)
  if redis.call('EXISTS', key('queue', '#room')) == 1 then
    wake('#room', room_left(), now or now_ms())
  end
  wake_makers(now)
end

-- After a take that finds too few groups has entered or left its queue: wake takes that need fewer groups,
-- and makers whose groups the take waits for.
local function wake_others(pool, where, ttl_ms, now)
  if where == '' then
    wake_pool(pool, now)
  elseif ttl_ms == 0 then
    leave_query(pool, where, 0)
  end
  wake_makers(now)
end
