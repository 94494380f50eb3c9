-- Adds groups to the pools in which they wait, and takes them out.
--
-- A pool holds the groups that wait for one consumer group in one status: ready:<pool> sorts them by
-- the task's order, versions:<pool> and newest:<pool> by policy version for expiry. A leased group is in no
-- pool.
--
-- In a sampled order the score is a weight, and a group's place is clock + Exp(1) / weight, where
-- clock is the place of the group taken last. Exponentials have no memory, so at any time the lowest
-- place is a draw with probability weight / sum of weights (Efraimidis and Spirakis 2006).
--@include task facts

-- Facts of a group of which only its arrival matters.
local ARRIVED = {}

-- The groups that this script has let wait, by pool.
local entered = {}

-- The pool in which a group waits if it waits: of the status it was moved to, else of its facts.
local function home_of(group, member, facts)
  return pool_of(group, redis.call('HGET', key('moved', group), member) or facts.status)
end

-- Whether ready:<pool> sorts all groups by oldest policy version.
local function sorts_by_version()
  return rules().order == 'stalest'
end

-- Whether versions:<pool> sorts the groups.
local function indexes_versions()
  return rules().max_staleness and not sorts_by_version()
end

-- The sorted set that holds a pool by oldest policy version.
local function versions_of(pool)
  return key(sorts_by_version() and 'ready' or 'versions', pool)
end

local seeded = false
local function exponential()
  if not seeded then
    local time = redis.call('TIME')
    math.randomseed((time[1] * 1000003 + time[2]) % 2147483647)
    seeded = true
  end
  return -math.log(1 - math.random())
end

-- A group's place in the order; `clock` is given if places are drawn.
local function place(facts, member, clock)
  if clock then
    return facts.score > 0 and clock + exponential() / facts.score or math.huge
  elseif facts.score == '-arrival' then
    return '-' .. member
  end
  return facts.score or member
end

local function clock_of(group, pool)
  return rules().sampled and tonumber(redis.call('HGET', key('clock', group), pool) or '0')
end

-- Add groups to a pool; `all` holds their facts.
local function enter(group, pool, members, all)
  local rule, clock = rules(), clock_of(group, pool)
  if clock then
    --@include places
    clock = restart_if_crowded(all, clock) and 0 or clock
  end
  local ready, versions, newest, by_version = {}, {}, {}, indexes_versions()
  for i, member in ipairs(members) do
    local facts = all[i]
    ready[#ready + 1], ready[#ready + 2] = place(facts, member, clock), member
    if by_version and facts.version then
      versions[#versions + 1], versions[#versions + 2] = facts.version, member
    end
    if rule.max_token_staleness and facts.newest then
      newest[#newest + 1], newest[#newest + 2] = facts.newest, member
    end
  end
  in_parts('ZADD', key('ready', pool), ready)
  in_parts('ZADD', key('versions', pool), versions)
  in_parts('ZADD', key('newest', pool), newest)
  if rule.sampled then
    --@include places
    weigh(pool, members, all, 1)
  end
  entered[pool] = entered[pool] or {}
  for _, member in ipairs(members) do
    table.insert(entered[pool], member)
  end
end

-- Remove groups from a pool. `all` holds their facts if the caller has read them. `lowest_of` is a
-- sorted set whose lowest members they are, if the caller knows one: removing by rank is cheaper.
local function withdraw(group, pool, members, all, lowest_of)
  local rule = rules()
  local function remove(kind)
    local name = key(kind, pool)
    if name == lowest_of then
      redis.call('ZREMRANGEBYRANK', name, 0, #members - 1)
    else
      in_parts('ZREM', name, members)
    end
  end
  remove('ready')
  if indexes_versions() then
    remove('versions')
  end
  if rule.max_token_staleness then
    remove('newest')
  end
  if rule.sampled then
    --@include places
    weigh(pool, members, all or facts_of_all(members), -1)
    if redis.call('EXISTS', key('ready', pool)) == 0 then
      redis.call('HDEL', key('clock', group), pool) -- places start again at 0, where they are exact
    end
  end
end

-- Whether this script has let groups wait.
local function has_entered()
  return next(entered) ~= nil
end
