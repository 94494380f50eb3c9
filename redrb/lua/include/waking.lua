-- Wakes the takes for which there are groups now, the puts for which there is room, and the makers for which
-- there are rights.
--@include task clock facts pools capacity waiters where plan tags queries

-- How many takes wait for a pool.
local function queued_for(pool)
  local queued, queries = redis.call('ZCARD', key('queue', pool)), queries_of(pool)
  for i = 1, #queries, 2 do
    queued = queued + redis.call('ZCARD', key('queue', queue_of(pool, queries[i])))
  end
  return queued
end

-- Let a take wait for groups that match its query, of which it has found `matches`. Its queue expires
-- if nobody renews it.
local function enqueue_query(pool, where, matches, ttl_ms)
  local queue = queue_of(pool, where)
  redis.call('HSET', key('queries', pool), where, matches)
  redis.call('PEXPIRE', key('queue', queue), ttl_ms + WAKE_MS)
  redis.call('PEXPIRE', key('needs', queue), ttl_ms + WAKE_MS)
end

-- A take has leased some of the groups that match its query.
local function leave_query(pool, where, leased)
  local queries = key('queries', pool)
  if redis.call('EXISTS', key('queue', queue_of(pool, where))) == 0 then
    redis.call('HDEL', queries, where)
  elseif leased > 0 then
    redis.call('HINCRBY', queries, where, -leased)
  end
end

-- How many of the groups with these facts match a query.
local function matches_among(all, where)
  local found, query = 0, resolve(rules().names, cjson.decode(where))
  for _, facts in ipairs(all) do
    for _, leaf in ipairs(query.leaves) do
      leaf.scores = {tag_score(facts.tags and facts.tags[leaf.tag])}
    end
    found = found + (satisfies(query.root, 1) and 1 or 0)
  end
  return found
end

-- Wake takes of a pool that wait with a query. `all` holds the facts of groups that have just entered
-- the pool; without it, for another reason that takes may go on now, all queries are looked at.
local function wake_queries(pool, now, all)
  local queries = queries_of(pool)
  for i = 1, #queries, 2 do
    local where, matches = queries[i], tonumber(queries[i + 1])
    local queue = queue_of(pool, where)
    local new = all and matches_among(all, where) or 0
    if redis.call('EXISTS', key('queue', queue)) == 0 then -- its takes have died
      redis.call('HDEL', key('queries', pool), where)
    elseif new > 0 or not all then
      redis.call('HINCRBY', key('queries', pool), where, new)
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
  for pool, all in pairs(entered) do
    wake_pool(pool, now)
    wake_queries(pool, now, all)
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

-- After a take that finds too few groups has entered or left its queue: note the matches of its query, and
-- wake takes that need fewer groups, and makers whose groups the take waits for.
local function wake_others(pool, where, matches, ttl_ms, now)
  if where == '' then
    wake_pool(pool, now)
  elseif ttl_ms > 0 then
    enqueue_query(pool, where, matches, ttl_ms)
  else
    leave_query(pool, where, 0)
  end
  wake_makers(now)
end
