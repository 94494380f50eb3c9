-- The ledger of a consumer group: what became of the groups that it found or that were put since.
--
-- A put changes the counters of the task only. The fields put, filtered and expired of group:<group> hold
-- how far the consumer group's figures are from the task's: it joined later, or expired groups itself.
-- The groups that wait are counted in their pools.
--@include task pools

-- The task's share of a ledger: groups put, filtered, and too stale on arrival. `kept_back` counts groups
-- that were too stale to be sent.
local function put_totals()
  local known = numbers(task, 'filtered', 'kept_back', 'arrived_stale')
  return {put = number(puts, 'put') + known[1] + known[2], filtered = known[1], expired = known[3]}
end

-- Begin the ledger of a consumer group that found no groups yet.
local function begin_ledger(group)
  for name, total in pairs(put_totals()) do
    redis.call('HSET', key('group', group), name, string.format('%d', -total))
  end
end

local function waiting_in_all_pools(group)
  local waiting = 0
  for _, status in ipairs(STATUSES) do
    waiting = waiting + redis.call('ZCARD', key('ready', pool_of(group, status)))
  end
  return waiting
end

-- The counters of a consumer group by name, as numbers.
local function ledger_of(group)
  local ledger, stored = put_totals(), redis.call('HGETALL', key('group', group))
  for i = 1, #stored, 2 do
    ledger[stored[i]] = (ledger[stored[i]] or 0) + tonumber(stored[i + 1])
  end
  ledger.waiting = waiting_in_all_pools(group)
  return ledger
end
